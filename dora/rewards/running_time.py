"""Time limits that count only while the waiting process itself runs."""

import time
from collections.abc import Callable
from typing import Final

SLICE_S: Final = 0.25


class RunningTime:
    """A time limit for a wait in slices. While nothing came, wait at most ``next_slice_s()``.

    A slice counts at most with its intended length, so a process that was suspended (SIGSTOP, a frozen container)
    continues with its remaining time.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left_s = limit_s
        self._clock = clock
        self._began_s = clock()
        self._slice_s = 0.0

    def next_slice_s(self) -> float:
        """Counts the time since the last call. Returns 0 if the time is over, and one last check is due."""
        now_s = self._clock()
        self._left_s -= min(now_s - self._began_s, self._slice_s)
        self._began_s, self._slice_s = now_s, max(0.0, min(self._left_s, SLICE_S))
        return self._slice_s
