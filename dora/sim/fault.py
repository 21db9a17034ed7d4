"""One fault, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` strikes at ``at_s``. ``subject`` picks whom, among those there are then; ``amount`` (0..1) how much."""

    at_s: float
    kind: str
    subject: int
    amount: float


def pick(items: Sequence[Item], subject: int) -> Item | None:
    return items[subject % len(items)] if items else None
