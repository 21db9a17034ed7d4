"""One worker's stream to the orchestrator, as the transport keeps it: each direction reliable and in order, or broken.

Messages carry numbers. The network may lose, delay, double and overtake them; the receiver passes each on once and in
order, and holds back what comes early. What stays away for ``GAP_LIMIT_S`` breaks the whole stream, which ends the
worker's epoch: to the core a lost message is a lost worker, never a missing event.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from random import Random
from typing import Any, Protocol

GAP_LIMIT_S = 4.0
OVERTAKEN_LATENCIES = 5.0  # a re-ordered message takes so much longer than the others


class Trouble(Enum):
    """What happens to one message on its way."""

    LOST = auto()
    LATE = auto()
    DUPLICATED = auto()
    OVERTAKEN = auto()


class Clock(Protocol):
    now_s: float

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None: ...


class Wire:
    """One direction. ``troubles`` meet the next messages, one each; until ``silent_until_s`` nothing gets through."""

    def __init__(
        self, clock: Clock, latency_s: float, random: Random, deliver: Callable[[Any], None], broke: Callable[[], None]
    ) -> None:
        self.troubles: deque[tuple[Trouble, float]] = deque()  # with the seconds that a late one takes longer
        self.silent_until_s = 0.0
        self._clock, self._latency_s, self._random = clock, latency_s, random
        self._deliver, self._broke = deliver, broke
        self._sent = 0
        self._next = 0  # number that is passed on next
        self._early: dict[int, Any] = {}
        self._end: float = inf  # number of the last message, once the sender has gone
        self._last: Any = None

    def send(self, message: Any) -> None:
        number, self._sent = self._sent, self._sent + 1
        clock, silent_s = self._clock, max(0.0, self.silent_until_s - self._clock.now_s)
        delay_s = silent_s + self._latency_s * (0.2 + 1.6 * self._random.random())
        trouble, late_s = self.troubles.popleft() if self.troubles else (None, 0.0)
        if trouble is Trouble.LOST:  # its sender waits in vain for the receipt
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
        """The sender is gone: that ``share`` of what is under way still arrives, then ``last``."""
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
class Session:
    """Both directions of one epoch's stream, and what a hung worker has not looked at."""

    to_worker: Wire
    to_core: Wire
    hung_until_s: float = 0.0
    unread: list[Any] = field(default_factory=list)
