"""An environment whose code ends its process, or blocks it, once for each of some prompts."""

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dora.agents.environment import End, Messages, Reply, Task
from dora.data.trajectory import Trajectory
from tests.session_audit import digest, spans
from tests.session_script import turns_of

ENVIRONMENT: Final = f"{__name__}:Breaking"
SHARE: Final = 0.15  # of the submitted prompts
BREAKS_SHARE: Final = 0.2  # of those
CODE_MOST_S: Final = 10.0  # that the code of one session may take; then its process is started again


def is_breaking(prompt_id: str) -> bool:
    """Returns whether this environment drives the prompt's sessions."""
    return prompt_id.startswith("p") and random.Random(f"breaking {prompt_id}").random() < SHARE


def as_breaking(row: dict[str, Any], breaks: Path) -> dict[str, Any]:
    """Returns a prompt's row for this environment, which brings the prompt.

    ``breaks``: the folder with a file for each prompt that broke.
    """
    own = {"prompt": "", "environment": ENVIRONMENT, "verifier": {"breaks": str(breaks)}}
    return {name: value for name, value in row.items() if name != "messages"} | own


class Breaking:
    """The reward is the number of turns, and the log a digest of all sampled tokens."""

    deterministic = True

    async def reset(self, task: Task) -> Messages:
        self._task = task
        self._token_ids: list[int] = []
        return [{"role": "user", "content": "ab"}]

    async def step(self, reply: Reply) -> Messages | End:
        prompt_id = self._task.prompt_id
        if reply.turn == 0:
            _break_once(prompt_id, Path(self._task.verifier["breaks"]))
        self._token_ids += reply.token_ids
        if reply.turn + 1 == turns_of(prompt_id):
            return End(float(reply.turn + 1), log=digest(self._token_ids))
        return [{"role": "user", "content": "cd"}]


def _break_once(prompt_id: str, breaks: Path) -> None:
    chance = random.Random(f"breaks {prompt_id}")
    if chance.random() >= BREAKS_SHARE:
        return
    try:
        (breaks / prompt_id).touch(exist_ok=False)
    except FileExistsError:
        return
    if chance.random() < 0.5:
        os._exit(3)
    time.sleep(100 * CODE_MOST_S)


def wrong(branches: Sequence[Trajectory]) -> str:
    """What a session's record says that this environment did not do; empty: nothing."""
    first, turns = branches[0], turns_of(branches[0].prompt_id)
    found = spans(first)
    if len(branches) != 1 or len(found) != turns:
        return f"{first.trajectory_id} has {len(branches)} branches and {len(found)} turns of {turns}"
    if not first.reward_valid or first.reward != turns:
        return f"{first.trajectory_id} has reward {first.reward} of {turns}"
    if first.verifier_log != digest(first.response_token_ids[first.loss_mask.astype(bool)]):
        return f"{first.trajectory_id} has other tokens than its environment saw"
    return ""
