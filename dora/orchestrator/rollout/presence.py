"""Whether the trainer is still there: by what it says, and by the call that it holds open for as long as it lives."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ABSENT_S: Final = 2.0  # a trainer that holds nothing for so long has gone


class TrainerPresence:
    """Of the trainer that attached last. It holds a Stay call open, or, in another language, perhaps none."""

    def __init__(self) -> None:
        self.name = ""
        self._seen_s = -ABSENT_S
        self._stays: asyncio.Event | None = None  # set once the call that the trainer holds open is to end
        self._left = False  # it held one, which has ended

    def attached(self, name: str) -> None:
        """A trainer took over."""
        if self._stays is not None:
            self._stays.set()
        self.name, self._stays, self._left = name, None, False
        self.seen()

    def seen(self) -> None:
        self._seen_s = time.monotonic()

    @contextmanager
    def staying(self) -> Iterator[asyncio.Event]:
        """While the trainer holds its call open. Yields what is set when another trainer takes over."""
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
        """``holds``: it has a stream or leased groups, which say nothing of one whose call has ended."""
        return self._stays is not None or (not self._left and (holds or self._heard_lately()))

    def is_expected(self, holds: bool) -> bool:
        """Whether it is at work, was so a moment ago, or may be back in a moment: its connection may have broken."""
        if holds and not self._left:
            self.seen()
        return self._heard_lately()

    def _heard_lately(self) -> bool:
        return time.monotonic() - self._seen_s < ABSENT_S
