"""The clock by which a process judges others: it stands still while the process itself is stopped or suspended.

A process that was stopped for 20 s has heard nobody for 20 s, and nobody is at fault. Whatever waits for another's
message measures its silence, and the core its time limits, on this clock.
"""

import time
from collections.abc import Callable
from typing import Final

READ_WITHIN_S: Final = 1.5


class AwakeClock:
    """Seconds in which this process ran. Something must read it every ``within_s``; a longer time between two reads
    is the process's own absence and is left out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self.within_s = READ_WITHIN_S
        self.absent_s = 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        passed_s, self._read_s = now_s - self._read_s, now_s
        if passed_s > self.within_s:
            self.absent_s += passed_s
        return now_s - self.absent_s


awake_s: Final = AwakeClock()
"""This process's clock. Its zero is that of ``time.monotonic``."""
