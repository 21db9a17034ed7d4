"""Tunes Python and the C library for a process of many objects and large columns, which they release too eagerly."""

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

COLLECT_OBJECTS: Final = 100_000  # new ones between two searches
KEPT_BYTES: Final = 256 * 2**20
HEAP_BYTES: Final = 32 * 2**20  # the most that glibc allows
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Python's search for cyclic garbage, made rare where many objects live long and few are in cycles.

    Else Python walks the whole heap again and again: with 131,072 requests it takes a fifth of an admission's time.
    A higher threshold stays as it is, and where nothing is collected, nothing is.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(COLLECT_OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def keep_freed_memory() -> bool:
    """Lets this process keep up to ``KEPT_BYTES`` of freed memory, for good. False where the C library is not glibc.

    Else it may return a plan's temporary columns, a megabyte each with 131,072 requests, to the kernel, which clears
    them for the next one: a third of a plan's time, or nothing, as the heap happens to lie.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, HEAP_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def give_back_memory() -> bool:
    """Returns what is free to the kernel now, after something large. False where the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def available_bytes() -> int:
    """Host memory that new processes can use without swapping. Source: proc(5), ``MemAvailable`` of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
