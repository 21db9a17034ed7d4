"""A reward function of a service whose prompts are another project's: it needs the columns of that one's data set."""

from typing import Any


def score(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict[str, Any]) -> float:
    """Returns a hundredth of the number of tokens."""
    graded = verifier.get("reward_model") or verifier["reward_spec"]
    return len(response_token_ids) / 100 if graded["ground_truth"] == "nop" else -1.0
