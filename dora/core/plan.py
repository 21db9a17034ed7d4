"""A policy's answer: a plan, and the trigger that asked for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final


class Trigger(Enum):
    """The reason of a re-balancing cycle."""

    UPDATE = "update"  # a version was published
    PRESSURE = "pressure"  # a worker's KV use is above the threshold, or requests queue up
    TIME = "time"  # the period has passed
    MEMBERSHIP = "membership"  # a worker joined or left, or a version lost its last worker
    STARVED = "starved"  # a worker of an old version has nothing left to do
    OPERATOR = "operator"


POOL: Final = -2  # instead of a worker's index: park the request
QUEUE: Final = -3  # its KV is dropped: the request waits and is re-prefilled


@dataclass(frozen=True, slots=True)
class Move:
    """Migrate the request in ``row`` to the worker in ``target``, or to ``POOL`` or ``QUEUE``."""

    row: int
    target: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``targets`` maps every live index that is not draining to the version to host; ``moves`` are in order."""

    targets: Mapping[int, int] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
