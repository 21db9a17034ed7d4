"""What workers say: their tokens go into the book, and what follows from them goes to the core as one event."""

import logging
import time
from collections.abc import Callable

from dora.orchestrator.book import Book, BookError
from dora.orchestrator.core import Machine
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.streams import WorkerSession
from dora.orchestrator.telemetry import Telemetry
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.types import TokenDelta
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")


class WorkerReports:
    """Takes reports and outcomes of commands. ``post`` hands an event to the core, which ``machine`` is."""

    def __init__(
        self,
        *,
        machine: Machine,
        book: Book,
        store: WeightStore,
        telemetry: Telemetry,
        post: Callable[[on.Event], None],
    ) -> None:
        self._machine = machine
        self._book = book
        self._store = store
        self._telemetry = telemetry
        self._post = post

    def report(self, session: WorkerSession, report: pb.WorkerReport) -> None:
        """Takes over the tokens of requests that this worker owns; the rest belongs to an older handoff.

        Raises BookError or InvalidValue for a delta that is wrong; what came before it counts.
        """
        now, at = time.monotonic(), time.time()
        session.heard_s = now
        session.rate.observe(now, report.generated_tokens)
        self._telemetry.tokens_reprefilled += report.reprefilled_tokens - session.reprefilled_tokens
        session.reprefilled_tokens = report.reprefilled_tokens
        taken = on.Progress(
            session.worker_id, session.epoch, report.version, {}, {}, report.waiting, report.kv_used_tokens
        )
        try:
            for message in report.deltas:
                delta = convert.delta_from_wire(message)
                if not self._machine.owns(session.worker_id, session.epoch, delta.request_id):
                    continue
                if delta.version != report.version:
                    raise BookError(f"tokens of version {delta.version} in a report of version {report.version}")
                if delta.version == self._book[delta.request_id].version:  # else C1: the core counts it, and evicts
                    self._append(session.worker_id, delta, at)
                taken.tokens[delta.request_id] = len(self._book[delta.request_id].tokens)
                if delta.finish_reason is not None:
                    taken.finished[delta.request_id] = delta.finish_reason
        finally:  # what is in the book must be in the core
            self._post(taken)

    def outcome(self, session: WorkerSession, outcome: pb.WorkerOutcome) -> None:
        """Tells the core how a command to this worker went."""
        session.heard_s = time.monotonic()
        if not outcome.ok:  # an unknown request is one that finished a moment before: expected
            level = logging.DEBUG if outcome.error_kind == "unknown_request" else logging.WARNING
            log.log(level, "%s: command %d: %s", session.worker_id, outcome.command_id, outcome.error)
        pending = self._machine.state.pending.get(outcome.command_id)
        if outcome.ok and pending is not None and isinstance(pending.command, do.LoadVersion):
            self._keep_canary(pending.command.version, outcome.canary)
        self._post(
            on.CommandDone(
                session.worker_id,
                session.epoch,
                outcome.command_id,
                outcome.ok,
                outcome.error,
                outcome.error_kind,
                outcome.locator,
                outcome.tokens,
            )
        )

    def _append(self, worker_id: str, delta: TokenDelta, at: float) -> None:
        entry = self._book[delta.request_id]
        before, last_at = len(entry.tokens), entry.last_token_at
        arrival = entry.append(worker_id, delta, at)
        if arrival == "migrated" and before:
            self._telemetry.blackouts_ms.append((at - last_at) * 1000)
        self._telemetry.tokens(len(entry.tokens) - before, at)

    def _keep_canary(self, version: int, found: pb.Canary) -> None:
        """A version that came without a canary is held to what its first worker made of it."""
        canary = convert.canary_from_wire(found)
        if canary is not None and self._store.canary(version) is None:
            self._store.keep_canary(version, canary)
