"""The presence of the trainer, by its calls and by the call that it holds open while it lives."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ABSENT_S: Final = 2.0  # a trainer that has held nothing for so long is absent


class TrainerPresence:
    """Tracks the trainer that attached last. It may hold a KeepAlive call open; clients in other languages may not."""

    def __init__(self) -> None:
        self.name = ""
        self._seen_s = -ABSENT_S
        self._stays: asyncio.Event | None = None  # set to end the trainer's open call
        self._left = False  # its open call has ended

    def attached(self, name: str) -> None:
        """Notes that another trainer took over."""
        if self._stays is not None:
            self._stays.set()
        self.name, self._stays, self._left = name, None, False
        self.seen()

    def seen(self) -> None:
        self._seen_s = time.monotonic()

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
        """Returns whether the trainer is present. ``holds``: it has a stream or leased groups. These do not count after
        its open call has ended.
        """
        return self._stays is not None or (not self._left and (holds or self._heard_lately()))

    def is_expected(self, holds: bool) -> bool:
        """Returns whether the trainer works, did so a moment ago, or may reconnect in a moment."""
        if holds and not self._left:
            self.seen()
        return self._heard_lately()

    def _heard_lately(self) -> bool:
        return time.monotonic() - self._seen_s < ABSENT_S
