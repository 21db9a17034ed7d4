"""The service's storage and its faults. A storage fault is a state, not a crash.

    a write fails ──▶ failed(place) ──▶ StorageChanged("record: No space left on device") ──▶ the core admits nothing
    a retry at a tick succeeds ──▶ works(place) ──▶ StorageChanged("") ──▶ the core admits again

Acknowledged data is kept meanwhile: unwritten data waits in memory, which is bounded because nothing is admitted.
"""

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.errors import is_full
from dora.rpc.errors import LimitExceeded, ServiceUnavailable

log = logging.getLogger("dora.storage")

RUN_FOLDER: Final = "run folder"
RECORD: Final = "record"
STATE: Final = "state folder"  # its log
PERSISTED: Final = "state folder: versions"
ROOM_BYTES: Final = 256 << 10  # with less free space the run folder counts as full
_ROOM_FILE: Final = ".room"


@dataclass(slots=True)
class StorageFault:
    """Describes a storage place that cannot be written, ``since`` so many seconds after the Unix epoch."""

    place: str
    reason: str
    since: float
    needed_bytes: int = 0  # free space that is needed first


class Storage:
    def __init__(self) -> None:
        self.faults: dict[str, StorageFault] = {}
        self.faults_seen = 0
        self._changed: Callable[[str], None] = lambda _: None
        self._looks: asyncio.Future[None] | None = None

    def tell(self, changed: Callable[[str], None]) -> None:
        """Sets the function that receives all faults as one text at each change, or an empty text without faults."""
        self._changed = changed
        if self.faults:
            changed(self.summary())

    def failed(self, place: str, error: OSError, needed_bytes: int = 0) -> None:
        """Notes a failed write to ``place``. Logged once, until a write succeeds."""
        reason = error.strerror or str(error)
        fault = self.faults.get(place)
        if fault is None:
            self.faults[place] = StorageFault(place, reason, time.time(), needed_bytes)
            self.faults_seen += 1
            log.error("storage is at fault: %s: %s; nothing is admitted until it can be written", place, reason)
            self._changed(self.summary())
            return
        fault.needed_bytes = max(fault.needed_bytes, needed_bytes)
        if fault.reason != reason:
            fault.reason = reason
            self._changed(self.summary())

    def works(self, place: str) -> None:
        fault = self.faults.pop(place, None)
        if fault is not None:
            log.warning("storage has recovered: %s, after %.0f s", place, time.time() - fault.since)
            self._changed(self.summary())

    def summary(self) -> str:
        """Returns all faults in one line, or an empty text."""
        return "; ".join(f"{fault.place}: {fault.reason}" for _, fault in sorted(self.faults.items()))

    @contextmanager
    def writing(self, place: str, what: str, needed_bytes: int = 0) -> Iterator[None]:
        """Guards a caller's write: it fails with LimitExceeded for lack of room, else with ServiceUnavailable."""
        try:
            yield
        except OSError as error:
            self.failed(place, error, needed_bytes)
            raise refusal(place, what, error, needed_bytes) from error

    @contextmanager
    def tidying(self, place: str) -> Iterator[None]:
        """Guards background work such as deletions: a failure marks the place as faulty and raises nothing.

        A file that is gone is no fault, because the service itself may have deleted it. ``look_at`` finds a place that
        is gone as a whole.
        """
        try:
            yield
        except FileNotFoundError as error:
            log.debug("%s: nothing to tidy: %s", place, error)
        except OSError as error:
            self.failed(place, error)

    async def look_at(self, place: str, folder: Path) -> None:
        """Writes a little to the folder to test for free space."""
        fault = self.faults.get(place)
        try:
            await asyncio.to_thread(check_room, folder, fault.needed_bytes if fault is not None else 0)
        except OSError as error:
            self.failed(place, error)
        else:
            self.works(place)

    def look_again(self) -> None:
        if self._looks is not None:
            self._looks.set_result(None)
            self._looks = None

    async def next_look(self) -> None:
        if self._looks is None:
            self._looks = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._looks)


def refusal(place: str, what: str, error: OSError, needed_bytes: int) -> LimitExceeded | ServiceUnavailable:
    """Returns the error for a caller whose ``what`` could not be written."""
    if is_full(error):
        size = f"{needed_bytes:,} bytes" if needed_bytes else "more bytes"
        return LimitExceeded(what, size, f"what the service's {place} has room for ({error.strerror}); repeat it later")
    said = f"{what}: the service's {place} cannot be written ({error.strerror}); repeat it later"
    return ServiceUnavailable(said, place, error.strerror)


def check_room(folder: Path, room_bytes: int = 0) -> None:
    """Raises OSError if ``folder`` lacks room for so many more bytes. Writes ``ROOM_BYTES`` for a moment."""
    found = os.statvfs(folder)
    if found.f_blocks and found.f_bavail * found.f_frsize < room_bytes:  # a file system without blocks has no limit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file = folder / _ROOM_FILE
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, ROOM_BYTES)
    finally:
        os.close(descriptor)
        os.unlink(file)
