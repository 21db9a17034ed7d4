"""The verifier of prompts whose environment gives the reward (``dora.prompts.tasks``)."""

from typing import Any


def score(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict[str, Any]) -> float:
    """Fails: a session that its environment ended without a reward has none."""
    raise ValueError("the environment gave no reward")
