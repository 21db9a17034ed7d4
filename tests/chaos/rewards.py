"""A reward function that takes some milliseconds, so that responses that are being scored can be seen."""

import hashlib
from typing import Any

from dora.rewards import tiny

_ROUNDS = 20_000


def score(prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict[str, Any]) -> float:
    """That of the tiny models' task."""
    digest = response_text.encode()
    for _ in range(_ROUNDS):
        digest = hashlib.blake2s(digest).digest()
    return tiny.score(prompt_text, response_text, response_token_ids, verifier)
