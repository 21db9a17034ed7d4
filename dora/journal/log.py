"""The log: the event loop appends records, and one thread writes them to disk in batches (group commit).

    append ──▶ waiting ──▶ write, fsync ──▶ Durable.apply ──▶ compaction
                 ▲ at the latest after FLUSH_S, at FLUSH_BYTES, or at once if a caller waits

The thread folds what it has written into a durable state of its own. Its checkpoint begins each segment, follows every
CHECKPOINT_BYTES, and ends the log of a service that stops.

Records that cannot be written stay in memory and are written again later; ``fault`` reports the failure and, after a
successful write, the recovery. The remains of a failed write are void: the next attempt uses a new segment, which
begins with a checkpoint.
"""

import asyncio
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora.journal import frames
from dora.journal.compaction import Compaction
from dora.journal.durable import Durable
from dora.journal.records import CODE, Checkpoint, Committed, Dropped, LogRecord, encoded
from dora.system.files import sync_folder

log = logging.getLogger("dora.journal")

FLUSH_S: Final = 0.02
FLUSH_BYTES: Final = 4 << 20
SEGMENT_BYTES: Final = 64 << 20
BEHIND_BYTES: Final = 128 << 20  # a disk that is so far behind is at fault: nothing more is admitted
CHECKPOINT_BYTES: Final = 4 << 20  # or CHECKPOINT_SHARE times the size of a checkpoint, if that is more
CHECKPOINT_SHARE: Final = 16
LOG_FOLDER: Final = "log"
PARTS_MAX: Final = 1024  # that the system writes at once (IOV_MAX)
BEHIND: Final = OSError(errno.ETIMEDOUT, f"the disk is {BEHIND_BYTES >> 20} MiB behind")
REMOVED: Final = "its log was removed while the service ran; stop it, then restore the folder or begin in a new one"

