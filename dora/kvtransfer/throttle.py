"""A bandwidth cap on everything that a worker sends, over all its pairs."""

import threading
import time
from collections.abc import Callable
from typing import Final

BURST_S: Final = 0.05  # bytes of this many seconds may be sent at once


class Throttle:
    """A token bucket. With ``bytes_per_s`` 0 there is no cap. ``clock`` and ``wait(seconds)`` are replaced by tests."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._wait = wait or threading.Event().wait
        self._lock = threading.Lock()
        self._free_s = clock()  # when the cap will have sent all bytes passed so far

    @property
    def is_capped(self) -> bool:
        return self._bytes_per_s > 0

    def pass_bytes(self, count: int) -> None:
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = self._clock()
            begins_s = max(self._free_s, now_s - BURST_S)
            self._free_s = begins_s + count / self._bytes_per_s
            wait_s = begins_s - now_s
        if wait_s > 0:
            self._wait(wait_s)
