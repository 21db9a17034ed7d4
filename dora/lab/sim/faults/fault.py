from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``kind`` occurs at ``at_s`` to the present ``subject``, scaled by ``amount`` (0..1)."""

    at_s: Annotated[float, "simulated time at which it strikes"]
    kind: Annotated[str, "what happens"]
    subject: Annotated[int, "a number that picks whom, among those there are then"]
    amount: Annotated[float, "how much, 0 to 1"]


def pick(items: Sequence[Item], subject: int) -> Item | None:
    return items[subject % len(items)] if items else None
