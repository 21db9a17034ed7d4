"""Runs a reward function on one response after the other."""

from collections.abc import Sequence

from dora.rewards.pool import FunctionPool
from dora.types import Reward


class RewardRunner(FunctionPool):
    """A verifier whose function runs in processes of its own."""

    OPTION, SECTION = "--reward", "reward"

    async def score(
        self, prompt_text: str, response_text: str | None, response_token_ids: Sequence[int], verifier_json: str
    ) -> Reward:
        """The verdict on one response. Never raises for what the function does: see ``Reward.valid``.

        ``response_text`` None: decoded from the token ids. Raises RuntimeError after ``close``.
        """
        reply = await self.call(
            {
                "prompt_text": prompt_text,
                "response_text": response_text,
                "response_token_ids": list(response_token_ids),
                "verifier_json": verifier_json,
            }
        )
        if "failure" in reply:
            return Reward(value=0.0, log=f"reward function {self.spec!r} {reply['failure']}", valid=False)
        return Reward(value=reply["reward"], components=reply["components"], log=reply["log"])
