"""Files of snapshots that do not fit into memory.

    <folder>/dora-pool-<16 hex>/pool.lock     locked by the pool's process during its life
    <folder>/dora-pool-<16 hex>/<n>.kv        the body of one snapshot: its rounds in a row

The header and checksums of a body stay in memory, so a file alone cannot pass for a snapshot; it is checked against
them when it is read. Files are not synced, because only the process that wrote them uses them.
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
from dora.system.private import is_own_folder

PREFIX: Final = "dora-pool-"
LOCK_FILE: Final = "pool.lock"
PIECE_BYTES: Final = 8 << 20  # of one write: a writing thread notices the end after at most this much


class SpillFolder:
    """The files of one pool. One thread reads and writes; any thread may call ``remove``."""

    def __init__(self, parent: Path, most_bytes: int) -> None:
        """Removes files of this user's dead pools. Raises InvalidValue if the folder is not writable."""
        self.most_bytes = most_bytes
        for left in parent.glob(f"{PREFIX}*"):
            if is_own_folder(left) and is_abandoned(left / LOCK_FILE):
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
        """Writes a new file. Raises OSError if it cannot be written whole; nothing of it remains."""
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
        """Fills ``bodies`` in a row. Returns False if the file is shorter. Raises OSError."""
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
        with suppress(OSError):  # removed with its folder
            file.unlink(missing_ok=True)

    def end(self) -> None:
        """Stops reads and writes at their next piece."""
        self._ends = True

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
