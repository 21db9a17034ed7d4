"""What workers say: their tokens go into the book, and what follows from them goes to the core as one event."""

import logging
import time
from collections.abc import Callable
from typing import Final

from dora.errors import InvalidValue
from dora.kvtransfer.arrivals import check_key
from dora.orchestrator import worker_checks as checks
from dora.orchestrator.book import Book, BookError
from dora.orchestrator.core import Machine
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.storage import RUN_FOLDER, Storage
from dora.orchestrator.streams import PoolSession, Session, WorkerSession
from dora.orchestrator.telemetry import Telemetry
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.types import Canary, TokenDelta
from dora.weights.canary import check_canary
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

ERROR_CHARACTERS_MOST: Final = 2000  # of what a worker says about a command


class WorkerReports:
    """Takes reports and outcomes of commands. ``post`` hands an event to the core, which ``machine`` is."""

    def __init__(
        self,
        *,
        machine: Machine,
        book: Book,
        store: WeightStore,
        telemetry: Telemetry,
        storage: Storage,
        post: Callable[[on.Event], None],
    ) -> None:
        self._machine = machine
        self._book = book
        self._store = store
        self._telemetry = telemetry
        self._storage = storage
        self._post = post

    def report(self, session: WorkerSession, report: pb.WorkerReport) -> None:
        """Takes over the tokens of requests that this worker owns; the rest belongs to an older handoff.

        Raises InvalidValue (BookError) for a report that is wrong anywhere: nothing of it is taken over.
        """
        now, at = time.monotonic(), time.time()
        deltas = checks.checked_deltas(report, session.capability.kv_tokens, self._vocab_size(session))
        owned = set(self._machine.owned(session.worker_id, session.epoch, {delta.request_id for delta in deltas}))
        deltas = [delta for delta in deltas if delta.request_id in owned]
        for delta in deltas:
            if delta.version != report.version:
                raise BookError(f"{delta.request_id}: version", delta.version, f"{report.version}, the report's own")
        # C1: the core counts such a token, and evicts the worker; nothing else of the report is taken over either
        mixed = [delta for delta in deltas if delta.version != self._book[delta.request_id].version]
        if not mixed:
            checks.check_against_book(self._book, deltas)
        session.heard_s = now
        session.rate.observe(now, report.generated_tokens)
        self._telemetry.tokens_reprefilled += max(0, report.reprefilled_tokens - session.reprefilled_tokens)
        session.reprefilled_tokens = report.reprefilled_tokens
        tier = convert.tier_from_wire(report.kv_tier)
        self._telemetry.tier(session.tier, tier)
        session.tier = tier
        for delta in () if mixed else deltas:
            self._append(session.worker_id, delta, at)
        taken = mixed or deltas
        self._post(
            on.Progress(
                session.worker_id,
                session.epoch,
                report.version,
                {delta.request_id: len(self._book[delta.request_id].tokens) for delta in taken},
                {} if mixed else {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason},
                report.waiting,
                report.kv_used_tokens,
            )
        )

    def pool(self, session: PoolSession, report: pb.PoolReport) -> None:
        """Takes note of what a pool holds, and tells the core what it has dropped. Raises InvalidValue."""
        checks.checked_pool_report(report)
        session.heard_s = time.monotonic()
        self._telemetry.pool_spilled += max(0, report.spilled - session.report.spilled)
        session.report.CopyFrom(report)
        if report.dropped:
            self._telemetry.pool_dropped += len(report.dropped)
            log.warning("%s: dropped %d snapshots: %s", session.worker_id, len(report.dropped), report.reason)
            dropped = on.PoolDropped(session.worker_id, session.epoch, tuple(report.dropped), report.reason)
            self._post(dropped)

    def outcome(self, session: WorkerSession | PoolSession, outcome: pb.WorkerOutcome) -> None:
        """Tells the core how a command to this worker or pool went. Raises InvalidValue where that cannot be."""
        pending = self._machine.state.pending.get(outcome.command_id)
        if pending is None or (pending.command.worker_id, pending.command.epoch) != (session.worker_id, session.epoch):
            command = None  # of an epoch that is over
        else:
            command = pending.command
        canary = self._checked(session, outcome, command)
        session.heard_s = time.monotonic()
        error = outcome.error[:ERROR_CHARACTERS_MOST]
        if not outcome.ok:  # an unknown request is one that finished a moment before: expected
            level = logging.DEBUG if outcome.error_kind == "unknown_request" else logging.WARNING
            log.log(level, "%s: %s: %s", session.worker_id, _named(command), error)
        if isinstance(command, do.CopyOut):
            self._note_copy(session, outcome)
        if outcome.ok and isinstance(command, do.LoadVersion) and canary is not None:
            self._keep_canary(session.worker_id, command.version, canary)
        self._post(
            on.CommandDone(
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
        )

    def copy_began(self, session: WorkerSession, message: pb.CopyBegan) -> None:
        """Tells the core that a request is being copied while it decodes."""
        session.heard_s = time.monotonic()
        self._post(on.CopyBegan(session.worker_id, session.epoch, message.command_id))

    def _checked(
        self, session: WorkerSession | PoolSession, outcome: pb.WorkerOutcome, command: do.WorkerCommand | None
    ) -> Canary | None:
        """The canary in an outcome. Raises InvalidValue for what the engine of this worker cannot have answered."""
        checks.checked_outcome(outcome)
        if outcome.locator or (outcome.ok and isinstance(command, do.CopyOut)):
            check_key(outcome.locator, session.epoch)
        canary = convert.canary_from_wire(outcome.canary)
        if canary is None:
            return None
        if isinstance(session, PoolSession):
            raise InvalidValue("canary", f"{len(canary.token_ids)} tokens", "none, of a pool")
        check_canary(canary, self._vocab_size(session))
        return canary

    def _vocab_size(self, session: WorkerSession) -> int:
        """The model's; the engine's, where the model's config does not say."""
        return self._store.reference.vocab_size or session.capability.vocab_size

    def _append(self, worker_id: str, delta: TokenDelta, at: float) -> None:
        entry = self._book[delta.request_id]
        before, last_at = len(entry.tokens), entry.last_token_at
        arrival = entry.append(worker_id, delta, at)
        if before:
            self._telemetry.arrived(arrival, (at - last_at) * 1000)
        self._telemetry.tokens(len(entry.tokens) - before, at)

    def _note_copy(self, session: Session, outcome: pb.WorkerOutcome) -> None:
        """One line for what did not go as it should have; numbers for the rest."""
        for reason in outcome.kv_fallbacks:
            log.warning("%s: a KV transport failed: %s", session.worker_id, reason)
        self._telemetry.kv_fallbacks += len(outcome.kv_fallbacks)
        if outcome.ok:
            self._telemetry.kv_bytes += outcome.snapshot_bytes

    def _keep_canary(self, worker_id: str, version: int, canary: Canary) -> None:
        """A version that came without a canary is held to what its first worker made of it."""
        if self._machine.counts_load(worker_id, version) and self._store.canary(version) is None:
            with self._storage.tidying(RUN_FOLDER):
                self._store.keep_canary(version, canary)


def _named(command: do.WorkerCommand | None) -> str:
    """What a worker was to do, and with what."""
    match command:
        case None:
            return "a command of an epoch that is over"
        case do.LoadVersion(version=version):
            return f"LoadVersion {version}"
        case _:
            return f"{type(command).__name__} {getattr(command, 'request_id', '')}"
