"""A worker's reports: tokens in columns, the engine's load, outcomes of commands.

Tokens sampled before an outcome are reported before it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from dora.data.types import TokenDelta
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.session.commands import Orders, Responder
from dora.worker.engine import RolloutEngine
from dora.worker.gathering import Gathering
from dora.worker.times import EngineTimes

IDLE_S: Final = 0.5  # an idle worker looks up, and is heard of, this often
ENDS_APART_S: Final = 0.05  # between two reports of responses that have ended: those that end meanwhile wait
SESSION_PERIOD_MOST_S: Final = 1.0  # on a worker with sessions, whose callers may read a turn's text as it comes
ENDS_SHARE: Final = 0.125  # of the period, where that is longer and no environment waits for the end of a turn


class Reporting(Responder):
    """Reports to one service. A worker that continues under another service starts another one."""

    def __init__(self, engine: RolloutEngine, orders: Orders, period_s: float, clock: Callable[[], float]) -> None:
        """``period_s`` is the time between two reports, which the service may change."""
        super().__init__(orders)
        self.period_s = period_s
        self._engine = engine
        self._clock = clock
        self._base = engine.load()  # counters are reported relative to this
        self._sampled = Gathering()
        self._begun: list[int] = []  # ids of commands
        self._ends_reported_s = -ENDS_APART_S
        self._reported_s = clock()
        self._has_sessions = False
        self._arrived: set[str] = set()  # whose first token is reported at once, and that have none yet
        self._times = EngineTimes(clock)
        self._has_work = True

    @property
    def has_tokens(self) -> bool:
        return bool(self._sampled)

    def begin(
        self, request_id: str, row: int, *, arrives: bool = False, computes: int = 0, keeps: bool = False
    ) -> None:
        """Enters a request that the engine has taken. The first token of one that ``arrives`` with KV, or whose reader
        may wait for it, is reported at once. ``computes`` counts the tokens whose KV it needs first, 0 if it came with
        its KV. ``keeps`` marks one of a session.
        """
        self._has_sessions |= keeps
        self._sampled.name(request_id, row)
        self._times.began(request_id, computes)
        if arrives:
            self._arrived.add(request_id)

    def forget(self, request_id: str) -> None:
        """Reports a request's tokens before the engine removes it."""
        if request_id in self._sampled:
            self.report()
        self._arrived.discard(request_id)
        self._sampled.forget(request_id)
        self._times.forget(request_id)

    def add(self, deltas: Sequence[TokenDelta]) -> None:
        """Adds a step's tokens. Tokens of another version are reported first."""
        if not self._sampled.takes(deltas):
            self.report()
        self._times.sampled(deltas)
        self._sampled.add(deltas)

    def report_due(self, has_work: bool) -> None:
        """Reports if due. ``has_work`` says that more tokens will come soon."""
        self._has_work = has_work
        if self._is_due(has_work):
            self.report()
        elif self._sampled.has_ends and self._clock() - self._ends_reported_s >= self._ends_apart_s:
            self.report(ends_only=True)  # running requests can wait for their period

    @property
    def _ends_apart_s(self) -> float:
        return ENDS_APART_S if self._has_sessions else max(ENDS_APART_S, ENDS_SHARE * self.period_s)

    def _is_due(self, has_work: bool) -> bool:
        now_s, sampled = self._clock(), self._sampled
        if not sampled:
            return now_s - self._reported_s >= IDLE_S
        if not has_work or any(request_id in sampled for request_id in self._arrived):
            return True
        most_s = SESSION_PERIOD_MOST_S if self._has_sessions else self.period_s
        return now_s - self._reported_s >= min(self.period_s, most_s)

    def report(self, ends_only: bool = False) -> None:
        """Reports the tokens since the last report, or only those of requests that have ended."""
        version = self._sampled.version if self._sampled else self._engine.version
        self._arrived = {request_id for request_id in self._arrived if request_id not in self._sampled}
        if self._sampled.has_ends:
            self._ends_reported_s = self._clock()
        batches: list[pb.TokenColumns | None] = [*self._sampled.take(ends_only)]
        for tokens in batches or [None]:
            self._send(tokens, -1 if version is None else version)
        if not ends_only:
            self._reported_s = self._clock()

    def _send(self, tokens: pb.TokenColumns | None, version: int) -> None:
        load = self._engine.load()
        report = pb.WorkerReport(
            tokens=tokens,
            running=load.running,
            waiting=load.waiting,
            kv_used_tokens=load.kv_used_tokens,
            reprefilled_tokens=load.reprefilled_tokens - self._base.reprefilled_tokens,
            generated_tokens=load.generated_tokens - self._base.generated_tokens,
            preemptions=load.preemptions - self._base.preemptions,
            state_bytes=load.state_bytes,
            states_dropped=load.states_dropped - self._base.states_dropped,
            drafted_tokens=load.drafted_tokens - self._base.drafted_tokens,
            accepted_tokens=load.accepted_tokens - self._base.accepted_tokens,
            version=version,
            at=time.time(),
            kv_tier=None if load.tier is None else convert.tier_to_wire(load.tier),
            times=self._times.message(has_work=self._has_work),
            begun=self._begun,
        )
        self._begun = []
        self._orders.send(pb.WorkerMessage(report=report))

    def has_begun(self, outcome: pb.WorkerOutcome) -> None:
        """Answers a command that begins a request or a turn. If it succeeded, the next report tells so: that is the
        first one with tokens of the request.
        """
        if outcome.ok:
            self._begun.append(outcome.command_id)
        else:
            self.answer_ahead(outcome)

    def answer(self, outcome: pb.WorkerOutcome, reports: bool = False) -> None:
        """If ``reports``, the load is reported even if no tokens wait."""
        if self._sampled or reports:
            self.report()
        self.answer_ahead(outcome)

    def report_tokens(self) -> None:
        if self._sampled:
            self.report()
