"""Runs a reward function on responses."""

from collections.abc import Sequence

import numpy as np

from dora.data.trajectory import Int32Array
from dora.data.types import Reward
from dora.rewards.pool import FunctionPool
from dora.rewards.verdict import reward_of


class RewardRunner(FunctionPool):
    """A verifier whose function runs in separate processes."""

    KIND, OPTION, SECTION = "reward", "--reward", "reward"

    async def score(
        self,
        prompt_text: str,
        response_text: str | None,
        response_token_ids: Sequence[int] | Int32Array,
        verifier_json: str,
        name: str = "",
    ) -> Reward:
        """Scores one response. Never raises because of the function: see ``Reward.valid``.

        If ``response_text`` is None, it is decoded from the token ids. ``name`` is the response's, for what the
        function prints. Raises RuntimeError after ``close``.
        """
        reply = await self.call(
            {
                "prompt_text": prompt_text,
                "response_text": response_text,
                "response_token_ids": np.asarray(response_token_ids, np.int32).tobytes(),
                "verifier_json": verifier_json,
                "name": name,
            }
        )
        return reward_of(self.spec, reply)
