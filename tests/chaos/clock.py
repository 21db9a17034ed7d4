"""A program whose wall clock jumps: ``python -m tests.chaos.clock FILE -m dora serve ...``.

FILE holds the seconds that are added to what ``time.time`` says. Its monotonic clock, as
everywhere, never jumps. The system's own clock is left alone: to set it takes the right to do so, and would set it for
everybody; a time namespace has no wall clock of its own. Its workers may stall (stalling.py).
"""

import mmap
import os
import runpy
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dora.orchestrator import starting
from tests.chaos.stalling import stalling_workers


def jumping(file: Path, clock: Callable[[], float]) -> Callable[[], float]:
    """Returns a clock: ``clock`` plus the float of eight bytes in ``file``."""
    with file.open("rb") as stream:
        shown = mmap.mmap(stream.fileno(), 8, prot=mmap.PROT_READ)
    return lambda: float(clock() + struct.unpack_from("<d", shown)[0])


def jump(file: Path, by_s: float) -> None:
    """From now on, by so much from the true time."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, struct.pack("<d", by_s), 0)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    stalling_workers(starting)
    time.time = jumping(Path(sys.argv[1]), time.time)
    assert sys.argv[2] == "-m"
    sys.argv = [sys.argv[3], *sys.argv[4:]]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
