"""Snapshots between processes of one host: one file each in a folder that lives in memory (tmpfs)."""

import errno
import mmap
import os
import re
import secrets
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue, NotFound, SnapshotRefused
from dora.kvtransfer.codec import decode, encode
from dora.kvtransfer.snapshot import KvSnapshot

_LOCATOR: Final = re.compile(r"[0-9a-f]{32}\.kv")
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ShmTransport:
    """A ``KvTransport`` over files in one folder, on /dev/shm or any other tmpfs; a locator is a file's name.

    A file is written under a temporary name, then renamed, so a locator names a whole snapshot or none. Files are
    readable by their owner only. What was not released is removed with the folder, by whoever made the folder. The
    file system's size is the bound: a snapshot that does not fit is refused.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise InvalidValue("snapshot directory", str(directory), "an existing folder, best on a tmpfs")
        self._directory = directory

    def put(self, snapshot: KvSnapshot) -> str:
        locator = f"{secrets.token_hex(16)}.kv"
        unfinished = self._directory / f".{locator}"
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as stream:
                for part in encode(snapshot):
                    rest = memoryview(part).cast("B")
                    while rest:
                        rest = rest[stream.write(rest) :]
            unfinished.rename(self._directory / locator)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            if error.errno in _NO_ROOM:
                raise SnapshotRefused(f"snapshot directory = {str(self._directory)!r}: no room left") from error
            raise
        return locator

    def get(self, locator: str) -> KvSnapshot:
        try:
            with self._file(locator).open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise NotFound("locator", locator, "a snapshot that was put and not released") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise SnapshotRefused("total bytes = 0") from error
        return decode(memoryview(mapped))

    def release(self, locator: str) -> None:
        self._file(locator).unlink(missing_ok=True)

    def _file(self, locator: str) -> Path:
        if not _LOCATOR.fullmatch(locator):
            raise InvalidValue("locator", locator, "32 hexadecimal digits and .kv")
        return self._directory / locator
