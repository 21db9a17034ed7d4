"""The parts of one service, without its processes: built around the core, restored, and looked after at each tick."""

import asyncio
import functools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.core import Machine
from dora.core import events as on
from dora.core.rules.precision import is_full
from dora.data.run_record import Recorder
from dora.data.types import RoutingShape
from dora.errors import Conflict
from dora.journal.finding import Found
from dora.journal.versions import PersistedVersions
from dora.kvtransfer.transports.segments import sweep
from dora.orchestrator.core import ServiceCore
from dora.orchestrator.executor import Executor
from dora.orchestrator.guard import tls_of
from dora.orchestrator.hosts.examinations import Examinations
from dora.orchestrator.hosts.fleet_advice import FleetAdvice
from dora.orchestrator.hosts.fronts import Fronts
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.recording.storage import PERSISTED, RUN_FOLDER, Storage
from dora.orchestrator.recovery import resume
from dora.orchestrator.recovery.incarnation import DurableEnds, Incarnation
from dora.orchestrator.recovery.reattachment import Reattachment
from dora.orchestrator.rollout import distributions as of
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.evaluations import Evaluations
from dora.orchestrator.rollout.feed import PromptFeed
from dora.orchestrator.rollout.groups import Groups
from dora.orchestrator.rollout.history import FleetHistory
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.prompts import Prompts
from dora.orchestrator.rollout.record_queue import RecordQueue
from dora.orchestrator.rollout.reports import WorkerReports
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import MemberSession, MemberSessions, WorkerSession
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.orchestrator.rollout.trainers import Trainers
from dora.orchestrator.rollout.verdicts import Verdicts, Verifier
from dora.orchestrator.rollout.versions import Versions
from dora.orchestrator.rollout.workers import Workers
from dora.orchestrator.services.draining import Draining
from dora.orchestrator.services.evaluation import Evaluating
from dora.orchestrator.services.status import ServiceStatus
from dora.rewards import GroupFilter
from dora.system.awake import READ_WITHIN_S, awake_s
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

STILL_S: Final = 30.0  # without a tick, after which a service is not live, or
STILL_TICKS: Final = 20.0  # times service.tick_s, if that is longer
HOPELESS: Final = (
    "a source that works, or prompts submitted over gRPC; the step keeps its groups and may be requested again"
)


