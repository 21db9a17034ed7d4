"""The time that a load of weights may take: it grows with their bytes."""

import time
from collections.abc import Callable
from typing import Final

from dora.errors import DeadlineExceeded

LEAST_BYTES_PER_S: Final = 100e6  # a slower load has failed: a tenth of what eight workers read from one SSD
START_S: Final = 30.0  # beside the bytes: a busy host, and the canary
READ_SHARE: Final = 0.8  # of a load's time for its bytes; the rest is for what the engine makes of them


def load_limit_s(weights_bytes: int, requested_s: float) -> float:
    """Returns the time after which a load has failed: ``requested_s``, or more if that is too short for the bytes."""
    return max(requested_s, START_S + weights_bytes / LEAST_BYTES_PER_S)


class LoadDeadline:
    """The end of one load's time. It begins with the object."""

    def __init__(self, limit_s: float, weights_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._weights_bytes, self._clock = limit_s, weights_bytes, clock
        self._began_s = clock()
        self._loaded_bytes = 0

    def left_s(self) -> float:
        return max(0.0, self._limit_s - (self._clock() - self._began_s))

    def loaded(self, size_bytes: int) -> None:
        """Notes progress. Raises DeadlineExceeded if no time is left."""
        self._loaded_bytes += size_bytes
        if not self.left_s():
            raise self.exceeded()

    def exceeded(self) -> DeadlineExceeded:
        took_s = round(self._clock() - self._began_s, 1)
        allowed = (
            f"at most {self._limit_s:g} for {self._weights_bytes:,} bytes, of which {self._loaded_bytes:,} were loaded"
            " (workers.load_timeout_s)"
        )
        return DeadlineExceeded("load_s", took_s, allowed)
