"""The verifier of the tiny models' task (``dora.prompts.tiny``)."""

from typing import Any


def score(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict[str, Any]) -> float:
    """Returns the share of characters that belong to ``verifier["characters"]``; 0 for an empty response."""
    if not response_text:
        return 0.0
    characters = frozenset(verifier["characters"])
    return sum(character in characters for character in response_text) / len(response_text)
