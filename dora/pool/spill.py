"""Files of snapshots that have no more room in memory.

    <folder>/dora-pool-<16 hex>/pool.lock     held by the pool's process as long as it lives
    <folder>/dora-pool-<16 hex>/<n>.kv        the body of one snapshot: its rounds in a row

A body's head and checksums stay in memory, a small part of it, so a file is nothing that could be taken for a snapshot:
it is checked against them when it is read. Nothing is synced: a file is of use to the process that wrote it alone.
"""

import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora.errors import InvalidValue
from dora.system.ownership import hold_new, is_abandoned

PREFIX: Final = "dora-pool-"
LOCK_FILE: Final = "pool.lock"
PIECE_BYTES: Final = 8 << 20  # of one write: how soon a thread that writes sees that it is to end


class SpillFolder:
    """The files of one pool. One thread writes and reads; ``remove`` is for any."""

    def __init__(self, parent: Path, most_bytes: int) -> None:
        """Removes what dead pools of this user left there. Raises InvalidValue where nothing can be written."""
        self.most_bytes = most_bytes
        for left in parent.glob(f"{PREFIX}*"):
            if is_abandoned(left / LOCK_FILE):
                shutil.rmtree(left, ignore_errors=True)
        self.folder = parent / f"{PREFIX}{secrets.token_hex(8)}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700)
            self._lock = hold_new(self.folder / LOCK_FILE)
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            allowed = f"a folder with room to write in ({error.strerror})"
            raise InvalidValue("kv.spill_folder", str(parent), allowed) from error
        self._written = 0
        self._ends = False

    def write(self, bodies: Sequence[memoryview]) -> Path:
        """A new file. Raises OSError where it cannot be written whole; nothing is left of it then."""
        self._written += 1
        file = self.folder / f"{self._written}.kv"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for body in bodies:
                rest = body.cast("B")
                while rest:  # on a disk that is nearly full a write takes a part of it
                    if self._ends:
                        raise OSError("the pool ends")
                    rest = rest[os.write(descriptor, rest[:PIECE_BYTES]) :]
        except BaseException:
            self.remove(file)
            raise
        finally:
            os.close(descriptor)
        return file

    def read_into(self, file: Path, bodies: Sequence[memoryview]) -> bool:
        """Fills ``bodies`` in a row. False: the file ends before. Raises OSError."""
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            for body in bodies:
                rest = body.cast("B")
                while rest:
                    if self._ends:
                        raise OSError("the pool ends")
                    taken = os.readv(descriptor, [rest[:PIECE_BYTES]])
                    if not taken:
                        return False
                    rest = rest[taken:]
        finally:
            os.close(descriptor)
        return True

    def remove(self, file: Path) -> None:
        with suppress(OSError):  # it goes with its folder
            file.unlink(missing_ok=True)

    def end(self) -> None:
        """What is being written or read ends at its next piece."""
        self._ends = True

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
