"""The asyncio shell around the core: events in, commands carried out. It makes no decision of its own.

    gRPC, timers ──▶ post(event) ──▶ machine.handle ──▶ commands ──▶ executor ──▶ sessions, buffer, verifier, store
                      ▲   │                                              │                   │
                      │   └──▶ journal ◀─────────────────────────────────┘                   │
                      └───────────────────────── one outcome event each ◀────────────────────┘

``post`` runs in the event loop and never waits, so the response buffer and the core always agree.
"""

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from dora.config import Config
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import Handoff
from dora.data.run_record import Recorder
from dora.data.types import RoutingShape
from dora.errors import Conflict, InvalidValue
from dora.journal import records
from dora.journal.finding import Found
from dora.journal.versions import KeptVersions
from dora.kvtransfer.transports.segments import sweep
from dora.orchestrator.executor import Executor, Verifier
from dora.orchestrator.guard import tls_of
from dora.orchestrator.hosts.examinations import Examinations
from dora.orchestrator.hosts.fronts import Fronts
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.recording.storage import KEPT, RUN_FOLDER, Storage
from dora.orchestrator.recovery import resume
from dora.orchestrator.recovery.reattachment import Reattachment
from dora.orchestrator.rollout import distributions as of
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.evaluations import Evaluations
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.presence import TrainerPresence
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.rollout.reports import WorkerReports
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import KvTier, Session, Sessions, WorkerSession
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.rewards import GroupFilter
from dora.rpc import dora_pb2 as pb
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

HOPELESS: Final = (
    "a source that works, or prompts submitted over gRPC; the step keeps its groups and may be requested again"
)


class Traces(Protocol):
    """The traces of a service (``tracing/spans.py``)."""

    def came(self, event: on.Event, commands: Sequence[do.Command]) -> None:
        """Follows an event that the core has handled, and its commands."""

    def submitted(self, prompt_ids: Sequence[str], trace: Mapping[str, str]) -> None:
        """Notes the span of the client that submitted these prompts. ``trace``: W3C's fields."""

    def published(self, step: int, version: int, took_s: float) -> None:
        """Enters the publication that a step's commit has just made."""


