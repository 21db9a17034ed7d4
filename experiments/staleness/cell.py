"""A cell of the map: one training run with a constant lag, wholly specified."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from dora.client.replay import ReplayBy
from dora.data.types import Prompt
from dora.prompts.counting import counting_source
from dora.prompts.source import PromptSource
from dora.prompts.tiny import tiny_source
from dora.prompts.tokenizer import ChatTokenizer
from dora.rewards.counting import score as counting_score
from dora.rewards.tiny import score as tiny_score

LEVEL_STEPS: Final = 5  # the level is reached by the mean reward of so many versions


@dataclass(frozen=True, slots=True)
class Task:
    """A task to learn. ``level``: the reward to reach. ``layers``: that are trained, the last ones; 0: all.
    ``probed``: responses of a step on which the movement of the policy is measured.
    """

    model: str
    source: Callable[[ChatTokenizer, int], PromptSource]
    score: Callable[..., Any]
    level: float
    groups: int
    group_size: int
    max_tokens: int
    layers: int = 0
    probed: int = 16

    def reward(self, prompt: Prompt, text: str, token_ids: list[int]) -> float:
        found = self.score(prompt.text, text, token_ids, json.loads(prompt.verifier_json))
        return float(found["reward"] if isinstance(found, Mapping) else found)


TASKS: Final[Mapping[str, Task]] = {
    "tiny": Task("tiny", tiny_source, tiny_score, level=0.9, groups=8, group_size=8, max_tokens=32),
    # perfect answers, cut to so many tokens, have a reward of 0.96; the model begins at 0.2
    "counting": Task(
        "smollm2", counting_source, counting_score, level=0.7, groups=4, group_size=4, max_tokens=32, layers=4, probed=4
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. Every fresh response of step ``t`` is sampled by the policy of step ``max(0, t - lag)``."""

    task: str
    objective: str
    learning_rate: float
    lag: int
    seed: int
    steps: int  # at most: a run ends once its reward is at the task's level
    replay: float = 0.0  # share of replays in the groups trained on; a step has as many fresh groups whatever it is
    replay_by: ReplayBy = "age"

    @property
    def name(self) -> str:
        replay = f"-replay{self.replay:g}-{self.replay_by}" if self.replay else ""
        return f"{self.task}-{self.objective}-lr{self.learning_rate:g}-lag{self.lag}{replay}-seed{self.seed}"

    @property
    def specification(self) -> dict[str, Any]:
        """As it reads in a result. Without replays it has no fields of them."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found if self.replay else {name: found[name] for name in found if not name.startswith("replay")}