class Runtime:
    """Holds one service's parts, each with its own state and the parts that it uses."""

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
        versions: PersistedVersions | None = None,
        storage: Storage | None = None,
        routing: RoutingShape | None = None,
    ) -> None:
        self.config, self.feed, self.store, self._snapshots = config, feed, store, snapshots
        self.journal, self.storage, self.telemetry = journal or Journal(), storage or Storage(), Telemetry()
        self.buffer = ResponseBuffer(config.rollout, routing, config.window.least)
        core = self.core = ServiceCore(Machine(config), Executor(), self.journal, self.telemetry, self.buffer)
        self.incarnation = Incarnation()
        self._ticked_s: float | None = None  # of the last tick, by the system's clock
        if recorder is not None:
            recorder.is_full = functools.partial(is_full, core.state)
        self.recorder = RecordQueue(recorder, self.storage, core.spawn, self.journal)
        self.sessions = MemberSessions(self._end_lost, None, config.workers.report_period_ms)
        fetched = functools.partial(self.telemetry.observe, of.RELAY)
        self.hosts = Hosts(config, store, self.sessions, core.state, core.post, self.journal.note, fetched)
        self.sessions.processes = self.hosts
        self.environments = Environments(self.buffer, core.state)
        self.durable_ends = DurableEnds(self.buffer, self.journal, self.incarnation)
        self.evaluations = Evaluations(core, self.buffer, self.environments)
        self.trainers = Trainers(core, self.buffer, self.journal, self.recorder)
        self.versions = Versions(core, store, versions, self.storage, self.journal, self.hosts, config.rollout)
        common = (self.buffer, self.journal, self.telemetry, self.storage, store, self.hosts, self.environments)
        history_bytes = config.workers.history_mb * 10**6 if config.workers.speculation == "history" else 0
        self.history = FleetHistory(self.buffer, self.sessions, history_bytes)
        self.reports = WorkerReports(core, core.machine, *common, self._ended)
        self._register(verifier, group_filter)
        self.evaluating = Evaluating(config, core, feed.check, self.buffer, self.evaluations)
        self.draining = Draining(config, core, feed, self.trainers)
        shown = (self.hosts, self.sessions, self.telemetry, self.storage, self.trainers, self.evaluating, self.draining)
        self.status = ServiceStatus(config, core, feed, *shown)
        self.fleet_advice = FleetAdvice(config, core.state, self.hosts, self.telemetry)
        self.status.fleet_advice = self.fleet_advice.status
        self.examinations = Examinations(self.hosts, self.sessions, core.state, tls_of(config))
        self.fronts = Fronts()
        self.storage.tell(lambda fault: core.soon(functools.partial(self._storage_changed, fault)))

    def _register(self, verifier: Verifier, group_filter: GroupFilter | None) -> None:
        core, feed, buffer, journal = self.core, self.feed, self.buffer, self.journal
        environments, evaluations = self.environments, self.evaluations
        for part in (
            Prompts(core, feed, buffer),
            Groups(core, buffer, feed.ledger, journal, self.recorder, environments, evaluations),
            Verdicts(core, buffer, journal, self.telemetry, environments, verifier, group_filter),
            evaluations,
            self.trainers,
            self.versions,
            Workers(core, buffer, self.sessions, self.hosts, self.history),
        ):
            core.executor.register(part.handlers)

    def resume(self, found: Found, expected: Iterable[str] = ()) -> on.Restored | None:
        """Restores an earlier incarnation's state; a new service only logs its begin.

        Returns the core's first event, which ``restore`` posts once the ``expected`` workers and pools (ids) have
        returned. Opens the reattachment for them.
        """
        own = self.incarnation
        own.orphan_timeout_s = self.config.workers.orphan_timeout_s
        own.number = self.evaluations.incarnation = found.durable.incarnation + 1
        tree = self.config.model_dump_json(exclude={"service": {"token"}})
        groups = resume.begin_incarnation(self.journal, found, tree, own.number)
        if found.is_new:
            return None
        own.resumed = durable = found.durable
        self.sessions.epochs = durable.worker_epoch
        number = max([durable.next_number, *(group.number + len(group.rows) for group in groups)])
        leased = resume.restore_buffer(self.buffer, groups, found.requests, number)
        resume.restore_prompts(self.feed.ledger, found, groups)
        restored = resume.restored(self.buffer, found, groups, self.config.window, time.time(), own.number)
        self.buffer.window_versions = restored.window_versions
        self.hosts.kept_versions = durable.newest - restored.retired + 1
        self.telemetry.evaluated.extend(self.recorder.evaluations())
        self.recorder.restored(leased, resume.cancelled_of(durable.dropped.values()), durable.newest)
        log.warning(
            "carrying on at step %d with %d groups, %d of them leased", durable.newest, len(groups), len(leased)
        )
        own.reattachment = Reattachment(expected)
        return restored

    async def restore(self, restored: on.Restored | None) -> None:
        """Waits for workers of the earlier incarnation, then hands the restored state to the core. Until then the
        service admits only workers and pools.

        The begin of this incarnation is durable by then, so no later one reuses its ids.
        """
        await self._begun()
        if restored is None:
            return
        reattachment = self.incarnation.reattachment
        try:
            await reattachment.ended(self.config.workers.reattach_timeout_s)
            self.core.post(replace(reattachment.completed(restored), hosts=self.hosts.stood()))
            self.environments.restored()
        finally:
            reattachment.close()
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

    def _storage_changed(self, fault: str) -> None:
        """Reports a fault once the core is restored: before, the journal would record a fresh window and trainer."""
        if self.incarnation.reattachment.is_over:
            self.core.post(on.StorageChanged(fault))

    def _ended(self, session: WorkerSession, request_ids: Sequence[str]) -> None:
        self.durable_ends.note(session, request_ids)
        self.history.ended(session, request_ids)

    def _end_lost(self, session: MemberSession, reason: str) -> None:
        if not self.incarnation.reattachment.is_over:
            return  # the core does not know it yet
        lost = on.WorkerLost if isinstance(session, WorkerSession) else on.PoolLost
        self.core.soon(functools.partial(self.core.post, lost(session.worker_id, session.epoch, reason)))
        self.hosts.worker_lost(session)

    async def ticks(self) -> None:
        """Gives the core its clock ticks, checks the storage, and ends steps that can no longer be filled."""
        awake_s.within_s = READ_WITHIN_S + 2 * self.config.service.tick_s
        while True:
            due_s = time.monotonic() + self.config.service.tick_s
            await asyncio.sleep(self.config.service.tick_s)
            self.telemetry.observe(of.LATE, max(0.0, time.monotonic() - due_s))
            self._ticked_s = time.monotonic()
            workers = self.core.state.workers.values()
            loading = {worker.worker_id for worker in workers if worker.loading >= 0}
            self.sessions.replace_silent(self.config.workers.silence_timeout_s, loading)
            self.hosts.look(self.config.workers.silence_timeout_s)
            self.core.post(on.Tick())
            self.fleet_advice.look()
            self.durable_ends.settle()
            with self.storage.tidying(RUN_FOLDER):
                self.sweep_snapshots()
            await self.look_at_storage()
            self._end_hopeless_step()

    def live(self) -> str:
        """Returns why the service makes no progress, or an empty text."""
        limit_s = max(STILL_S, STILL_TICKS * self.config.service.tick_s)
        still_s = 0.0 if self._ticked_s is None else time.monotonic() - self._ticked_s
        return f"the service has not looked at its clock for {still_s:.0f} s" if still_s > limit_s else ""

    def ready(self) -> str:
        """Returns why the service does not serve clients, or an empty text."""
        if not self.incarnation.reattachment.is_over:
            return "the log was read; workers of before are awaited"
        return "it ends" if self.draining.ends_s is not None else ""

    async def look_at_storage(self) -> None:
        """Checks which storage can be written, and retries failed writes."""
        await self.storage.look_at(RUN_FOLDER, self.store.root)
        if self.versions.kept is not None and PERSISTED in self.storage.faults:
            await self.storage.look_at(PERSISTED, self.versions.kept.folder)
        if self.journal.log is not None:
            self.journal.log.try_again()
        self.storage.look_again()

    def _end_hopeless_step(self) -> None:
        """Ends a step with the prompt source's error if no further group can come."""
        state = self.core.state
        comes = len(self.feed) or len(state.backlog) or state.window.open_groups
        if self.feed.failure and not comes:
            why = f"have failed ({self.feed.failure})"
            self.trainers.fail(Conflict("prompts", self.config.prompts.source, HOPELESS, why=why))

    def sweep_snapshots(self) -> None:
        """Deletes the shared memory of lost workers. Processes that have mapped it keep their mapping."""
        sweep(self._snapshots)

    async def close(self) -> None:
        """Ends the trainer's stream, waits for the run record, and cancels background work."""
        self.trainers.replace_stream(None)
        await self.recorder.finish()
        await self.core.close()
