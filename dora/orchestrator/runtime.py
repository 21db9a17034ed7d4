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
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from dora.config import Config
from dora.errors import InvalidValue
from dora.kvtransfer.snapshot import KvTransport
from dora.orchestrator.book import Book, BookError
from dora.orchestrator.core import Machine
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.eventlog import EventLogWriter
from dora.orchestrator.executor import carry_out
from dora.orchestrator.feed import PromptFeed
from dora.orchestrator.sessions import StepStream, WorkerSession
from dora.orchestrator.telemetry import Telemetry
from dora.record import Recorder
from dora.rewards import GroupFilter
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.types import Prompt, Reward, TokenDelta
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

LOST_KEPT = 256  # workers that are gone, and still shown with the reason
TRAINER_ABSENT_S = 2.0  # a trainer that holds no stream and no lease for so long has gone


class Verifier(Protocol):
    """Scores one response outside the event loop; never raises for what the user's function does."""

    async def score(
        self, prompt_text: str, response_text: str | None, token_ids: tuple[int, ...], verifier_json: str
    ) -> Reward: ...


class WorkerProcesses(Protocol):
    """Whoever started the workers."""

    def kill(self, worker_id: str) -> None: ...
    def let_go(self, worker_id: str) -> None: ...


class Runtime:
    """One service's orchestrator."""

    def __init__(
        self,
        config: Config,
        *,
        feed: Callable[[Callable[[str], None]], PromptFeed],
        verifier: Verifier,
        group_filter: GroupFilter | None = None,
        store: WeightStore,
        transport: KvTransport,
        recorder: Recorder | None,
        processes: WorkerProcesses | None = None,
        event_log: EventLogWriter | None = None,
    ) -> None:
        self.config = config
        self.machine = Machine(config)
        self.book = Book(config.rollout)
        self.telemetry = Telemetry()
        self.feed = feed(self._prompt_refused)
        self.verifier = verifier
        self.group_filter = group_filter
        self.store = store
        self.transport = transport
        self.recorder = recorder
        self.processes = processes
        self.event_log = event_log
        self.sessions: dict[str, WorkerSession] = {}
        self.stream: StepStream | None = None
        self.epochs = 0
        self.trainer_name = ""
        self.trainer_seen_s = -TRAINER_ABSENT_S
        self.started_at = time.time()
        self.lost_reasons: dict[str, str] = {}
        self.drawn: dict[str, Prompt] = {}  # offered to the core, not admitted yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._recorded: asyncio.Task[None] | None = None
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
                carry_out(self, command)
        except Exception as error:
            if handled or not isinstance(error, InvalidValue):
                self._fail(error)
            raise
        finally:
            self._posting = False

    def post_soon(self, event: on.Event) -> None:
        """Posts after what is being handled now."""
        asyncio.get_running_loop().call_soon(self.post, event)

    def trainer_present(self) -> bool:
        """Whether a trainer streams, trains on leased groups, or did so a moment ago."""
        if self.stream is not None or self.machine.state.leased:
            self.trainer_seen_s = time.monotonic()
        return time.monotonic() - self.trainer_seen_s < TRAINER_ABSENT_S

    async def ticks(self) -> None:
        """Time for the core, and an end for workers that have gone silent."""
        while True:
            await asyncio.sleep(self.config.service.tick_s)
            limit_s = self.config.workers.silence_timeout_s
            for session in list(self.sessions.values()):
                silent_s = time.monotonic() - session.heard_s
                if silent_s > limit_s:
                    self.replace(session, f"silent for {silent_s:.0f} s")
            self.post(on.Tick())
            self.sweep_snapshots()

    def sweep_snapshots(self) -> None:
        """Deletes what workers that are gone have left: a snapshot that no handoff knows is nobody's."""
        kept = {handoff.locator for handoff in self.machine.state.handoffs.values()}
        self.transport.sweep({str(session.epoch) for session in self.sessions.values()}, kept)

    # -------------------------------------------------------------------------------------------------------- workers

    def lose(self, session: WorkerSession, reason: str) -> None:
        """The worker's epoch is over, now and not only once its stream has ended: a hung one might never end."""
        if self.sessions.get(session.worker_id) is not session:
            return
        del self.sessions[session.worker_id]
        session.give_up()
        reason = self.lost_reasons.get(session.worker_id, reason)
        self.keep_reason(session.worker_id, reason)
        log.info("worker %s is gone (epoch %d): %s", session.worker_id, session.epoch, reason)
        self.post_soon(on.WorkerLost(session.worker_id, session.epoch, reason))

    def keep_reason(self, worker_id: str, reason: str) -> None:
        """Why a worker has gone, for operators; of the last ones, as some come under a new name each time."""
        self.lost_reasons[worker_id] = reason
        if len(self.lost_reasons) > LOST_KEPT:
            del self.lost_reasons[next(iter(self.lost_reasons))]

    def replace(self, session: WorkerSession, reason: str) -> None:
        """Ends a worker that is silent or cannot be trusted; whoever started it starts it again."""
        if self.sessions.get(session.worker_id) is not session:
            return
        log.error("worker %s is replaced: %s", session.worker_id, reason)
        self.keep_reason(session.worker_id, reason)
        self.lose(session, reason)
        if self.processes is not None:
            self.processes.kill(session.worker_id)

    def worker_report(self, session: WorkerSession, report: pb.WorkerReport) -> None:
        """Takes over the tokens of requests that this worker owns; the rest belongs to an older handoff.

        Raises BookError or InvalidValue for a delta that is wrong; what came before it counts.
        """
        now, at = time.monotonic(), time.time()
        session.heard_s = now
        session.rate.observe(now, report.generated_tokens)
        self.telemetry.tokens_reprefilled += report.reprefilled_tokens - session.reprefilled_tokens
        session.reprefilled_tokens = report.reprefilled_tokens
        taken = on.Progress(
            session.worker_id, session.epoch, report.version, {}, {}, report.waiting, report.kv_used_tokens
        )
        try:
            for message in report.deltas:
                delta = convert.delta_from_wire(message)
                if not self.machine.owns(session.worker_id, session.epoch, delta.request_id):
                    continue
                if delta.version != report.version:
                    raise BookError(f"tokens of version {delta.version} in a report of version {report.version}")
                if delta.version == self.book[delta.request_id].version:  # else C1: the core counts it, and evicts
                    self._append(session.worker_id, delta, at)
                taken.tokens[delta.request_id] = len(self.book[delta.request_id].tokens)
                if delta.finish_reason is not None:
                    taken.finished[delta.request_id] = delta.finish_reason
        finally:  # what is in the book must be in the core
            self.post(taken)

    def _append(self, worker_id: str, delta: TokenDelta, at: float) -> None:
        entry = self.book[delta.request_id]
        before, last_at = len(entry.tokens), entry.last_token_at
        arrival = entry.append(worker_id, delta, at)
        if arrival == "migrated" and before:
            self.telemetry.blackouts_ms.append((at - last_at) * 1000)
        self.telemetry.tokens(len(entry.tokens) - before, at)

    def worker_outcome(self, session: WorkerSession, outcome: pb.WorkerOutcome) -> None:
        session.heard_s = time.monotonic()
        if not outcome.ok:  # an unknown request is one that finished a moment before: expected
            level = logging.DEBUG if outcome.error_kind == "unknown_request" else logging.WARNING
            log.log(level, "%s: command %d: %s", session.worker_id, outcome.command_id, outcome.error)
        pending = self.machine.state.pending.get(outcome.command_id)
        if outcome.ok and pending is not None and isinstance(pending.command, do.LoadVersion):
            self._keep_canary(pending.command.version, outcome.canary)
        self.post(
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

    def _keep_canary(self, version: int, found: pb.Canary) -> None:
        """A version that came without a canary is held to what its first worker made of it."""
        canary = convert.canary_from_wire(found)
        if canary is not None and self.store.canary(version) is None:
            self.store.keep_canary(version, canary)

    # ----------------------------------------------------------------------------------------------------- background

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs one command's waiting part. A failure there is a bug and ends the service."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def record(self, write: Callable[[], Any]) -> None:
        """Writes of the record, one after the other, in a thread."""
        before = self._recorded

        async def after() -> None:
            if before is not None:
                await before
            await asyncio.to_thread(write)

        self._recorded = asyncio.create_task(after())
        self._tasks.add(self._recorded)
        self._recorded.add_done_callback(self._task_done)

    async def recorded(self) -> None:
        """Waits until all that was delivered is on disk."""
        if self._recorded is not None:
            await self._recorded

    async def close(self) -> None:
        if self.stream is not None:
            self.stream.close(superseded=True)
        await self.recorded()
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

    def _prompt_refused(self, _reason: str) -> None:
        self.telemetry.prompts_refused += 1


__all__ = ["BookError", "Runtime"]