Told = Callable[[OSError | None], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """When the log writes, and how large its segments are. Without ``compacts`` nothing is deleted."""

    flush_s: float = FLUSH_S
    flush_bytes: int = FLUSH_BYTES
    segment_bytes: int = SEGMENT_BYTES
    behind_bytes: int = BEHIND_BYTES
    compacts: bool = True


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the log and its live part."""

    log_bytes: int
    live_bytes: int
    segments: int


DEFAULT_SIZES: Final = Sizes()


class Log:
    """Appends to the log of a state folder. All methods but the thread's own belong to the opener's event loop."""

    def __init__(
        self,
        folder: Path,
        durable: Durable,
        *,
        number: int,
        position: int,
        compaction: Compaction,
        sizes: Sizes = DEFAULT_SIZES,
        fault: Told = lambda error: None,
    ) -> None:
        """``durable`` is the state at ``position``, the end of the last existing segment, which has ``number``. The
        event loop calls ``fault`` with the reason if the log cannot be written, and with None once it can.
        """
        self._folder = folder
        self._number = number
        self._sizes = sizes
        self._compaction = compaction
        self._tell = fault
        self.synced: Callable[[float], None] = lambda took_s: None  # told in the log's thread of each write and fsync
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()  # resolves with the bug that ends the thread
        self.appended = 0  # facts
        self.durable = 0  # of these, durable
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._checkpoints: list[asyncio.Future[Size]] = []
        self._fault: OSError | None = None
        # shared with the thread
        self._changed = threading.Condition()
        self._waiting: list[tuple[bytes, LogRecord]] = []
        self._waiting_bytes = 0  # with what the thread has taken and not written yet
        self._wanted = 0  # the number of durable records for which a caller waits
        self._again = self._ending = self._checkpoint = False
        # the thread's own
        self._taken: deque[tuple[bytes, LogRecord]] = deque()
        self._file = -1
        self._is_unsure = False  # the last write has failed
        self._is_removed = False  # somebody has removed the file
        self._size_bytes = 0
        self._durable = Durable.from_checkpoint(durable.checkpoint())
        self._has_ended = False  # groups have ended since the compaction knows the live ones
        self._since_bytes = self._checkpoint_bytes = 0  # behind the last checkpoint; its size
        self._position = position
        self._written = 0  # facts that were appended
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- the event loop

    def append(self, record: LogRecord) -> int:
        """Appends a record. Returns the number of records; the record is on disk once ``durable`` has reached it."""
        body = encoded(record)
        with self._changed:
            before, self._waiting_bytes = self._waiting_bytes, self._waiting_bytes + frames.HEAD_BYTES + len(body)
            self._waiting.append((body, record))
            if len(self._waiting) == 1 or before < self._sizes.flush_bytes <= self._waiting_bytes:
                self._changed.notify()
        self.appended += 1
        if self._waiting_bytes > self._sizes.behind_bytes and self._fault is None:
            self._told(BEHIND)
        return self.appended

    @property
    def waiting_bytes(self) -> int:
        """The bytes of records that are not durable."""
        return self._waiting_bytes

    async def settled(self, logged: int | None = None) -> None:
        """Returns once all records so far, or the first ``logged``, are durable."""
        logged = self.appended if logged is None else logged
        if self.durable >= logged:
            return
        waiter = self._loop.create_future()
        self._waiters.append((logged, waiter))
        with self._changed:
            self._wanted = max(self._wanted, logged)
            self._changed.notify()
        await waiter

    def try_again(self) -> None:
        with self._changed:
            self._again = True
            self._changed.notify()

    async def flush(self) -> None:
        """Tries once to write all records so far, whether or not the last write failed."""
        tried: asyncio.Future[Size] = self._loop.create_future()
        self._checkpoints.append(tried)
        with self._changed:
            self._checkpoint = True
            self._changed.notify()
        ends: list[asyncio.Future[Any]] = [tried, self.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)

    async def checkpoint(self) -> Size:
        """Writes all records and deletes obsolete segments. Returns the size."""
        await self.settled()
        done: asyncio.Future[Size] = self._loop.create_future()
        self._checkpoints.append(done)
        with self._changed:
            self._checkpoint = True
            self._changed.notify()
        return await done

    async def close(self) -> None:
        """Writes the remaining records if possible. May be called again."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _reached(self, logged: int, error: OSError | None, waiting_bytes: int) -> None:
        self.durable = logged
        late = [each for each in self._waiters if each[0] > logged]
        for _, waiter in (each for each in self._waiters if each[0] <= logged):
            if not waiter.done():
                waiter.set_result(None)
        self._waiters = deque(late)
        if error is not None or self._fault is not BEHIND or waiting_bytes < self._sizes.behind_bytes // 2:
            self._told(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _told(self, error: OSError | None) -> None:
        if error is not self._fault:
            self._fault = error
            self._tell(error)

    def _checkpointed(self, size: Size) -> None:
        for done in self._checkpoints:
            if not done.done():
                done.set_result(size)
        self._checkpoints.clear()

    # ----------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            log.critical("the journal's thread failed: %r", error, exc_info=error)
            self._call(self._fail, error)
        finally:
            self._close_file()

    def _work(self) -> None:
        failed = False
        while True:
            with self._changed:
                self._wait(failed)
                self._again = False
                self._taken.extend(self._waiting)
                self._waiting.clear()
                ending, checkpoint, self._checkpoint = self._ending, self._checkpoint, False
            error = self._bring() or self._settle(ending or checkpoint)
            failed = error is not None
            with self._changed:
                waiting_bytes = self._waiting_bytes
            self._call(self._reached, self._written, error, waiting_bytes)
            if checkpoint:
                held = self._compaction
                self._call(self._checkpointed, Size(held.size_bytes, held.live_bytes, held.segments))
            if ending:
                if self._taken:
                    log.error("the log lacks its last %d facts: they cannot be written", len(self._taken))
                elif self._since_bytes:
                    with suppress(OSError):
                        self._append([self._checkpointed_state()])
                return

    def _wait(self, failed: bool) -> None:
        """Waits until there is work and it is due. The lock must be held."""
        while not (self._ending or self._checkpoint):
            if failed:
                if self._again:
                    return
                self._changed.wait()
            elif self._waiting:
                if self._wanted <= self._written and self._waiting_bytes < self._sizes.flush_bytes:
                    self._changed.wait(self._sizes.flush_s)
                return
            elif self._compaction.works and self._sizes.compacts:
                return
            else:
                self._changed.wait()

    def _bring(self) -> OSError | None:
        """Writes the taken records, ``FLUSH_BYTES`` at once. Returns the reason if it failed."""
        while self._taken or self._is_unsure:
            chunk, chunk_bytes = [], 0
            for body, record in self._taken:
                chunk.append((body, record))
                chunk_bytes += frames.HEAD_BYTES + len(body)
                if chunk_bytes >= self._sizes.flush_bytes:
                    break
            try:
                self._check_there()
                if self._file < 0 or self._size_bytes >= self._sizes.segment_bytes:
                    self._begin_segment()
                due = self._since_bytes >= max(CHECKPOINT_BYTES, CHECKPOINT_SHARE * self._checkpoint_bytes)
                self._append([self._checkpointed_state(), *chunk] if due else chunk)
            except OSError as error:
                self._void()
                return error
            for _ in chunk:
                self._taken.popleft()
            self._written += len(chunk)
            with self._changed:
                self._waiting_bytes -= chunk_bytes
        return None

    def _check_there(self) -> None:
        """Raises OSError from the time on at which somebody has removed the file that is being written: what it held
        cannot be written again, so nothing more may be acknowledged.
        """
        if self._is_removed or (self._file >= 0 and os.fstat(self._file).st_nlink == 0):
            self._is_removed = True
            raise OSError(errno.ENOENT, REMOVED)

    def _append(self, chunk: list[tuple[bytes, LogRecord]], *, is_copy: bool = False) -> None:
        """Writes and syncs once; then the records count as durable. If it raises OSError, none does.

        ``is_copy`` marks records that the log has, which change nothing.
        """
        parts: list[bytes] = []
        size_bytes = 0
        for body, record in chunk:
            parts += (frames.head(CODE[type(record)], body, size_bytes), body)
            size_bytes += frames.HEAD_BYTES + len(body)
        began_s = time.monotonic()
        _write(self._file, parts)
        os.fdatasync(self._file)
        self.synced(time.monotonic() - began_s)
        self._is_unsure = False
        self._size_bytes += size_bytes
        self._position += size_bytes
        for body, record in chunk:
            self._compaction.count(record, frames.HEAD_BYTES + len(body))
            self._since_bytes += len(body)
            if isinstance(record, Checkpoint):
                self._since_bytes, self._checkpoint_bytes = 0, len(body)
            elif not is_copy:
                self._durable.apply(record)
                self._has_ended |= isinstance(record, Committed | Dropped)

    def _settle(self, at_once: bool) -> OSError | None:
        """Continues compaction, to its end if ``at_once``."""
        if self._has_ended or at_once:
            self._has_ended = False
            self._compaction.changed(self._durable)
        try:
            while self._compaction.works and self._sizes.compacts and self._file >= 0:
                self._compact()
                if not at_once:
                    break
        except OSError as error:
            return error
        return None

    def _compact(self) -> None:
        """Copies the next part of the chosen segment's live data, or deletes the segment."""
        moved = self._compaction.next_part()
        if not moved:
            self._compaction.remove()
            return
        try:
            if self._size_bytes >= self._sizes.segment_bytes:
                self._begin_segment()
            self._append([(encoded(record), record) for record in moved], is_copy=True)
        except OSError:
            self._void()
            self._compaction.give_up()
            raise

    def _checkpointed_state(self) -> tuple[bytes, Checkpoint]:
        record = Checkpoint(self._durable.checkpoint(), self._compaction.ends(self._position))
        return encoded(record), record

    def _begin_segment(self) -> None:
        self._close_file()
        number, path = self._number + 1, frames.path_of(self._folder, self._number + 1)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        self._size_bytes = 0
        body, record = self._checkpointed_state()
        head = frames.head(CODE[Checkpoint], body, 0)
        _write(self._file, (frames.header(number, self._position), head, body))
        os.fdatasync(self._file)
        sync_folder(self._folder)
        self._compaction.begun(number, path, self._position)
        self._number = number
        record_bytes = len(head) + len(body)
        self._size_bytes = frames.HEADER_BYTES + record_bytes
        self._position += record_bytes
        self._compaction.count(record, record_bytes)
        self._since_bytes, self._checkpoint_bytes = 0, len(body)

    def _void(self) -> None:
        """Voids the remains of the last write: the next one uses a new segment."""
        self._is_unsure = True
        if self._file >= 0:
            with suppress(OSError):
                os.ftruncate(self._file, self._size_bytes)
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *arguments)


def _write(descriptor: int, parts: Sequence[bytes]) -> None:
    """Writes all parts in order. Raises OSError after an unknown number of bytes."""
    for begin in range(0, len(parts), PARTS_MAX):
        some = parts[begin : begin + PARTS_MAX]
        written = os.writev(descriptor, some)
        left = memoryview(b"".join(some))[written:] if written < sum(map(len, some)) else memoryview(b"")
        while left:
            left = left[os.write(descriptor, left) :]
