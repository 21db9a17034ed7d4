"""One fault, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` strikes at ``at_s``. ``subject`` picks whom, among those there are then; ``amount`` (0..1) how much."""

    at_s: Annotated[float, "simulated time at which it strikes"]
    kind: Annotated[str, "what happens"]
    subject: Annotated[int, "a number that picks whom, among those there are then"]
    amount: Annotated[float, "how much, 0 to 1"]


def pick(items: Sequence[Item], subject: int) -> Item | None:
    return items[subject % len(items)] if items else None