class Runtime:
    """One service's orchestrator: builds the parts and passes events between them."""

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
        journal: Journal | None = None,
        versions: KeptVersions | None = None,
        storage: Storage | None = None,
        routing: RoutingShape | None = None,
    ) -> None:
        self.config = config
        self.machine = Machine(config)
        self.buffer = ResponseBuffer(config.rollout, routing, config.window.least)
        self.telemetry = Telemetry()
        self.feed = feed
        self.store = store
        self._snapshots = snapshots
        self.journal = Journal() if journal is None else journal
        if self.journal.log is not None:
            self.journal.log.failed.add_done_callback(self._journal_failed)
            self.journal.log.synced = functools.partial(self.telemetry.observe, of.SYNC)
        self.versions = versions
        self.incarnation = 0  # restarts of the service so far
        self.resumed: Mapping[str, Any] = {}  # the ledger's values at the start, if there was a ledger
        self.storage = storage or Storage()
        self.storage.tell(self._storage_changed_to)
        self.recorder = RecordQueue(recorder, self.storage, self.spawn, self.journal)
        self.sessions = Sessions(self._end_lost, None, config.workers.report_period_ms)
        fetched = functools.partial(self.telemetry.observe, of.RELAY)
        self.hosts = Hosts(config, store, self.sessions, self.machine.state, self.post, self.journal.note, fetched)
        self.sessions.processes = self.hosts
        self.environments = Environments(self.buffer, self.machine.state)
        self.fronts = Fronts()
        self.examinations = Examinations(self.hosts, self.sessions, self.machine.state, tls_of(config))
        self.reports = WorkerReports(
            machine=self.machine,
            buffer=self.buffer,
            store=store,
            telemetry=self.telemetry,
            storage=self.storage,
            journal=self.journal,
            post=self.post,
            ended=self._note_ended,
            reported=self.environments.reported,
            spawn=self.spawn,
            missing=self.hosts.missing,
            lacks=self.hosts.lacks,
        )
        self.evaluations = Evaluations(
            self.buffer,
            self.machine.state.evaluations.row_of,
            self.end_evaluation,
            self.environments.over,
            self.environments.idles,
        )
        self.executor = Executor(
            buffer=self.buffer,
            feed=feed,
            prompts=feed.ledger,
            verifier=verifier,
            group_filter=group_filter,
            store=store,
            recorder=self.recorder,
            storage=self.storage,
            sessions=self.sessions,
            hosts=self.hosts,
            evaluations=self.evaluations,
            handoff_of=self._handoff_of,
            row_of=self.machine.state.request_row,
            telemetry=self.telemetry,
            journal=self.journal,
            versions=versions,
            reference_version=config.rollout.reference_version,
            trainer_name=self.trainer_shown,
            session_over=self.environments.over,
            session_idles=self.environments.idles,
            post=self.post,
            spawn=self.spawn,
        )
        self.reattachment = Reattachment(())
        self.reattachment.close()  # closed unless a state is restored
        self.orphan_timeout_s = 0.0  # how long workers live without this service
        self.trainer = TrainerPresence()
        self.tier: KvTier | None = None
        self.started_s = time.monotonic()
        self.published: Callable[[int], None] = lambda version: None  # told of each committed version
        self.traces: Traces | None = None
        self.drain_ends_s: float | None = None  # monotonic: the end of the drain that a stop has begun
        self._ended: deque[tuple[int, WorkerSession, Sequence[tuple[str, int]]]] = (
            deque()
        )  # not yet durable: with the journal's count at that time
        self._tasks: set[asyncio.Task[None]] = set()
        self._posting = False

    # --------------------------------------------------------------------------------------------------------- events

    def post(self, event: on.Event, record_of: Callable[[], records.LogRecord] | None = None) -> None:
        """Hands an event to the core and carries out its commands. If the core refuses the event, this raises and
        changes nothing.

        ``record_of`` makes the event's log record, which is written before those of the commands, once the core has
        accepted the event. Any other exception leaves an event half done: a bug, which ends the service. The journal
        has the event before the core does, so a replay meets the same refusal or the same bug.
        """
        assert not self._posting, "an event was posted while another is handled; use post_soon"
        self._posting, handled = True, False
        try:
            now_s = time.monotonic()
            self.journal.event(event, now_s)
            self.telemetry.comes(event, self.machine.state, now_s)
            commands = self.machine.handle(event, now_s)
            handled = True
            if record_of is not None and self.journal.writes:
                self.journal.note(record_of())
            for command in commands:
                self.executor.carry_out(command)
            groups = self.machine.state.window.groups_per_step
            self.telemetry.step_times.came(event, commands, self.buffer, groups, now_s, time.time())
            self.journal.window(self.machine.state)
            self.journal.trainer(self.machine.state)
            if self.traces is not None:
                self.traces.came(event, commands)
        except Exception as error:
            if handled or not isinstance(error, InvalidValue):
                self._fail(error)
            raise
        finally:
            self._posting = False

    def resume(self, found: Found, expected: Iterable[str] = ()) -> on.Restored | None:
        """Restores an earlier incarnation's state; a new service only logs its begin.

        Returns the core's first event, which ``restore`` posts once the ``expected`` workers and pools (ids) have
        returned. Opens the reattachment for them.
        """
        self.orphan_timeout_s = self.config.workers.orphan_timeout_s
        self.incarnation = self.evaluations.incarnation = found.ledger.values["life"] + 1
        tree = self.config.model_dump_json(exclude={"service": {"token"}})
        groups = resume.begin_incarnation(self.journal, found, tree, self.incarnation)
        if found.is_new:
            return None
        ledger, newest = found.ledger, found.ledger.values["newest"]
        self.resumed = dict(ledger.values)
        self.sessions.epochs = self.resumed["worker_epoch"]
        number = max([self.resumed["next_number"], *(group.number + len(group.rows) for group in groups)])
        leased = resume.restore_buffer(self.buffer, groups, found.requests, number)
        resume.restore_prompts(self.feed.ledger, found, groups)
        restored = resume.restored(self.buffer, found, groups, self.config.window, time.time(), self.incarnation)
        self.buffer.window_versions = restored.window_versions
        self.hosts.kept_versions = newest - restored.retired + 1
        self.recorder.restored(leased, resume.cancelled_of(ledger.dropped()), newest)
        log.warning("carrying on at step %d with %d groups, %d of them leased", newest, len(groups), len(leased))
        self.reattachment = Reattachment(expected)
        return restored

    async def restore(self, restored: on.Restored | None) -> None:
        """Waits for workers of the earlier incarnation, then hands the restored state to the core. Until then the
        service admits only workers and pools.

        The begin of this incarnation is durable by then, so no later one reuses its ids.
        """
        await self._begun()
        if restored is None:
            return
        try:
            await self.reattachment.ended(self.config.workers.reattach_timeout_s)
            self.post(replace(self.reattachment.completed(restored), hosts=self.hosts.stood()))
            self.environments.restored()
        finally:
            self.reattachment.close()
        if self.storage.faults:
            self._storage_changed(self.storage.summary())

    async def _begun(self) -> None:
        """Returns once all log records of this incarnation so far are durable. Retries failed writes."""
        settled = asyncio.ensure_future(self.journal.settled())
        try:
            while not (await asyncio.wait([settled], timeout=self.config.service.tick_s))[0]:
                await self.look_at_storage()
        finally:
            settled.cancel()

    def _storage_changed_to(self, fault: str) -> None:
        """Notifies the core after the current event."""
        asyncio.get_running_loop().call_soon(self._storage_changed, fault)

    def _storage_changed(self, fault: str) -> None:
        """Ignored until the core is restored: otherwise the journal would record a fresh core's window and trainer."""
        if self.reattachment.is_over:
            self.post(on.StorageChanged(fault))

    def post_soon(self, event: on.Event) -> None:
        """Posts an event after the current one."""
        asyncio.get_running_loop().call_soon(self.post, event)

    def end_evaluation(self, evaluation_id: str, reason: str) -> None:
        """Ends an evaluation after the current event, if it still runs then."""

        def end() -> None:
            if evaluation_id in self.evaluations.running:
                self.post(on.EvaluationCancelled(evaluation_id, reason))

        asyncio.get_running_loop().call_soon(end)

    def _end_lost(self, session: Session, reason: str) -> None:
        if not self.reattachment.is_over:
            return  # the core does not know it yet
        lost = on.WorkerLost if isinstance(session, WorkerSession) else on.PoolLost
        self.post_soon(lost(session.worker_id, session.epoch, reason))
        self.hosts.worker_lost(session)

    def _note_ended(self, session: WorkerSession, request_ids: Sequence[str]) -> None:
        """Notes responses, and turns of sessions, that workers must keep until they are durable."""
        if self.orphan_timeout_s and request_ids:
            ended = [(each, len(self.buffer[each].given)) for each in request_ids]
            self._ended.append((self.journal.appended, session, ended))

    def _settle(self) -> None:
        """Tells connected workers which responses have become durable."""
        durable = self.journal.durable
        settled: dict[WorkerSession, list[str]] = {}
        while self._ended and self._ended[0][0] <= durable:
            _, session, ended = self._ended.popleft()
            if names := [name for name, turn in ended if self._is_turn(name, turn)]:
                settled.setdefault(session, []).extend(names)
        for session, request_ids in settled.items():
            session.send(pb.WorkerCommand(settled=pb.Settled(request_ids=request_ids)))

    def _is_turn(self, request_id: str, turn: int) -> bool:
        """Returns whether no later turn of the response was asked: its worker would take that for the settled one."""
        entry = self.buffer.get(request_id)
        return entry is None or len(entry.given) == turn

    def trainer_present(self) -> bool:
        """Whether a trainer streams, trains on leased groups, or did so a moment ago."""
        return self.trainer.is_expected(self._trainer_holds())

    def trainer_shown(self) -> str:
        """The name of the attached trainer; empty if there is none or it has left."""
        return self.trainer.name if self.trainer.is_there(self._trainer_holds()) else ""

    def _trainer_holds(self) -> bool:
        return self.sessions.stream is not None or bool(self.machine.state.leased)

    async def ticks(self) -> None:
        """Gives the core its clock ticks, checks the storage, and ends steps that can no longer be filled."""
        while True:
            due_s = time.monotonic() + self.config.service.tick_s
            await asyncio.sleep(self.config.service.tick_s)
            self.telemetry.observe(of.LATE, max(0.0, time.monotonic() - due_s))
            workers = self.machine.state.workers.values()
            loading = {worker.worker_id for worker in workers if worker.loading >= 0}
            self.sessions.replace_silent(self.config.workers.silence_timeout_s, loading)
            self.hosts.look(self.config.workers.silence_timeout_s)
            self.post(on.Tick())
            self._settle()
            with self.storage.tidying(RUN_FOLDER):
                self.sweep_snapshots()
            await self.look_at_storage()
            self._end_hopeless_step()

    async def look_at_storage(self) -> None:
        """Checks which storage can be written, and retries failed writes."""
        await self.storage.look_at(RUN_FOLDER, self.store.root)
        if self.versions is not None and KEPT in self.storage.faults:
            await self.storage.look_at(KEPT, self.versions.folder)
        if self.journal.log is not None:
            self.journal.log.try_again()
        self.storage.look_again()

    def _end_hopeless_step(self) -> None:
        """Ends a step with the prompt source's error if no further group can come."""
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
        """Deletes the shared memory of lost workers. Processes that have mapped it keep their mapping."""
        sweep(self._snapshots)

    def _handoff_of(self, command_id: int) -> Handoff | None:
        pending = self.machine.state.pending.get(command_id)
        return pending.handoff if pending is not None else None

    # ----------------------------------------------------------------------------------------------------- background

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine in the background. A failure there is a bug and ends the service."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    async def close(self) -> None:
        """Ends the trainer's stream, waits for the run record, and cancels background work."""
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

    def _journal_failed(self, failed: asyncio.Future[None]) -> None:
        if not failed.cancelled() and (error := failed.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.critical("the service failed: %r", error, exc_info=error)
        if not self.failed.done():
            self.failed.set_exception(error)

    @functools.cached_property
    def failed(self) -> asyncio.Future[None]:
        """Resolves with the bug that ends the service."""
        return asyncio.get_running_loop().create_future()
