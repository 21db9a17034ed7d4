"""Host memory of a pool: one file in shared memory, in which each arriving body is stored at a fixed offset.

    <folder>/<owner>/arena.kv      a page of its own state, then bodies

A worker of the host maps the whole file once and copies each body to its final offset, so a body is copied only once.
Bodies that arrive by another transport are received into the same memory. The file is as large as its limit, but takes
memory only as it is used; that memory is retained, and pinned if the system allows it.
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
MARK_BYTES: Final = 16  # random, at the file's beginning: whichever process reads it has mapped the same memory
STEP_BYTES: Final = 4 << 10  # places are multiples of it
GROWTH_BYTES: Final = 16 << 20
TOUCH_BYTES: Final = 2 << 20  # offsets are multiples of it
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; Python has no name for it

Pin = Callable[[int, int], str]  # pins memory (address, bytes); returns why it cannot, or ""


def lock_pages(address: int, size_bytes: int) -> str:
    """Locks pages in memory with mlock(2), so the system does not swap them.

    ``cudaHostRegister`` is not used: it holds only for the calling process, and a pool has no GPU. Registration there
    would take several hundred megabytes of GPU memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes)):
        return os.strerror(ctypes.get_errno())
    return ""


class Arena:
    """Allocates at most ``most_bytes`` in one file. Thread-safe. Raises InvalidValue if the file cannot be created."""

    def __init__(self, folder: Path, owner: str, most_bytes: int, pin: Pin = lock_pages) -> None:
        """``folder`` contains this ``owner``'s folder, as ``SegmentPool`` creates and removes it."""
        self.name = f"{owner}/{ARENA_FILE}"
        self.mark = secrets.token_bytes(MARK_BYTES)
        self.most_bytes = most_bytes // STEP_BYTES * STEP_BYTES
        self.pinned_bytes = 0
        self._folder = folder
        self._pin = pin
        self._unpinned = ""  # why pinning stopped
        self._grown_bytes = STATE_BYTES
        self._free = [(0, self.most_bytes)]  # (offset, bytes), sorted; no two are adjacent
        self._back: deque[tuple[int, int]] = deque()  # filled by finalizers, which take no lock
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(folder / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(self._descriptor, STATE_BYTES + self.most_bytes)
            os.posix_fallocate(self._descriptor, 0, STATE_BYTES)
            self._mapped = mmap.mmap(self._descriptor, STATE_BYTES + self.most_bytes)
        except OSError as error:
            raise InvalidValue("snapshot folder", str(folder), f"one with room for it ({error.strerror})") from error
        self._mapped[:MARK_BYTES] = self.mark
        self._address = int(np.frombuffer(self._mapped, np.uint8, 1).ctypes.data)

    def array(self, size_bytes: int) -> np.ndarray | None:
        """Memory for a body, or None if no free range is large enough. It is freed with the array and all its views.

        Raises SnapshotRefused if the file system is full.
        """
        rounded_bytes = -(-size_bytes // STEP_BYTES) * STEP_BYTES
        with self._lock:
            self._collect()
            found = next((index for index, (_, size) in enumerate(self._free) if size >= rounded_bytes), None)
            if found is None:
                return None
            at, size = self._free[found]
            self._grow(STATE_BYTES + at + rounded_bytes)
            self._free[found : found + 1] = [(at + rounded_bytes, size - rounded_bytes)] if size > rounded_bytes else []
        root = np.frombuffer(self._mapped, np.uint8, size_bytes, STATE_BYTES + at)
        weakref.finalize(root, self._back.append, (at, rounded_bytes)).atexit = False
        return root

    def prepare(self, size_bytes: int) -> None:
        """Allocates this much in advance, so that writers need not wait. Raises SnapshotRefused as ``array`` does."""
        with self._lock:
            self._grow(STATE_BYTES + min(size_bytes, self.most_bytes))

    def place(self, array: np.ndarray) -> int:
        """The offset in the file at which an array of this memory begins."""
        return int(array.ctypes.data) - self._address

    def lent_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self.most_bytes - sum(size for _, size in self._free)

    def move(self, folder: Path, owner: str) -> None:
        """Transfers the arena to a new owner, with its contents. Existing mappings stay valid. Raises InvalidValue if
        the file is missing or cannot be moved.
        """
        name = f"{owner}/{ARENA_FILE}"
        try:
            os.rename(self._folder / self.name, folder / name)
        except OSError as error:
            raise InvalidValue("snapshot folder", str(folder), f"that of before ({error.strerror})") from error
        self._folder, self.name = folder, name

    def close(self) -> None:
        """Removes the file. Existing mappings stay valid."""
        with suppress(OSError):  # otherwise it is removed with its folder
            (self._folder / self.name).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _collect(self) -> None:
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
        """Allocates the file up to ``end``. Without it, a write to a page with no disk space would kill the process."""
        if end <= self._grown_bytes:
            return
        grown = min(-(-end // GROWTH_BYTES) * GROWTH_BYTES, STATE_BYTES + self.most_bytes)
        try:
            os.posix_fallocate(self._descriptor, self._grown_bytes, grown - self._grown_bytes)
        except OSError as error:
            why = "no room left" if is_full(error) else f"the file cannot be written ({error.strerror})"
            raise SnapshotRefused(f"snapshot folder = {str(self._folder)!r}: {why}") from error
        if not self._unpinned:
            size_bytes = grown - self._grown_bytes
            self._unpinned = self._pin(self._address + self._grown_bytes, size_bytes)
            if self._unpinned:
                log.info("pool: only %d bytes of its memory are pinned: %s", self.pinned_bytes, self._unpinned)
            else:
                self.pinned_bytes += size_bytes
        self._grown_bytes = grown


class MappedArena:
    """The arena of a pool on this host, mapped by a worker that writes to it."""

    def __init__(self, folder: Path, owner: str, name: str, mark: bytes) -> None:
        """Raises TransferFailed if the file is not that owner's arena, cannot be mapped, or is different memory."""
        if name != f"{owner}/{ARENA_FILE}":
            raise TransferFailed(f"arena {name!r}: it is not the arena of {owner}")
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
        """A range of the arena. Raises TransferFailed if it lies outside."""
        if not STATE_BYTES <= at <= at + size_bytes <= len(self._mapped):
            raise TransferFailed(f"arena: bytes {at} to {at + size_bytes} lie outside its {len(self._mapped)} bytes")
        return np.frombuffer(self._mapped, np.uint8, size_bytes, at)

    def touch(self, at: int, size_bytes: int) -> None:
        """Maps the pages of a range together at its first use, instead of one page fault each."""
        first, end = at // TOUCH_BYTES, -(-(at + size_bytes) // TOUCH_BYTES)
        if self._touched[first:end].all():
            return
        self._touched[first:end] = True
        begin = at // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):  # an older kernel maps them as they are written
            self._mapped.madvise(MADV_POPULATE_WRITE, begin, at + size_bytes - begin)
