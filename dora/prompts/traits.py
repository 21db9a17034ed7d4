"""Features of a prompt from which length predictors learn."""

import math

from blake3 import blake3

from dora.data.types import Prompt


def key_of(prompt: Prompt) -> str:
    """A key that is the same for a prompt in every epoch."""
    tokens = ",".join(map(str, prompt.token_ids))
    return blake3(tokens.encode()).hexdigest(length=8)


def features_of(prompt: Prompt) -> tuple[float, ...]:
    """Returns as many finite numbers for every prompt: variety of tokens, share of digits, length of the numbers."""
    tokens, text = prompt.token_ids, prompt.text
    digits = sum(character.isdigit() for character in text)
    numbers = "".join(character if character.isdigit() else " " for character in text).split()
    return (
        math.log1p(len(set(tokens))),
        digits / max(1, len(text)),
        math.log1p(max(map(len, numbers), default=0)),
        math.log1p(len(numbers)),
    )
