"""Sends one parked snapshot out of the pool, in the rounds and under the checksums with which it came.

The bytes are sent in place. If they do not arrive, they are checked, and the snapshot is lost if they have changed.
"""

from collections.abc import Callable
from concurrent.futures import Future

from dora.errors import DoraError
from dora.kvtransfer.copying import NotMovable, Round
from dora.pool.parked import Bodies, Parked


class ParkedRounds:
    """Sends a parked snapshot. Thread-safe, for one caller at a time."""

    def __init__(self, parked: Parked, opened: "Future[Bodies]", secret: bytes, closed: Callable[[str], None]) -> None:
        """``closed`` gets the reason if opened bytes are lost, otherwise an empty text."""
        self._parked = parked
        self._secret = secret
        self._closed = closed
        self._sent = 0
        self.opened = opened
        self.tokens = parked.tokens

    def next_round(self) -> Round:
        bodies, number = self.opened.result(), self._sent
        self._sent += 1
        head = b"" if number else self._parked.head  # first, so that the worker makes the request ready meanwhile
        goes_on, seal = self._sent < len(bodies), self._parked.rounds[number].seal
        return Round([bodies[number].data], head, seal, goes_on, is_first=not number)

    def restarts(self) -> bool:
        return False

    def close(self, error: DoraError | None) -> DoraError | None:
        opened, self.opened = self.opened, Future()  # the bytes are free once nobody else reads them
        if opened.exception() is not None:
            return None
        wrong = self._parked.damage(opened.result(), self._secret) if error is not None else ""
        self._closed(wrong)
        return NotMovable(f"{self._parked.request_id} is lost: {wrong}") if wrong else None
