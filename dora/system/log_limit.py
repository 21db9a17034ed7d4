"""Bounds the log: a client that sends a million wrong messages must not fill the disk with a million lines.

Of each kind of line (a logger's format string, such as "%s: the verdict failed: %s") the first few in a minute are
written; the number of omitted lines is logged once, at the end of that minute.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

FIRST: Final = 20  # lines of a kind that are written in a period
PERIOD_S: Final = 60.0
KINDS_MAX: Final = 1024  # all further kinds count as one
KIND_CHARACTERS: Final = 120

_Kind = tuple[str, int, str]  # logger, level, format string
_OTHERS: Final[_Kind] = ("dora", logging.WARNING, "(other lines)")


@dataclass(slots=True)
class _Count:
    began_s: float
    lines: int = 0


class LogLimit(logging.Filter):
    """A filter for a log handler. ``clock`` gives seconds."""

    def __init__(
        self, first: int = FIRST, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._first, self._period_s, self._clock = first, period_s, clock
        self._counts: dict[_Kind, _Count] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_summary", False):
            return True
        kind = (record.name, record.levelno, str(record.msg)[:KIND_CHARACTERS])
        with self._lock:
            if kind not in self._counts and len(self._counts) >= KINDS_MAX:
                kind = _OTHERS
            count = self._counts.setdefault(kind, _Count(self._clock()))
            count.lines += 1
            return count.lines <= self._first

    def tell(self) -> None:
        """Logs the numbers of omitted lines of kinds whose period is over. Called periodically."""
        now_s = self._clock()
        with self._lock:
            over = {kind: count for kind, count in self._counts.items() if now_s - count.began_s >= self._period_s}
            for kind in over:
                del self._counts[kind]
        for (name, level, text), count in over.items():
            left_out = count.lines - self._first
            if left_out > 0:
                said = "%d more lines like this one were left out in the last %.0f s: %s"
                since_s = now_s - count.began_s
                logging.getLogger(name).log(level, said, left_out, since_s, text, extra={"is_summary": True})

    async def telling(self) -> None:
        """Calls ``tell`` periodically until cancelled."""
        while True:
            await asyncio.sleep(self._period_s / 4)
            self.tell()
