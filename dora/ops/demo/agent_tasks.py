"""The environments of ``dora demo --agent``, as a user writes them (docs/environments.md).

Each is a class with ``reset`` and ``step``. Its tool takes a moment, as a real one does, so that sessions of other
prompts use the engines meanwhile.
"""

import asyncio
import random
from statistics import fmean
from typing import Any, Final

from dora.agents.environment.protocol import End, Messages, Reply, Task
from dora.models.tiny_vocabulary import CLASSES
from dora.rewards.counting import score

TOOL_S: Final = 0.3  # the longest that a tool takes
LOOKUP: Final = "lookup"
CHECKER: Final = "checker"
SHOWN: Final = 3  # numbers of the list that the checker tells


class Lookup:
    """A task for the tiny models. A tool names a class of characters, which the policy then writes.

    The policy's first turn asks the tool. Each later one is rewarded for its share of characters of the class. A policy
    that ignores the tool gets a quarter of the reward.
    """

    deterministic = True  # another process can go on with its sessions, and an equal one gets an equal reward
    QUESTION = "?"
    TURNS, TURN_TOKENS = 3, 8  # a shorter turn is rewarded less

    def __init__(self) -> None:
        self.named = ""
        self.answers: list[str] = []
        self.rewards: dict[int, float] = {}
        self.chance = random.Random()

    async def reset(self, task: Task) -> Messages:
        self.chance = random.Random(task.prompt_id)
        self.named = self.chance.choice(tuple(CLASSES))
        return [{"role": "user", "content": self.QUESTION}]

    async def step(self, reply: Reply) -> Messages | End:
        if reply.turn:
            self.rewards[reply.turn] = sum(each in CLASSES[self.named] for each in reply.text) / self.TURN_TOKENS
            self.answers.append(reply.text)
        if reply.turn + 1 == self.TURNS:
            components = {f"turn_{turn}": reward for turn, reward in self.rewards.items()}
            log = f"{self.named}: {' then '.join(map(repr, self.answers))}"
            return End(fmean(self.rewards.values()), components, self.rewards, log)
        await asyncio.sleep(self.chance.uniform(0, TOOL_S))
        return [{"role": "tool", "name": LOOKUP, "content": self.named}]


class Checked:
    """A task for language models: list numbers, and list them again after a checker has said which are right."""

    deterministic = True
    TURNS = 2
    QUESTION = "List the numbers from {first} to {last}, separated by commas."
    RIGHT = "All numbers are right. Write the list once more."
    WRONG = "That is not right. The list begins {begin}. Write the numbers from {first} to {last}."

    def __init__(self) -> None:
        self.task: dict[str, Any] = {}
        self.rewards: dict[int, float] = {}
        self.chance = random.Random()

    async def reset(self, task: Task) -> Messages:
        self.task, self.chance = dict(task.verifier), random.Random(task.prompt_id)
        return [{"role": "user", "content": self.QUESTION.format(**self.task)}]

    async def step(self, reply: Reply) -> Messages | End:
        verdict = score("", reply.text, [], self.task)
        self.rewards[reply.turn] = verdict["reward"]
        if reply.turn + 1 == self.TURNS:
            return End(fmean(self.rewards.values()), verdict["components"], self.rewards, log=verdict["log"])
        await asyncio.sleep(self.chance.uniform(0, TOOL_S))
        return [{"role": "user", "name": CHECKER, "content": self._told(verdict)}]

    def _told(self, verdict: dict[str, Any]) -> str:
        if verdict["components"]["correct"]:
            return self.RIGHT
        first = self.task["first"]
        return self.WRONG.format(**self.task, begin=", ".join(map(str, range(first, first + SHOWN))))
