"""The writes to a run's record: in the order in which they were asked for, one at a time, in a thread.

A write that fails is repeated at each look of the storage, and what follows it waits. That is bounded: while it waits
nothing is admitted, so at most what was admitted comes, and no step is committed.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dora.data.run_record import CancelledGroup, CommittedStep, Recorder
from dora.data.trajectory import TrajectoryGroup
from dora.orchestrator.recording.storage import RECORD, STATE, Storage
from dora.orchestrator.rollout.journal import Journal
from dora.rpc.errors import ServiceUnavailable

log = logging.getLogger("dora.storage")

STORED_WAIT_S: Final = 10.0  # a commit waits for storage that is at fault


@dataclass(slots=True, eq=False)
class _Write:
    """One write. ``given_up_s``: where it still fails then, its caller is told instead of waiting on."""

    write: Callable[[], Any]
    told: int  # facts of the journal that it may rest on
    given_up_s: float | None = None
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RecordQueue:
    """Without a recorder nothing is written. ``spawn`` runs a coroutine as a task, whose failure is a bug."""

    def __init__(
        self,
        recorder: Recorder | None,
        storage: Storage,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        journal: Journal | None = None,
    ) -> None:
        """What is recorded is in ``journal`` first: else a service that starts again might do it otherwise."""
        self._journal = Journal() if journal is None else journal
        self._recorder = recorder
        self._storage = storage
        self._spawn = spawn
        self._waiting: deque[_Write] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()

    def delivered(self, group: TrajectoryGroup) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.append, group.trajectories))

    def cancelled(self, group: CancelledGroup) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.append_cancelled, group))

    def restored(self, leased: Iterable[TrajectoryGroup], cancelled: Iterable[CancelledGroup], newest: int) -> None:
        """A service that starts again asks for what it may not have got to: what is written already is passed over."""
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.carry_on, newest, list(cancelled)))
            for group in leased:
                self.delivered(group)

    async def committed(self, step: CommittedStep, folder: Path, identity: bytes) -> None:
        """Returns once all that was asked for so far, the step's version and its line are on disk.

        Raises ServiceUnavailable where that cannot be written for ``STORED_WAIT_S``: the record then does not say that
        the step was committed, or a repeated commit will say it again.
        """
        if self._recorder is not None:
            await self._stored(functools.partial(self._recorder.commit, step, folder, identity))

    async def republished(self, version: int, folder: Path, identity: bytes) -> None:
        """The same of a version that is published anew."""
        if self._recorder is not None:
            await self._stored(functools.partial(self._recorder.republish, version, folder, identity))

    def withdrawn(self, version: int) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.drop_version, version))

    async def written(self) -> None:
        """Waits until all that was asked for is written."""
        if self._writing is not None:
            await self._writing

    async def finish(self) -> None:
        """The service ends: what cannot be written now is given up, and what is not in the journal: a start that
        carries on may do it otherwise."""
        await self._journal.flush()
        self._ends.set()
        self._storage.look_again()
        await self.written()

    async def _stored(self, write: Callable[[], Any]) -> None:
        """Returns once it is written. Raises ServiceUnavailable where it cannot be for ``STORED_WAIT_S``."""
        await self._queue(write, asyncio.get_running_loop().time() + STORED_WAIT_S).done

    def _queue(self, write: Callable[[], Any], given_up_s: float | None = None) -> _Write:
        waiting = _Write(write, self._journal.told, given_up_s)
        self._waiting.append(waiting)
        if self._writing is None or self._writing.done():
            self._writing = self._spawn(self._write())
        return waiting

    async def _write(self) -> None:
        while self._waiting:
            write = self._waiting[0]
            await self._settled(write.told)
            if self._journal.durable < write.told:
                self._give_up(f"the service's {STATE} cannot be written")
                continue
            try:
                await asyncio.to_thread(write.write)
            except OSError as error:
                self._storage.failed(RECORD, error)
                self._give_up(f"the service's record cannot be written ({error.strerror})")
                if self._waiting:
                    await self._storage.next_look()
            else:
                self._waiting.popleft()
                self._storage.works(RECORD)
                if not write.done.done():
                    write.done.set_result(None)

    async def _settled(self, told: int) -> None:
        """Waits until the journal has so many facts; where it never will, until the service ends."""
        if self._journal.durable >= told:
            return
        waits = [asyncio.ensure_future(self._journal.settled(told)), asyncio.ensure_future(self._ends.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    def _give_up(self, reason: str) -> None:
        """Tells those who have waited long enough. At the end of the service: all."""
        now_s = asyncio.get_running_loop().time()
        lines = 0
        for write in list(self._waiting):
            commit = write.given_up_s is not None
            if self._ends.is_set() or (write.given_up_s is not None and now_s >= write.given_up_s):
                self._waiting.remove(write)
                lines += not commit
                if commit and not write.done.done():
                    write.done.set_exception(
                        ServiceUnavailable(f"it is not stored: {reason}; the call may be repeated")
                    )
        if lines:
            log.error("the record lacks the last %d writes: %s", lines, reason)
