"""Shared-memory segments: files on a tmpfs that one worker writes and others of its host map.

    <folder>/<owner>/owner.lock        held by the owner's process while it runs
    <folder>/<owner>/<32 hex>.kv       one segment: a page of its own state, then KV

The owner lends a segment with a snapshot in it. The target returns it by writing the segment's mark into its state
page, which needs no message and works from a destructor. A damaged mark counts as not returned, so a segment that is
still read is never overwritten. The lock shows which owners are dead; their files are swept.
"""

import mmap
import os
import re
import secrets
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from dora.errors import InvalidValue, SnapshotRefused, is_full
from dora.kvtransfer.memory import Shelf, Sized
from dora.system.files import entries
from dora.system.ownership import hold_new, is_abandoned

LOCK_FILE: Final = "owner.lock"
STATE_BYTES: Final = 4096  # one page, so KV begins at the next
_RETURNED_AT: Final = 0  # the target writes the mark here when it no longer needs the segment
MARK_AT: Final = 64
MARK_BYTES: Final = 16  # random: a process that reads the same bytes has mapped the same memory
_OWNER: Final = re.compile(r"[0-9a-z]{1,32}")
_SEGMENT: Final = re.compile(r"[0-9a-f]{32}\.kv")


class MappedFile(Sized):
    """One file, mapped for writing. ``name`` is its path below the folder of all owners."""

    def __init__(self, folder: Path, owner: str, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.name = f"{owner}/{secrets.token_hex(16)}.kv"
        self.mark = secrets.token_bytes(MARK_BYTES)
        self.turn = 0  # how often it was lent
        self._file = folder / self.name
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            said = f"snapshot folder = {str(folder)!r}: {error.strerror}"
            raise SnapshotRefused(said, "snapshot folder", str(folder)) from error
        try:
            # A write to a page with no disk space would kill the process, so all pages are allocated now.
            os.posix_fallocate(descriptor, 0, STATE_BYTES + capacity_bytes)
            self._mapped = mmap.mmap(descriptor, STATE_BYTES + capacity_bytes)
        except OSError as error:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)
            why = "no room left" if is_full(error) else f"the file cannot be written ({error.strerror})"
            said = f"snapshot folder = {str(folder)!r}: {why}"
            raise SnapshotRefused(said, "snapshot folder", str(folder)) from error
        finally:
            os.close(descriptor)
        self._mapped[MARK_AT : MARK_AT + MARK_BYTES] = self.mark
        self.raw = np.frombuffer(self._mapped, np.uint8, capacity_bytes, STATE_BYTES)

    @property
    def lent(self) -> bool:
        """Returns whether the target may still read it."""
        return self._mapped[_RETURNED_AT : _RETURNED_AT + MARK_BYTES] != self.mark

    def lend(self) -> None:
        self._mapped[_RETURNED_AT : _RETURNED_AT + MARK_BYTES] = bytes(MARK_BYTES)
        self.turn += 1

    def destroy(self) -> None:
        """Removes the file. Existing mappings stay valid."""
        with suppress(OSError):  # otherwise it is removed with its folder
            self._file.unlink(missing_ok=True)


class SegmentPool(Shelf[MappedFile]):
    """The segments of one owner. A full file system refuses a segment and leaves no file."""

    def __init__(self, folder: Path, owner: str, most_bytes: int) -> None:
        super().__init__(most_bytes)
        if not _OWNER.fullmatch(owner):
            raise InvalidValue("owner", owner, "1 to 32 digits and lowercase letters")
        if not folder.is_dir():
            raise InvalidValue("snapshot folder", str(folder), "an existing folder, preferably on a tmpfs")
        self._folder, self._owner = folder, owner
        (folder / owner).mkdir(mode=0o700)
        self._lock_descriptor = hold_new(folder / owner / LOCK_FILE)
        self._lent: list[MappedFile] = []

    def lend(self, size_bytes: int) -> MappedFile | None:
        """A segment, lent until the target returns it or ``discard`` is called, or None if too much is lent."""
        segment = self.take(size_bytes)
        if segment is not None:
            with self._lock:
                segment.lend()
                self._lent.append(segment)
        return segment

    def discard(self, segment: MappedFile, turn: int) -> None:
        """Removes a segment whose target may never return it, unless it was returned and lent again."""
        with self._lock:
            if segment in self._lent and segment.turn == turn:
                self._lent.remove(segment)
                self._forget(segment)

    def close(self) -> None:
        with self._lock:
            self._free.clear()
            self._lent.clear()
        shutil.rmtree(self._folder / self._owner, ignore_errors=True)
        os.close(self._lock_descriptor)

    def _make(self, capacity_bytes: int) -> MappedFile:
        return MappedFile(self._folder, self._owner, capacity_bytes)

    def _returned(self) -> list[MappedFile]:
        back = [segment for segment in self._lent if not segment.lent]
        self._lent = [segment for segment in self._lent if segment not in back]
        return back


class MappedSegments:
    """Segments of one other worker, mapped for reading. Mappings are cached: a first touch costs more than a copy."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder, self._owner = folder, owner
        self._mapped: dict[str, mmap.mmap] = {}

    def array(self, name: str, mark: bytes, size_bytes: int) -> np.ndarray:
        """The first bytes of a segment, read-only. It is returned when the array and all its views are gone.

        Raises SnapshotRefused if the file is not that owner's segment, cannot be mapped, or is different memory.
        """
        self._forget_removed()
        mapped = self._mapped.get(name) or self._map(name)
        if mapped[MARK_AT : MARK_AT + MARK_BYTES] != mark:
            raise SnapshotRefused(f"segment {name}: it is not the memory that was written")
        if size_bytes > len(mapped) - STATE_BYTES:
            raise SnapshotRefused(f"segment {name}: {size_bytes} bytes of {len(mapped) - STATE_BYTES}")
        self._mapped[name] = mapped
        root = np.frombuffer(mapped, np.uint8, size_bytes, STATE_BYTES)
        root.flags.writeable = False
        returned = slice(_RETURNED_AT, _RETURNED_AT + MARK_BYTES)
        weakref.finalize(root, mapped.__setitem__, returned, mark).atexit = False
        return root

    def _map(self, name: str) -> mmap.mmap:
        owner, _, file = name.partition("/")
        if owner != self._owner or not _SEGMENT.fullmatch(file):
            raise SnapshotRefused(f"segment {name!r}: it is not a segment of {self._owner}")
        try:
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise SnapshotRefused(f"segment {name}: {error.strerror}") from error
        try:
            return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise SnapshotRefused(f"segment {name}: {error}") from error
        finally:
            os.close(descriptor)

    def _forget_removed(self) -> None:
        for name in [name for name in self._mapped if not (self._folder / name).exists()]:
            del self._mapped[name]


def sweep(folder: Path) -> None:
    """Removes the files of dead owners; a live owner holds its lock."""
    for owner in entries(folder):
        if _OWNER.fullmatch(owner.name) and is_abandoned(owner / LOCK_FILE):
            shutil.rmtree(owner, ignore_errors=True)
