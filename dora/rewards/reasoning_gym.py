"""The verifier of reasoning-gym prompts (``dora.prompts.reasoning_gym``): the task's own scoring function."""

from functools import lru_cache
from typing import Any

import reasoning_gym

from dora.rewards.answer import final_answer

_scorer = lru_cache(maxsize=None)(reasoning_gym.get_score_answer_fn)


def score(
    prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict[str, Any]
) -> dict[str, Any]:
    """Returns the task's score of the final answer, 0 to 1. Most tasks give partial credit within other text."""
    entry = verifier["entry"]
    found = final_answer(response_text)
    value = float(_scorer(verifier["task"])(answer=found, entry=entry))
    return {
        "reward": value,
        "components": {"correct": float(value >= 1.0)},
        "log": f"expected {str(entry['answer'])[:200]!r}, found {found[:200]!r}",
    }
