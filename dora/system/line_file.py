"""A file of lines that survives a failed fsync.

After a failed fsync the kernel may have dropped the pages, and a later fsync succeeds without them. So the lines since
the last successful fsync stay in memory. After a failure they are cut off, so that a restart does not find lines that
are not on disk, and the next write first writes them again, through a new descriptor.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora.system.files import sync_folder

UNSYNCED_BYTES_MAX: Final = 16 << 20  # lines in memory; beyond it the next line waits for an fsync


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file, except one at the end that a crash has torn. Changes nothing. Raises OSError."""
    with path.open("rb") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            yield line


class LineFile:
    """Appends whole lines to a file. Its lines must be read once first. Synchronous, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("ab", buffering=0)
        self._whole_bytes = 0
        self._synced_bytes = 0
        self._unsynced: list[bytes] = []
        self._torn = False  # there may be more in the file than whole lines
        self._doubted = False  # an fsync failed: the unsynced lines must be written again

    def lines(self) -> Iterator[bytes]:
        """Yields the lines and makes them durable. Cuts off a line that a crash has torn: it was never acknowledged."""
        self._whole_bytes = 0
        for line in whole_lines(self._path):
            self._whole_bytes += len(line)
            yield line
        self._cut()
        try:
            os.fsync(self._stream.fileno())
        except OSError:
            self._copy()
        self._synced_bytes = self._whole_bytes

    def append(self, lines: bytes) -> None:
        """Raises OSError, after which none of ``lines`` counts."""
        if self._doubted or self._whole_bytes - self._synced_bytes >= UNSYNCED_BYTES_MAX:
            self.sync()
        if self._torn:
            self._cut()
        try:
            _write(self._stream.fileno(), lines)
        except OSError:
            self._torn = True
            with suppress(OSError):  # else before the next line
                self._cut()
            raise
        self._whole_bytes += len(lines)
        self._unsynced.append(lines)

    def append_durably(self, lines: bytes) -> None:
        """Appends ``lines`` and makes the file durable. Raises OSError, after which none of ``lines`` counts."""
        self.append(lines)
        try:
            self.sync()
        except OSError:
            self._unsynced.pop()
            self._whole_bytes -= len(lines)
            raise

    def cut_last(self, size_bytes: int) -> None:
        """Removes the last so many bytes: whole lines that were never acknowledged."""
        self._whole_bytes -= size_bytes
        self._synced_bytes = min(self._synced_bytes, self._whole_bytes)
        left = b"".join(self._unsynced)[: self._whole_bytes - self._synced_bytes]
        self._unsynced = [left] if left else []
        self._cut()

    def sync(self) -> None:
        """Makes all lines durable. Raises OSError; the next call then writes the lines again."""
        try:
            if self._doubted:
                self._rewrite()
            os.fsync(self._stream.fileno())
        except OSError:
            self._doubted = True
            with suppress(OSError):  # else before the lines are written again
                self._stream.truncate(self._synced_bytes)
            raise
        self._doubted = False
        self._synced_bytes = self._whole_bytes
        self._unsynced.clear()

    def close(self) -> None:
        self._stream.close()

    def _rewrite(self) -> None:
        stream = self._path.open("ab", buffering=0)
        self._stream.close()
        self._stream = stream
        stream.truncate(self._synced_bytes)
        self._torn = False
        _write(stream.fileno(), b"".join(self._unsynced))

    def _copy(self) -> None:
        """Writes the whole file anew: nothing says which of its pages are on disk."""
        unfinished = self._path.with_name(f".{self._path.name}")
        unfinished.unlink(missing_ok=True)
        shutil.copyfile(self._path, unfinished)
        stream = unfinished.open("ab", buffering=0)
        try:
            os.fsync(stream.fileno())
            os.replace(unfinished, self._path)
            sync_folder(self._path.parent)
        except OSError:
            stream.close()
            raise
        self._stream.close()
        self._stream = stream

    def _cut(self) -> None:
        self._stream.truncate(self._whole_bytes)
        self._torn = False


def _write(descriptor: int, lines: bytes) -> None:
    rest = memoryview(lines)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
