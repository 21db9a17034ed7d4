"""Host memory of a pool: one file in shared memory, in which each body that arrives has its place and stays there.

    <folder>/<owner>/arena.kv      a page of its own state, then bodies

A worker of the host maps the whole file once and copies a body to where it is to stay: one copy, and none later. What
comes by another way is received into the same memory. The file is as large as its bound and takes memory only as far as
it has been used; that memory is kept, and pinned where the system allows it.
"""

import ctypes
import logging
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from dora.errors import InvalidValue, SnapshotRefused, TransferFailed, is_full

log = logging.getLogger("dora.worker")

ARENA_FILE: Final = "arena.kv"
STATE_BYTES: Final = 4096
MARK_BYTES: Final = 16  # random, at the file's beginning: who reads them has mapped the same memory
STEP_BYTES: Final = 4 << 10  # places are multiples of it
GROWTH_BYTES: Final = 16 << 20
TOUCH_BYTES: Final = 2 << 20  # mapped at once by who writes
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; Python has no name for it

Pin = Callable[[int, int], str]  # keeps memory (address, bytes) in place; why it cannot, or nothing


def lock_pages(address: int, size_bytes: int) -> str:
    """mlock(2): the system does not swap these pages.

    It is not ``cudaHostRegister``, which holds for the process that calls it: a pool has no GPU, and would take several
    hundred megabytes of one for being registered there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)):
        return os.strerror(ctypes.get_errno())
    return ""


class Arena:
    """Places of at most ``most_bytes`` together. Any thread may use it.

    Raises InvalidValue where the file cannot be made.
    """

    def __init__(self, folder: Path, owner: str, most_bytes: int, pin: Pin = lock_pages) -> None:
        """``folder`` has a folder of this ``owner``, as ``SegmentPool`` leaves it, which is removed with it."""
        self.name = f"{owner}/{ARENA_FILE}"
        self.mark = secrets.token_bytes(MARK_BYTES)
        self.most_bytes = most_bytes // STEP_BYTES * STEP_BYTES
        self.pinned_bytes = 0
        self._folder = folder
        self._pin = pin
        self._unpinned = ""  # why no more is pinned
        self._grown_bytes = STATE_BYTES
        self._free = [(0, self.most_bytes)]  # where and how much; in order, and none next to another
        self._back: deque[tuple[int, int]] = deque()  # filled wherever the collector happens to run: it takes no lock
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(folder / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(self._descriptor, STATE_BYTES + self.most_bytes)
            os.posix_fallocate(self._descriptor, 0, STATE_BYTES)
            self._mapped = mmap.mmap(self._descriptor, STATE_BYTES + self.most_bytes)
        except OSError as error:
            raise InvalidValue("snapshot folder", str(folder), f"with room for a pool ({error.strerror})") from error
        self._mapped[:MARK_BYTES] = self.mark
        self._address = int(np.frombuffer(self._mapped, np.uint8, 1).ctypes.data)

    def array(self, size_bytes: int) -> np.ndarray | None:
        """Memory for a body; None where no place is large enough. It is free again once nobody holds it or a view.

        Raises SnapshotRefused where the file system has no more room.
        """
        wanted = -(-size_bytes // STEP_BYTES) * STEP_BYTES
        with self._lock:
            self._collect()
            found = next((index for index, (_, size) in enumerate(self._free) if size >= wanted), None)
            if found is None:
                return None
            at, size = self._free[found]
            self._grow(STATE_BYTES + at + wanted)
            self._free[found : found + 1] = [(at + wanted, size - wanted)] if size > wanted else []
        root = np.frombuffer(self._mapped, np.uint8, size_bytes, STATE_BYTES + at)
        weakref.finalize(root, self._back.append, (at, wanted)).atexit = False
        return root

    def prepare(self, size_bytes: int) -> None:
        """Takes memory for so much, so that nobody who writes has to wait for it. Raises SnapshotRefused as above."""
        with self._lock:
            self._grow(STATE_BYTES + min(size_bytes, self.most_bytes))

    def place(self, array: np.ndarray) -> int:
        """Where in the file an array of this memory begins."""
        return int(array.ctypes.data) - self._address

    def lent_bytes(self) -> int:
        """Of places in use now."""
        with self._lock:
            self._collect()
            return self.most_bytes - sum(size for _, size in self._free)

    def move(self, folder: Path, owner: str) -> None:
        """Its file is another owner's from now on, with all that lies in it; who has it mapped keeps it. Raises
        InvalidValue where it cannot be moved there, or is gone."""
        name = f"{owner}/{ARENA_FILE}"
        try:
            os.rename(self._folder / self.name, folder / name)
        except OSError as error:
            raise InvalidValue("snapshot folder", str(folder), f"that of before ({error.strerror})") from error
        self._folder, self.name = folder, name

    def close(self) -> None:
        """Removes the file; who has it mapped keeps its memory for as long."""
        with suppress(OSError):  # it goes with its folder
            (self._folder / self.name).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _collect(self) -> None:
        """Places that were given back join the free ones next to them."""
        if not self._back:
            return
        back = [self._back.popleft() for _ in range(len(self._back))]
        joined: list[tuple[int, int]] = []
        for at, size in sorted([*self._free, *back]):
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((at, size))
        self._free = joined

    def _grow(self, end: int) -> None:
        """Takes memory up to ``end``: writing to a page that the file system has no room for would end the process."""
        if end <= self._grown_bytes:
            return
        grown = min(-(-end // GROWTH_BYTES) * GROWTH_BYTES, STATE_BYTES + self.most_bytes)
        try:
            os.posix_fallocate(self._descriptor, self._grown_bytes, grown - self._grown_bytes)
        except OSError as error:
            why = "no room left" if is_full(error) else f"it cannot be written ({error.strerror})"
            raise SnapshotRefused(f"snapshot folder = {str(self._folder)!r}: {why}") from error
        if not self._unpinned:
            size_bytes = grown - self._grown_bytes
            self._unpinned = self._pin(self._address + self._grown_bytes, size_bytes)
            if self._unpinned:
                log.info("pool: %d bytes of its memory are pinned and no more: %s", self.pinned_bytes, self._unpinned)
            else:
                self.pinned_bytes += size_bytes
        self._grown_bytes = grown


class MappedArena:
    """The arena of a pool on this host, mapped by a worker that writes to it."""

    def __init__(self, folder: Path, owner: str, name: str, mark: bytes) -> None:
        """Raises TransferFailed for what is no arena of that owner, cannot be mapped, or is other memory."""
        if name != f"{owner}/{ARENA_FILE}":
            raise TransferFailed(f"arena {name!r}: not that of {owner}")
        try:
            descriptor = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise TransferFailed(f"arena {name}: {error.strerror}") from error
        try:
            self._mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise TransferFailed(f"arena {name}: {error}") from error
        finally:
            os.close(descriptor)
        if self._mapped[:MARK_BYTES] != mark:
            raise TransferFailed(f"arena {name}: it is not the memory of the other end")
        self._touched = np.zeros(-(-len(self._mapped) // TOUCH_BYTES), bool)

    def array(self, at: int, size_bytes: int) -> np.ndarray:
        """A place in it. Raises TransferFailed where there is none."""
        if not STATE_BYTES <= at <= at + size_bytes <= len(self._mapped):
            raise TransferFailed(f"arena: bytes {at} to {at + size_bytes} of {len(self._mapped)}")
        return np.frombuffer(self._mapped, np.uint8, size_bytes, at)

    def touch(self, at: int, size_bytes: int) -> None:
        """Maps the pages of a place, if this is their first use here: at once, not one after the other."""
        first, end = at // TOUCH_BYTES, -(-(at + size_bytes) // TOUCH_BYTES)
        if self._touched[first:end].all():
            return
        self._touched[first:end] = True
        begin = at // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):  # an older kernel: they are mapped as they are written
            self._mapped.madvise(MADV_POPULATE_WRITE, begin, at + size_bytes - begin)
