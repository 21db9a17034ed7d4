"""Writes snapshots to disk, reads them back and checks them, in a thread of its own.

Snapshots are read back into separate, bounded memory. A snapshot is lost if its file differs from what was written or
cannot be read. ``spill`` owns the files.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dora.errors import DoraError, TransferFailed
from dora.kvtransfer.copying import NotMovable
from dora.kvtransfer.memory import BufferPool
from dora.pool.parked import Bodies, Parked
from dora.pool.spill import SpillFolder

# snapshot file, or the reason why it was not written; neither if the snapshot was not wanted
Written = Callable[[Path | None, str], None]
NotRead = Callable[[str], None]  # why it is lost; empty: it may be read another time


class Disk:
    """Reads and writes snapshots. Thread-safe. Callbacks are called in the disk's thread."""

    def __init__(self, spill: SpillFolder, secret: bytes, read_bytes: int) -> None:
        """``secret`` is the run's, for keyed checksums. ``read_bytes`` limits memory for snapshots being read back."""
        self.most_bytes = spill.most_bytes
        self._spill = spill
        self._secret = secret
        self._back = BufferPool(read_bytes)
        self._thread = ThreadPoolExecutor(1, "pool-disk")

    def write(self, parked: Parked, is_current: Callable[[], bool], written: Written) -> None:
        """Queues a snapshot. It is written if it is still wanted at its turn."""
        self._thread.submit(self._write, parked, is_current, written)

    def read(self, parked: Parked, opened: "Future[Bodies]", not_read: NotRead) -> None:
        """Completes ``opened`` with the bodies, or with NotMovable if lost, TransferFailed if read memory is full."""
        self._thread.submit(self._read, parked, opened, not_read)

    def remove(self, file: Path) -> None:
        self._spill.remove(file)

    def close(self) -> None:
        self._spill.end()
        self._thread.shutdown(cancel_futures=True)

    def _write(self, parked: Parked, is_current: Callable[[], bool], written: Written) -> None:
        if not is_current():
            written(None, "")
            return
        try:
            file = self._spill.write([body.data for body in parked.bodies])
        except OSError as error:
            written(None, f"it could not be written to disk ({error.strerror or error})")
            return
        written(file, "")

    def _read(self, parked: Parked, opened: "Future[Bodies]", not_read: NotRead) -> None:
        lost = ""
        try:
            bodies, lost = self._read_back(parked)
            if lost:
                raise NotMovable(f"{parked.request_id} is lost: {lost}")
        except DoraError as error:
            not_read(lost)
            opened.set_exception(error)
        else:
            opened.set_result(bodies)

    def _read_back(self, parked: Parked) -> tuple[Bodies, str]:
        file = parked.file
        if file is None:
            raise NotMovable(f"{parked.request_id} was forgotten meanwhile")
        bodies = [self._back.array(each.size_bytes) for each in parked.rounds]
        taken = [body for body in bodies if body is not None]
        if len(taken) < len(bodies):
            lent = self._back.lent_bytes()
            raise TransferFailed(f"{parked.size_bytes:,} bytes: too much is being read back, {lent:,} bytes")
        try:
            wrong = "" if self._spill.read_into(file, [body.data for body in taken]) else "its file is too short"
        except OSError as error:
            wrong = f"its file cannot be read ({error.strerror or error})"
        return taken, wrong or parked.damage(taken, self._secret)
