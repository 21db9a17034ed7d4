"""Snapshots between processes of one host: one file each in a folder that lives in memory (tmpfs)."""

import mmap
import os
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue, NotFound, SnapshotRefused, is_full
from dora.kvtransfer.codec import decode, encode
from dora.kvtransfer.snapshot import KvSnapshot

_OWNER: Final = re.compile(r"[0-9a-z]{1,32}")
_LOCATOR: Final = re.compile(rf"{_OWNER.pattern}-[0-9a-f]{{32}}\.kv")


class ShmTransport:
    """A ``KvTransport`` over files in one folder, on /dev/shm or any other tmpfs; a locator is a file's name.

    A file is written under a temporary name, then renamed, so a locator names a whole snapshot or none. Files are
    readable by their owner only. What was not released is removed with the folder, by whoever made the folder. The
    file system's size is the bound: a snapshot that cannot be written is refused. A locator begins with its ``owner``,
    whoever put it: 1 to 32 digits and small letters.
    """

    def __init__(self, directory: Path, owner: str = "0") -> None:
        if not _OWNER.fullmatch(owner):
            raise InvalidValue("owner", owner, "1 to 32 digits and small letters")
        if not directory.is_dir():
            raise InvalidValue("snapshot directory", str(directory), "an existing folder, best on a tmpfs")
        self._directory, self._owner = directory, owner

    def put(self, snapshot: KvSnapshot) -> str:
        locator = f"{self._owner}-{secrets.token_hex(16)}.kv"
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
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            why = "no room left" if is_full(error) else f"it cannot be written ({error.strerror})"
            raise SnapshotRefused(f"snapshot directory = {str(self._directory)!r}: {why}") from error
        return locator

    def get(self, locator: str) -> KvSnapshot:
        try:
            with self._file(locator).open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise NotFound("locator", locator, "a snapshot that was put and not released") from error
        except OSError as error:
            raise SnapshotRefused(f"{locator} cannot be read ({error.strerror})") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise SnapshotRefused("total bytes = 0") from error
        return decode(memoryview(mapped))

    def check(self, locator: str, owner: str) -> None:
        if not _LOCATOR.fullmatch(locator) or locator.partition("-")[0] != owner:
            raise InvalidValue("locator", locator, f"{owner}, a dash, 32 hexadecimal digits and .kv")

    def release(self, locator: str) -> None:
        self._file(locator).unlink(missing_ok=True)

    def sweep(self, owners: Collection[str], kept: Collection[str]) -> None:
        for file in self._directory.iterdir():
            locator = file.name.removeprefix(".")  # also what is under its temporary name
            if _LOCATOR.fullmatch(locator) and locator not in kept and locator.partition("-")[0] not in owners:
                file.unlink(missing_ok=True)

    def _file(self, locator: str) -> Path:
        if not _LOCATOR.fullmatch(locator):
            raise InvalidValue("locator", locator, "its owner, a dash, 32 hexadecimal digits and .kv")
        return self._directory / locator
