"""A worker's stream to the orchestrator, as the transport provides it: each direction is reliable and ordered, or
broken.

Messages have numbers. The network may lose, delay, duplicate and reorder them. The receiver delivers each once and in
order, and holds early ones back. A message that is missing for ``GAP_LIMIT_S`` breaks the whole stream, which ends the
worker's epoch. To the core a lost message is a lost worker, never a missing event.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from random import Random
from typing import Any, Protocol

GAP_LIMIT_S = 4.0
OVERTAKEN_LATENCIES = 5.0  # extra latency of a reordered message, as a multiple of the latency


class Trouble(Enum):
    """A fault of one message in transit."""

    LOST = auto()
    LATE = auto()
    DUPLICATED = auto()
    OVERTAKEN = auto()


class Clock(Protocol):
    now_s: float

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None: ...


class Wire:
    """One direction. Each of ``troubles`` hits one of the next messages. None arrives before ``silent_until_s``."""

    def __init__(
        self, clock: Clock, latency_s: float, random: Random, deliver: Callable[[Any], None], broke: Callable[[], None]
    ) -> None:
        self.troubles: deque[tuple[Trouble, float]] = deque()  # with the extra delay of a late message
        self.silent_until_s = 0.0
        self._clock, self._latency_s, self._random = clock, latency_s, random
        self._deliver, self._broke = deliver, broke
        self._sent = 0
        self._next = 0  # number of the next message to deliver
        self._early: dict[int, Any] = {}
        self._end: float = inf  # number of the last message, if the sender has ended
        self._last: Any = None

    def send(self, message: Any) -> None:
        number, self._sent = self._sent, self._sent + 1
        clock, silent_s = self._clock, max(0.0, self.silent_until_s - self._clock.now_s)
        delay_s = silent_s + self._latency_s * (0.2 + 1.6 * self._random.random())
        trouble, late_s = self.troubles.popleft() if self.troubles else (None, 0.0)
        if trouble is Trouble.LOST:  # the sender never gets a receipt
            clock.after(GAP_LIMIT_S, self._missing, number)
            return
        if trouble is Trouble.LATE:
            delay_s += late_s
        elif trouble is Trouble.OVERTAKEN:
            delay_s += OVERTAKEN_LATENCIES * self._latency_s
        elif trouble is Trouble.DUPLICATED:
            clock.after(delay_s * 3.0, self._arrive, number, message)
        clock.after(delay_s, self._arrive, number, message)

    def end(self, last: Any, share: float) -> None:
        """The sender ends: ``share`` of the messages in transit still arrive, then ``last``."""
        under_way = self._sent - self._next
        self._sent = self._next + round(share * under_way)
        self._end, self._last = self._sent, last
        self._early = {number: message for number, message in self._early.items() if number < self._end}
        self.send(last)

    def _arrive(self, number: int, message: Any) -> None:
        if number < self._next or (number >= self._end and message is not self._last):
            return
        self._early[number] = message
        if number > self._next:
            self._clock.after(GAP_LIMIT_S, self._missing, self._next)
        while self._next in self._early:
            passed_on = self._early.pop(self._next)
            self._next += 1
            self._deliver(passed_on)

    def _missing(self, number: int) -> None:
        if self._next <= number:
            self._broke()


@dataclass(slots=True)
class EpochStream:
    """Both directions of one epoch's stream, and the messages that a hung worker has not read."""

    to_worker: Wire
    to_core: Wire
    hung_until_s: float = 0.0
    unread: list[Any] = field(default_factory=list)
