"""The verifier of the counting task (``dora.prompts.counting``)."""

import re
from typing import Any


def score(
    prompt_text: str, response_text: str, response_token_ids: list[int], verifier: dict[str, Any]
) -> dict[str, Any]:
    """Returns the share of numbers that are right and in place, relative to the longer of both lists: 0 to 1."""
    expected = list(range(verifier["first"], verifier["last"] + 1))
    found = [int(digits[:9]) for digits in re.findall(r"[0-9]+", response_text)]
    right = sum(one == other for one, other in zip(expected, found, strict=False))
    return {
        "reward": right / max(len(expected), len(found)),
        "components": {"correct": float(found == expected)},
        "log": f"asked for {expected[0]} to {expected[-1]}, found {response_text[:200]!r}",
    }
