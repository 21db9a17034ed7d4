"""Time limits that count only the time in which the process that waits has run itself."""

import time
from collections.abc import Callable
from typing import Final

SLICE_S: Final = 0.25


class RunningTime:
    """A time limit for what is waited for in slices: ``while`` nothing came, wait ``next_slice_s()`` at most.

    A slice counts at most as what it was meant to take, so that a process that was suspended (SIGSTOP, a frozen
    container) goes on with the time that it had left.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left_s = limit_s
        self._clock = clock
        self._began_s = clock()
        self._slice_s = 0.0

    def next_slice_s(self) -> float:
        """Counts what was waited since the last call. 0: the time is over, and a last look is due."""
        now_s = self._clock()
        self._left_s -= min(now_s - self._began_s, self._slice_s)
        self._began_s, self._slice_s = now_s, max(0.0, min(self._left_s, SLICE_S))
        return self._slice_s
