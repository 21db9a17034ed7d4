"""Browsers that follow the page's updates. A slow one loses updates and slows nobody."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Final

from dora.errors import LimitExceeded

VIEWERS: Final = 500
KEPT: Final = 16  # updates that a slow browser can still get; after more it loads the history anew
HEARTBEAT_S: Final = 15.0
HEARTBEAT: Final = b": \n\n"
RELOAD: Final = b"event: reload\ndata: 0\n\n"


class Viewers:
    """All share the latest updates, so none has a queue of its own."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._news = asyncio.Event()
        self._open = 0
        self._is_closed = False

    @property
    def open(self) -> int:
        return self._open

    def publish(self, seq: int, update: bytes) -> None:
        """Publishes whole server-sent events. ``seq`` is one more than that of the update before."""
        self._kept.append((seq, update))
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """Ends all streams: a front that stops would wait for its open connections."""
        self._is_closed = True
        self._news.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Counts a browser. Raises LimitExceeded."""
        if self._open >= VIEWERS:
            raise LimitExceeded("viewers", self._open, f"at most {VIEWERS} browsers at once: close another one")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """Yields the updates after ``after``. If too many were missed, yields RELOAD and continues with the latest."""
        seen = after
        while not self._is_closed:
            news = self._news
            missed = [(seq, update) for seq, update in self._kept if seq > seen]
            if missed:
                is_gap = missed[0][0] > seen + 1
                seen = missed[-1][0]
                yield RELOAD if is_gap else b"".join(update for _, update in missed)
                continue
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await news.wait()
            except TimeoutError:
                yield HEARTBEAT
