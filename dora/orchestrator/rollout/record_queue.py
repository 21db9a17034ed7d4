"""Writes the run record: in the order of the requests, one write at a time, in a thread.

A failed write is retried at each storage check, and later writes wait for it. The queue is bounded: while a write
waits, nothing is admitted, so at most the admitted groups arrive, and no step is committed.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dora.data.run_record import CancelledGroup, CommittedStep, Recorder
from dora.data.score import Evaluated
from dora.data.trajectory import TrajectoryGroup
from dora.orchestrator.recording.storage import RECORD, STATE, Storage
from dora.orchestrator.rollout.journal import Journal
from dora.rpc.errors import ServiceUnavailable

log = logging.getLogger("dora.storage")

STORED_WAIT_S: Final = 10.0  # time that a commit waits for failed storage


@dataclass(slots=True, eq=False)
class _Write:
    """Describes one write. If it still fails at ``given_up_s``, its caller gets an error instead of waiting."""

    write: Callable[[], Any]
    appended: int  # log records that must be durable before it
    given_up_s: float | None = None
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RecordQueue:
    """Writes nothing without a recorder. ``spawn`` runs a coroutine as a task, whose failure is a bug."""

    def __init__(
        self,
        recorder: Recorder | None,
        storage: Storage,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        journal: Journal | None = None,
    ) -> None:
        """A record's line is written after its log records are durable; otherwise a restarted service might act
        differently.
        """
        self._journal = Journal() if journal is None else journal
        self._recorder = recorder
        self._storage = storage
        self._spawn = spawn
        self._waiting: deque[_Write] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()

    def evaluated(self, evaluated: Evaluated) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.append_evaluation, evaluated))

    def is_evaluated(self, version: int) -> bool:
        """Returns whether an earlier incarnation has recorded a whole evaluation of this version."""
        return self._recorder is not None and version in self._recorder.evaluated

    def evaluations(self) -> Iterator[Evaluated]:
        """Yields the evaluations that the record had at the start."""
        for tree in () if self._recorder is None else self._recorder.evaluations:
            yield Evaluated.from_json_dict(tree)

    def delivered(self, group: TrajectoryGroup) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.append, group.trajectories))

    def cancelled(self, group: CancelledGroup) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.append_cancelled, group))

    def restored(self, leased: Iterable[TrajectoryGroup], cancelled: Iterable[CancelledGroup], newest: int) -> None:
        """Requests the writes that an earlier incarnation may not have finished, and skips lines that are there."""
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.carry_on, newest, list(cancelled)))
            for group in leased:
                self.delivered(group)

    async def committed(self, step: CommittedStep, folder: Path, identity: bytes) -> None:
        """Returns once all earlier writes, the step's version and its line are on disk.

        Raises ServiceUnavailable if that fails for ``STORED_WAIT_S``: either the record has no line of the commit, or a
        repeated commit writes it again.
        """
        if self._recorder is not None:
            await self._stored(functools.partial(self._recorder.commit, step, folder, identity))

    async def republished(self, version: int, folder: Path, identity: bytes) -> None:
        """Does the same as ``committed``, for a version that was published again."""
        if self._recorder is not None:
            await self._stored(functools.partial(self._recorder.republish, version, folder, identity))

    def withdrawn(self, version: int) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.drop_version, version))

    async def written(self) -> None:
        if self._writing is not None:
            await self._writing

    async def finish(self) -> None:
        """Ends the queue: gives up writes that fail now, and writes without durable log records, because the next start
        may act differently.
        """
        await self._journal.flush()
        self._ends.set()
        self._storage.look_again()
        await self.written()

    async def _stored(self, write: Callable[[], Any]) -> None:
        """Returns once the write is done. Raises ServiceUnavailable if it fails for ``STORED_WAIT_S``."""
        await self._queue(write, asyncio.get_running_loop().time() + STORED_WAIT_S).done

    def _queue(self, write: Callable[[], Any], given_up_s: float | None = None) -> _Write:
        waiting = _Write(write, self._journal.appended, given_up_s)
        self._waiting.append(waiting)
        if self._writing is None or self._writing.done():
            self._writing = self._spawn(self._write())
        return waiting

    async def _write(self) -> None:
        while self._waiting:
            write = self._waiting[0]
            await self._settled(write.appended)
            if self._journal.durable < write.appended:
                self._give_up(STATE, f"the service's {STATE} cannot be written")
                continue
            try:
                await asyncio.to_thread(write.write)
            except OSError as error:
                self._storage.failed(RECORD, error)
                self._give_up(RECORD, f"the service's record cannot be written ({error.strerror})")
                if self._waiting:
                    await self._storage.next_look()
            else:
                self._waiting.popleft()
                self._storage.works(RECORD)
                if not write.done.done():
                    write.done.set_result(None)

    async def _settled(self, appended: int) -> None:
        if self._journal.durable >= appended:
            return
        waits = [asyncio.ensure_future(self._journal.settled(appended)), asyncio.ensure_future(self._ends.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    def _give_up(self, place: str, reason: str) -> None:
        """Fails the writes that have waited long enough; at the end of the service, all."""
        now_s = asyncio.get_running_loop().time()
        lines = 0
        for write in list(self._waiting):
            commit = write.given_up_s is not None
            if self._ends.is_set() or (write.given_up_s is not None and now_s >= write.given_up_s):
                self._waiting.remove(write)
                lines += not commit
                if commit and not write.done.done():
                    write.done.set_exception(
                        ServiceUnavailable(f"the write failed: {reason}; the call may be repeated", place)
                    )
        if lines:
            log.error("the run record lacks the last %d writes: %s", lines, reason)
