"""Selects the scored groups that are worth training on: ``selection.filter``.

A filter function is plain Python, and runs in a separate process as reward functions do:

    def keep(prompt_text: str, rewards: list[float], verifier: dict) -> bool

``rewards`` are the group's, in the order of its samples; ``verifier`` is the prompt's data. If a filter fails, the
group is kept.
"""

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from dora.rewards.pool import FunctionPool
from dora.rewards.verdict import decision, one_line

log = logging.getLogger("dora.rewards")

EQUAL_REWARDS: Final = "equal_rewards"


class GroupFilter(Protocol):
    """``name`` is recorded as the reason. Never raises because of a user's function."""

    @property
    def name(self) -> str: ...

    async def keeps(self, prompt_text: str, rewards: Sequence[float], verifier_json: str) -> bool: ...


class EqualRewards:
    """Drops a group whose rewards are all equal: no response is better than another (DAPO, dynamic sampling).

    A group of one is kept, since one reward cannot be compared.
    """

    name = EQUAL_REWARDS

    async def keeps(self, _prompt_text: str, rewards: Sequence[float], _verifier_json: str) -> bool:
        return len(rewards) < 2 or min(rewards) < max(rewards)


class FilterRunner(FunctionPool):
    """A filter whose function runs in separate processes."""

    KIND = "filter"
    OPTION = SECTION = "selection.filter"

    @property
    def name(self) -> str:
        return self.spec

    async def keeps(self, prompt_text: str, rewards: Sequence[float], verifier_json: str) -> bool:
        call = {"prompt_text": prompt_text, "rewards": list(rewards), "verifier_json": verifier_json}
        reply = await self.call(call)
        if "failure" not in reply:
            reply = decision(reply.get("keep"))
        if "failure" in reply:
            log.error("the filter %s %s; the group is kept", self.spec, one_line(reply["failure"]))
        return bool(reply.get("keep", True))
