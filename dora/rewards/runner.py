"""Runs a reward function on one response after the other."""

from collections.abc import Sequence

import numpy as np

from dora.data.trajectory import Int32Array
from dora.data.types import Reward
from dora.rewards.pool import FunctionPool
from dora.rewards.verdict import reward_of


class RewardRunner(FunctionPool):
    """A verifier whose function runs in processes of its own."""

    KIND, OPTION, SECTION = "reward", "--reward", "reward"

    async def score(
        self,
        prompt_text: str,
        response_text: str | None,
        response_token_ids: Sequence[int] | Int32Array,
        verifier_json: str,
    ) -> Reward:
        """The verdict on one response. Never raises for what the function does: see ``Reward.valid``.

        ``response_text`` None: decoded from the token ids. Raises RuntimeError after ``close``.
        """
        reply = await self.call(
            {
                "prompt_text": prompt_text,
                "response_text": response_text,
                "response_token_ids": np.asarray(response_token_ids, np.int32).tobytes(),
                "verifier_json": verifier_json,
            }
        )
        return reward_of(self.spec, reply)
