"""The presence of the trainer, by its calls and by the call that it holds open while it lives."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dora.errors import Conflict
from dora.system.awake import awake_s

CLIENT_ID_MAX: Final = 64  # bytes
ABSENT_S: Final = 2.0  # a trainer that has held nothing for so long is absent


class TrainerPresence:
    """Tracks the trainer that attached last. It may hold a KeepAlive call open; clients in other languages may not."""

    def __init__(self) -> None:
        self.name = ""
        self.since = 0.0  # when it attached, since the Unix epoch
        self._client_id = b""
        self._lapsed_before = ""  # why the trainer before could be replaced unasked; empty: it had not stalled
        self._seen_s = -ABSENT_S
        self._stays: asyncio.Event | None = None  # set to end the trainer's open call
        self._left = False  # its open call has ended

    def check_attach(self, client_id: bytes, lapsed: str) -> None:
        """Raises Conflict if another trainer holds its call open. ``lapsed`` says why it may not keep others out."""
        if self._stays is None or lapsed or (client_id and client_id == self._client_id):
            return
        allowed = "the only one: end the other first, or attach with take_over=True, which fences it"
        raise Conflict("trainer", self.name, allowed, why=f"has been attached since {clock_time(self.since)}")

    def taken_over(self) -> str:
        """Returns the end of a sentence that says who replaced an earlier trainer, and when."""
        told = f"has ended: trainer {self.name} attached at {clock_time(self.since)}"
        return f"{told}, because {self._lapsed_before}" if self._lapsed_before else told

    def attached(self, name: str, client_id: bytes = b"", lapsed: str = "") -> None:
        """Notes that a trainer has attached. It replaces the one before, whose lease had ``lapsed`` for this reason."""
        if self._stays is not None:
            self._stays.set()
        self.since, self._client_id = time.time(), client_id
        self.name, self._stays, self._left = name, None, False
        self._lapsed_before = lapsed
        self.seen()

    def known(self, name: str = "", client_id: bytes = b"") -> None:
        """Notes a call of the trainer that owns the epoch, which may have attached before a restart of the service."""
        if not self.name:
            self.name, self.since = "trainer", time.time()
        if name:
            self.name, self._client_id = name, client_id

    def seen(self) -> None:
        self._seen_s = awake_s()

    @contextmanager
    def staying(self) -> Iterator[asyncio.Event]:
        """Holds while the trainer's call is open. Yields an event that is set when another trainer takes over."""
        superseded = asyncio.Event()
        if self._stays is not None:
            self._stays.set()
        self._stays, self._left = superseded, False
        try:
            yield superseded
        finally:
            if self._stays is superseded:
                self._stays, self._left = None, True
                self.seen()

    def is_there(self, holds: bool) -> bool:
        """Returns whether the trainer is present. If it ``holds`` a stream or leased groups, these count until its open
        call ends.
        """
        return self._stays is not None or (not self._left and (holds or self._heard_lately()))

    def is_expected(self, holds: bool) -> bool:
        """Returns whether the trainer works, did so a moment ago, or may reconnect in a moment."""
        if holds and not self._left:
            self.seen()
        return self._heard_lately()

    def _heard_lately(self) -> bool:
        return awake_s() - self._seen_s < ABSENT_S


def clock_time(at: float) -> str:
    """Returns the local time of day, for people."""
    return time.strftime("%H:%M:%S", time.localtime(at))
