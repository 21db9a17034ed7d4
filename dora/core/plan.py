"""What a policy answers: a plan, and why it was asked for one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final


class Trigger(Enum):
    """Why a re-balancing cycle runs."""

    UPDATE = "update"  # a version was published
    PRESSURE = "pressure"  # a worker's KV use is above the threshold, or requests queue up
    TIME = "time"  # the period is over
    MEMBERSHIP = "membership"  # a worker came or went, or a version's last worker did
    STARVED = "starved"  # a worker of an old version has nothing left to do
    OPERATOR = "operator"


POOL: Final = -2  # in place of a worker's index: park it
LINE: Final = -3  # its KV is dropped: it waits in line, and is re-prefilled


@dataclass(frozen=True, slots=True)
class Move:
    """Migrate the request in ``row`` to the worker in ``target``, or to ``POOL`` or ``LINE``."""

    row: int
    target: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``targets``: index -> version it is to host, for every living index that is not draining; ``moves``: in order."""

    targets: Mapping[int, int] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
