"""The host's memory: how much there is, and a Python that does not release large columns too eagerly."""

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

COLLECT_OBJECTS: Final = 100_000  # new ones between two searches
KEPT_BYTES: Final = 256 * 2**20
HEAP_BYTES: Final = 32 * 2**20  # the most that glibc allows
PROC: Final = Path("/proc")
GROUPS: Final = Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Makes Python's search for cyclic garbage rare, as many objects live long and few are in cycles.

    Otherwise Python walks the whole heap again and again: with 131,072 requests it takes a fifth of an admission's
    time. A higher threshold stays as it is, and if collection is off, it stays off.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(COLLECT_OBJECTS, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def keep_freed_memory() -> bool:
    """Lets this process keep up to ``KEPT_BYTES`` of freed memory for good. Returns False without glibc.

    Otherwise it may return a plan's temporary columns, a megabyte each with 131,072 requests, to the kernel, which
    clears them for the next one: a third of a plan's time, or nothing, as the heap happens to lie.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, HEAP_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def give_back_memory() -> bool:
    """Returns free memory to the kernel now, after something large. Returns False if the C library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def memory_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Returns the memory that this process may ever use: the machine's, or less by a limit of its control groups."""
    return min([_meminfo(proc, "MemTotal"), *(limit for limit, _ in _limits(proc, groups))])


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Returns memory for new processes, without swap, within control groups. Source: proc(5), ``MemAvailable``."""
    within = (max(0, limit - used) for limit, used in _limits(proc, groups))
    return min([_meminfo(proc, "MemAvailable"), *within])


def is_in_memory(folder: Path, proc: Path = PROC) -> bool:
    """Returns whether the files of an existing folder are in memory (tmpfs). Source: proc(5), mountinfo."""
    found, kind = Path(), ""
    for line in (proc / "self" / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        place = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
        if folder.resolve().is_relative_to(place) and len(place.parts) >= len(found.parts):  # the last one is on top
            found, kind = place, rest.split()[0]
    return kind in ("tmpfs", "ramfs")


def _meminfo(proc: Path, field: str) -> int:
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, size = line.partition(":")
        if name == field:
            return int(size.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yields limit and use of each control group around this process, of version 2 or 1, that has a limit.

    Pages of files that were not used lately do not count as used. Source: cgroups(7), and the kernel's cgroup-v2.rst.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit_file, use_file, unused = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, unused = groups / "memory", "total_inactive_file"
            limit_file, use_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(root))):
            try:
                limit = int((folder / limit_file).read_text())  # "max": there is none
                kept = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                yield limit, int((folder / use_file).read_text()) - int(kept.get(unused, 0))
            except (OSError, ValueError):
                continue
