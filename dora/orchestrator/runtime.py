"""The asyncio shell around the core: events in, commands carried out. It does what the core decided, nothing else.

    gRPC, timers ──▶ post(event) ──▶ machine.handle ──▶ commands ──▶ executor ──▶ sessions, book, verifier, store
                      ▲   │                                                                  │
                      │   └──▶ event log                                                     │
                      └───────────────────────── one outcome event each ◀────────────────────┘

``post`` runs in the event loop and never waits, so the book and the core always agree.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from dora.config import Config
from dora.errors import Conflict, InvalidValue
from dora.kvtransfer.segments import sweep
from dora.orchestrator.book import Book
from dora.orchestrator.core import Machine
from dora.orchestrator.core import events as on
from dora.orchestrator.core.handoff_table import Handoff
from dora.orchestrator.eventlog import EventLogWriter
from dora.orchestrator.executor import Executor, Verifier
from dora.orchestrator.feed import PromptFeed
from dora.orchestrator.presence import TrainerPresence
from dora.orchestrator.record_queue import RecordQueue
from dora.orchestrator.storage import EVENT_LOG, RUN_FOLDER, Storage
from dora.orchestrator.streams import KvTier, Session, Sessions, WorkerProcesses, WorkerSession
from dora.orchestrator.telemetry import Telemetry
from dora.orchestrator.worker_reports import WorkerReports
from dora.record import Recorder
from dora.rewards import GroupFilter
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

HOPELESS: Final = (
    "a source that works, or prompts submitted over gRPC; the step keeps its groups, and may be asked again"
)


class Runtime:
    """One service's orchestrator: makes the parts and passes events between them."""

    def __init__(
        self,
        config: Config,
        *,
        feed: PromptFeed,
        verifier: Verifier,
        group_filter: GroupFilter | None = None,
        store: WeightStore,
        snapshots: Path,
        recorder: Recorder | None,
        processes: WorkerProcesses | None = None,
        event_log: EventLogWriter | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.config = config
        self.machine = Machine(config)
        self.book = Book(config.rollout)
        self.telemetry = Telemetry()
        self.feed = feed
        self.store = store
        self._snapshots = snapshots
        self.event_log = event_log
        self.storage = storage or Storage()
        self.storage.tell(lambda fault: self.post_soon(on.StorageChanged(fault)))
        self.recorder = RecordQueue(recorder, self.storage, self.spawn)
        self.sessions = Sessions(self._end_lost, processes)
        self.reports = WorkerReports(
            machine=self.machine,
            book=self.book,
            store=store,
            telemetry=self.telemetry,
            storage=self.storage,
            post=self.post,
        )
        self.executor = Executor(
            book=self.book,
            feed=feed,
            verifier=verifier,
            group_filter=group_filter,
            store=store,
            recorder=self.recorder,
            storage=self.storage,
            sessions=self.sessions,
            handoff_of=self._handoff_of,
            telemetry=self.telemetry,
            post=self.post,
            spawn=self.spawn,
        )
        self.trainer = TrainerPresence()
        self.tier: KvTier | None = None
        self.started_at = time.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._posting = False

    # --------------------------------------------------------------------------------------------------------- events

    def post(self, event: on.Event) -> None:
        """Hands an event to the core and carries out its commands. What the core refuses raises and changes nothing.

        Anything else that raises leaves an event half done: a bug, which ends the service. The event log has the event
        before the core does, so that its replay comes to the same refusal, or the same bug.
        """
        assert not self._posting, "an event was posted while another is handled; use post_soon"
        self._posting, handled = True, False
        try:
            now_s = time.monotonic()
            if self.event_log is not None:
                self.event_log.append(event, now_s)
            commands = self.machine.handle(event, now_s)
            handled = True
            for command in commands:
                self.executor.carry_out(command)
        except Exception as error:
            if handled or not isinstance(error, InvalidValue):
                self._fail(error)
            raise
        finally:
            self._posting = False

    def post_soon(self, event: on.Event) -> None:
        """Posts after what is being handled now."""
        asyncio.get_running_loop().call_soon(self.post, event)

    def _end_lost(self, session: Session, reason: str) -> None:
        lost = on.WorkerLost if isinstance(session, WorkerSession) else on.PoolLost
        self.post_soon(lost(session.worker_id, session.epoch, reason))

    def trainer_present(self) -> bool:
        """Whether a trainer streams, trains on leased groups, or did so a moment ago."""
        return self.trainer.is_awaited(self._trainer_holds())

    def trainer_shown(self) -> str:
        """The name of the trainer that is attached; empty where there is none, or it has left."""
        return self.trainer.name if self.trainer.is_there(self._trainer_holds()) else ""

    def _trainer_holds(self) -> bool:
        return self.sessions.stream is not None or bool(self.machine.state.leased)

    async def ticks(self) -> None:
        """Time for the core, a look at the storage, and an end for what waits in vain."""
        while True:
            await asyncio.sleep(self.config.service.tick_s)
            workers = self.machine.state.workers.values()
            loading = {worker.worker_id for worker in workers if worker.loading >= 0}
            self.sessions.replace_silent(self.config.workers.silence_timeout_s, loading)
            self.post(on.Tick())
            with self.storage.tidying(RUN_FOLDER):
                self.sweep_snapshots()
            await self.look_at_storage()
            self._end_hopeless_step()

    async def look_at_storage(self) -> None:
        """Finds out what can be written, and repeats what could not."""
        await self.storage.look_at(RUN_FOLDER, self.store.root)
        if self.event_log is not None:
            error = self.event_log.write_again()
            if error is not None:
                self.storage.failed(EVENT_LOG, error)
            else:
                self.storage.works(EVENT_LOG)
        self.storage.look_again()

    def _end_hopeless_step(self) -> None:
        """A step that no group can come for any more, because the prompt source has failed, ends with that error."""
        state, stream = self.machine.state, self.sessions.stream
        comes = len(self.feed) or len(state.backlog) or state.window.open_groups
        if self.feed.failure and stream is not None and not comes:
            self.sessions.stream = None
            stream.close(
                error=Conflict(
                    "prompts", self.config.prompts.source, HOPELESS, why=f"have failed ({self.feed.failure})"
                )
            )

    def sweep_snapshots(self) -> None:
        """Deletes the shared memory of workers that are gone; whoever was given some has it mapped."""
        sweep(self._snapshots)

    def _handoff_of(self, command_id: int) -> Handoff | None:
        pending = self.machine.state.pending.get(command_id)
        return pending.handoff if pending is not None else None

    # ----------------------------------------------------------------------------------------------------- background

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs what waits in the background. A failure there is a bug and ends the service."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    async def close(self) -> None:
        """Ends the trainer's stream, waits for the record, and stops what is under way."""
        if self.sessions.stream is not None:
            self.sessions.stream.close(superseded=True)
        await self.recorder.finish()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.critical("the service failed: %r", error, exc_info=error)
        if not self.failed.done():
            self.failed.set_exception(error)

    @functools.cached_property
    def failed(self) -> asyncio.Future[None]:
        """Resolves with the bug that ends the service."""
        return asyncio.get_running_loop().create_future()
