"""Which scored groups are worth training on: ``selection.filter``.

A filter function is plain Python, and runs in a process of its own as reward functions do:

    def keep(prompt_text: str, rewards: list[float], verifier: dict) -> bool

``rewards`` are the group's, in order of its samples; ``verifier`` came with the prompt. One that fails lets nothing go.
"""

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from dora.rewards.pool import FunctionPool
from dora.rewards.verdict import decision, one_line

log = logging.getLogger("dora.rewards")

EQUAL_REWARDS: Final = "equal_rewards"


class GroupFilter(Protocol):
    """``name`` goes into the record as the reason. Never raises for what a user's function does."""

    @property
    def name(self) -> str: ...

    async def keeps(self, prompt_text: str, rewards: Sequence[float], verifier_json: str) -> bool: ...


class EqualRewards:
    """Lets a group go whose rewards are all the same: no response is better than another (DAPO, dynamic sampling).

    A group of one says nothing about itself and is kept.
    """

    name = EQUAL_REWARDS

    async def keeps(self, _prompt_text: str, rewards: Sequence[float], _verifier_json: str) -> bool:
        return len(rewards) < 2 or min(rewards) < max(rewards)


class FilterRunner(FunctionPool):
    """A filter whose function runs in processes of its own."""

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
