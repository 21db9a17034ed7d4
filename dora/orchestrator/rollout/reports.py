"""Accepts workers' reports: tokens go to the response buffer, and the core gets one event."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import LIVE
from dora.core.state import Pending
from dora.data.types import Canary, EngineLoad
from dora.errors import InvalidValue, NotFound
from dora.kvtransfer.arrivals import check_key
from dora.orchestrator.recording.storage import RUN_FOLDER, Storage
from dora.orchestrator.rollout import distributions as of
from dora.orchestrator.rollout import worker_checks as checks
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.environments import Environments
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.orders import HostVersions
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import MemberSession, PoolSession, WorkerSession
from dora.orchestrator.rollout.telemetry import Telemetry, age_of
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.system.awake import awake_s
from dora.system.log_lines import about
from dora.weights.canary import check_canary
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

ERROR_CHARACTERS_MAX: Final = 2000  # of a worker's error message


@dataclass(eq=False, repr=False)
class WorkerReports:
    """Accepts reports and outcomes of commands. ``core`` has the ``machine``."""

    _core: Core
    _machine: Machine
    _buffer: ResponseBuffer
    _journal: Journal
    _telemetry: Telemetry
    _storage: Storage
    _store: WeightStore
    _hosts: HostVersions
    _environments: Environments
    # receives the requests that a worker has reported to the end, after the response buffer and the journal have them
    _ended: Callable[[WorkerSession, Sequence[str]], None]

    def report(self, session: WorkerSession, report: pb.WorkerReport) -> None:
        """Accepts the tokens of requests that this worker owns; tokens of others belong to an older handoff.

        Raises InvalidValue (ReportError) if anything in the report is wrong. Nothing of it is accepted then. If a token
        is of another version than its request (C1), the core counts the violation and evicts the worker.
        """
        self._begun(session, report.begun)
        now, at = awake_s(), time.time()
        state, capability = self._machine.state, session.capability
        columns = checks.checked_tokens(
            report, capability.kv_tokens, self._vocab_size(session), state.requests.capacity
        )
        columns = columns.only(self._machine.owned(session.worker_id, session.epoch, columns.rows))
        accepted = self._buffer.accept(session.worker_id, report.version, columns, at)
        self._note_pace(session, report, len(columns), now)
        self._note_load(session, report, now, at)
        self._telemetry.accepted(accepted, age_of(report.version, state.window))
        self._journal.report(accepted)
        if accepted.ended:
            self._ended(session, accepted.ended)
        self._core.post(accepted.event(session.epoch, report.waiting, report.kv_used_tokens))
        self._environments.reported(accepted)

    def refused(self) -> None:
        """Counts a wrong message."""
        self._telemetry.messages_refused += 1

    def _note_pace(self, session: WorkerSession, report: pb.WorkerReport, spans: int, now: float) -> None:
        """Enters the mean time between two tokens of a request since the last report, which has so many spans."""
        before, tokens = session.load, report.generated_tokens - session.load.generated_tokens
        if tokens > 0 and before.running:
            self._telemetry.observe(of.TOKEN, (now - session.reported_s) * max(report.running, spans) / tokens)

    def _note_load(self, session: WorkerSession, report: pb.WorkerReport, now: float, at: float) -> None:
        """Enters a report's figures that concern no single request. ``now`` is on the monotonic clock."""
        session.heard_s = session.reported_s = now
        session.clock_ahead_s = report.at - at
        session.rate.observe(now, report.generated_tokens)
        self._telemetry.tokens_reprefilled += max(0, report.reprefilled_tokens - session.load.reprefilled_tokens)
        self._telemetry.preemptions += max(0, report.preemptions - session.load.preemptions)
        self._telemetry.tokens_drafted += max(0, report.drafted_tokens - session.load.drafted_tokens)
        self._telemetry.tokens_accepted += max(0, report.accepted_tokens - session.load.accepted_tokens)
        session.load = EngineLoad(
            report.running, report.waiting, report.kv_used_tokens,
            report.reprefilled_tokens, report.generated_tokens, preemptions=report.preemptions,
            state_bytes=report.state_bytes, states_dropped=report.states_dropped,
            drafted_tokens=report.drafted_tokens, accepted_tokens=report.accepted_tokens,
        )  # fmt: skip
        if report.HasField("times"):
            session.times.CopyFrom(report.times)
        if report.HasField("kv_tier"):
            tier = convert.tier_from_wire(report.kv_tier)
            self._telemetry.tier(session.tier, tier)
            session.tier = tier

    def pool(self, session: PoolSession, report: pb.PoolReport) -> None:
        """Notes a pool's contents, and reports dropped snapshots to the core. Raises InvalidValue."""
        checks.checked_pool_report(report)
        session.heard_s = awake_s()
        self._telemetry.pool_spilled += max(0, report.spilled - session.report.spilled)
        session.report.CopyFrom(report)
        if report.dropped:
            self._telemetry.pool_dropped += len(report.dropped)
            pool = about(worker=session.worker_id)
            log.warning(
                "%s: dropped %d snapshots: %s", session.worker_id, len(report.dropped), report.reason, extra=pool
            )
            dropped = on.PoolDropped(session.worker_id, session.epoch, tuple(report.dropped), report.reason)
            self._core.post(dropped)

    def outcome(self, session: WorkerSession | PoolSession, outcome: pb.WorkerOutcome) -> None:
        """Reports a command's outcome to the core. Raises InvalidValue for an impossible outcome."""
        pending = self._machine.state.pending.get(outcome.command_id)
        if pending is None or (pending.command.worker_id, pending.command.epoch) != (session.worker_id, session.epoch):
            command = None  # of an ended epoch
        else:
            command = pending.command
        canary = self._checked(session, outcome, command)
        session.heard_s = awake_s()
        error = outcome.error[:ERROR_CHARACTERS_MAX]
        if not outcome.ok:  # an unknown request has finished a moment before: expected
            level = logging.DEBUG if outcome.error_kind == "unknown_request" else logging.WARNING
            log.log(level, "%s: %s: %s", session.worker_id, _named(command), error, extra=_about(session, command))
        if isinstance(command, do.CopyOut):
            self._note_copy(session, outcome)
        if pending is not None and command is not None:
            self._note_time(session, pending, outcome)
        if outcome.ok and isinstance(command, do.LoadVersion) and canary is not None:
            self._keep_canary(session.worker_id, command.version, canary)
        done = on.CommandDone(
            session.worker_id,
            session.epoch,
            outcome.command_id,
            outcome.ok,
            error,
            outcome.error_kind,
            outcome.locator,
            outcome.tokens,
            outcome.canary_difference,
        )
        if isinstance(command, do.LoadVersion) and self._may_be_lacking(command.version, outcome):
            self._core.spawn(self._load_failed(command, done))
        else:
            self._done(command, done)

    def _begun(self, session: WorkerSession, command_ids: Sequence[int]) -> None:
        """Reports requests and turns that a worker has begun. Raises InvalidValue for a command of another kind."""
        worker_id, epoch, pending = session.worker_id, session.epoch, self._machine.state.pending
        for command_id in command_ids:
            if (known := pending.get(command_id)) is not None:
                if not isinstance(known.command, do.StartRequest | do.ExtendRequest):
                    raise InvalidValue("begun", command_id, "the ids of commands that begin a request or a turn")
                self._core.post(on.CommandDone(worker_id, epoch, command_id))

    def _done(self, command: do.WorkerCommand | None, done: on.CommandDone) -> None:
        self._core.post(done)
        if isinstance(command, do.LoadVersion) and done.error_kind == "missing":
            self._hosts.missing(done.worker_id, command.version)

    def _may_be_lacking(self, version: int, outcome: pb.WorkerOutcome) -> bool:
        """Returns whether a load may have failed because the host's files differ from the publication. Cases that other
        workers decide are excluded (core/rules/rejection.py).
        """
        state = self._machine.state
        if outcome.ok or not version or self._machine.has_to_come(version):
            return False
        return outcome.error_kind == "refused" or (outcome.error_kind == "weights" and version in state.proven)

    async def _load_failed(self, command: do.LoadVersion, done: on.CommandDone) -> None:
        """Reports a failed load once its cause is known; until then the core counts the worker as loading."""
        if await self._hosts.lacks(done.worker_id, command.version):
            done = replace(done, error_kind="missing")
        self._done(command, done)

    def copy_began(self, session: WorkerSession, message: pb.CopyBegan) -> None:
        """Reports that a request is being copied while it decodes."""
        session.heard_s = awake_s()
        self._core.post(on.CopyBegan(session.worker_id, session.epoch, message.command_id))

    def _checked(
        self, session: WorkerSession | PoolSession, outcome: pb.WorkerOutcome, command: do.WorkerCommand | None
    ) -> Canary | None:
        """Returns the canary in an outcome. Raises InvalidValue if this worker's engine cannot have produced it."""
        checks.checked_outcome(outcome)
        if outcome.locator or (outcome.ok and isinstance(command, do.CopyOut)):
            check_key(outcome.locator, session.epoch)
        canary = convert.canary_from_wire(outcome.canary) if outcome.HasField("canary") else None
        if canary is None:
            return None
        if isinstance(session, PoolSession):
            raise InvalidValue("canary", f"{len(canary.token_ids)} tokens", "none, of a pool")
        check_canary(canary, self._vocab_size(session))
        return canary

    def _vocab_size(self, session: WorkerSession) -> int:
        return self._store.reference.vocab_size or session.capability.vocab_size

    def _note_copy(self, session: MemberSession, outcome: pb.WorkerOutcome) -> None:
        for reason in outcome.kv_fallbacks:
            log.warning(
                "%s: a KV transport failed: %s", session.worker_id, reason, extra=about(worker=session.worker_id)
            )
        self._telemetry.kv_fallbacks += len(outcome.kv_fallbacks)
        if outcome.ok:
            self._telemetry.kv_bytes += outcome.snapshot_bytes

    def _note_time(self, session: WorkerSession | PoolSession, pending: Pending, outcome: pb.WorkerOutcome) -> None:
        command, handoff = pending.command, pending.handoff
        took_s = awake_s() - pending.sent_s
        if isinstance(command, do.LoadVersion) and outcome.ok:
            self._telemetry.observe(of.LOAD, took_s)
            if isinstance(session, WorkerSession):
                session.load_s = took_s
        if handoff is None or handoff.phase not in LIVE:
            return
        if isinstance(command, do.CopyOut) and outcome.ok:
            kind = handoff.kind.name.lower()
            self._telemetry.observe(of.COPY, took_s, kind)
            self._telemetry.observe(of.COPY_BYTES, outcome.snapshot_bytes, kind)
            if isinstance(session, WorkerSession):
                session.copy_s, session.copy_bytes = took_s, outcome.snapshot_bytes
        elif isinstance(command, do.CopyIn) and outcome.ok:
            self._telemetry.moved(handoff, "done")
        elif isinstance(command, do.ReserveSlot) and not outcome.ok:
            self._telemetry.moved(handoff, "refused")
        elif isinstance(command, do.CopyOut | do.CopyIn) and not outcome.ok:
            self._telemetry.moved(handoff, "ended" if outcome.error_kind == "unknown_request" else "failed")

    def _keep_canary(self, worker_id: str, version: int, canary: Canary) -> None:
        """Stores the first worker's logprobs as the canary of a version that was published without one."""
        if not self._machine.counts_load(worker_id, version):
            return
        with self._storage.tidying(RUN_FOLDER), suppress(NotFound):  # the version may have been retired since
            if self._store.canary(version) is None:
                self._store.keep_canary(version, canary)


def _named(command: do.WorkerCommand | None) -> str:
    match command:
        case None:
            return "a command of an ended epoch"
        case do.LoadVersion(version=version):
            return f"LoadVersion {version}"
        case _:
            return f"{type(command).__name__} {getattr(command, 'request_id', '')}"


def _about(session: MemberSession, command: do.WorkerCommand | None) -> dict[str, Any]:
    named = {"request": "request_id", "version": "version"}
    return about(
        worker=session.worker_id,
        **{name: getattr(command, field) for name, field in named.items() if hasattr(command, field)},
    )
