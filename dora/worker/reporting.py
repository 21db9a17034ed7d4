"""What the service is told by a worker, and when: tokens in columns, the engine's load, outcomes of commands.

Whatever was sampled before an outcome is told before it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from dora.data.types import TokenDelta
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.session.commands import Orders, Voice
from dora.worker.engine import RolloutEngine
from dora.worker.gathering import Gathering

IDLE_S: Final = 0.5  # an idle worker looks up, and is heard of, this often
END_WAITS_S: Final = 0.05  # for others, to be reported with them


class Reporting(Voice):
    """Of one service: a worker that has outlived its service begins with another."""

    def __init__(self, engine: RolloutEngine, orders: Orders, period_s: float, clock: Callable[[], float]) -> None:
        """``period_s``: between two reports, and the service may change it."""
        super().__init__(orders)
        self.period_s = period_s
        self._engine = engine
        self._clock = clock
        self._base = engine.load()  # counters are told from here on
        self._sampled = Gathering()
        self._ended_s = 0.0  # when the first response ended of those that were not reported yet
        self._reported_s = clock()
        self._arrived: set[str] = set()  # taken in with their KV, and no token yet

    @property
    def has_tokens(self) -> bool:
        """Whether tokens wait to be told."""
        return bool(self._sampled)

    def begin(self, request_id: str, row: int, *, arrives: bool = False) -> None:
        """The engine has taken the request. The first token of one that ``arrives`` with its KV is told at once."""
        self._sampled.name(request_id, row)
        if arrives:
            self._arrived.add(request_id)

    def forget(self, request_id: str) -> None:
        """The engine is about to forget the request; what was sampled of it is told first."""
        if request_id in self._sampled:
            self.report()
        self._arrived.discard(request_id)
        self._sampled.forget(request_id)

    def add(self, deltas: Sequence[TokenDelta]) -> None:
        """What a step has sampled. Tokens of another version are told first."""
        if not self._sampled.takes(deltas):
            self.report()
        had_ends = self._sampled.has_ends
        self._sampled.add(deltas)
        if self._sampled.has_ends and not had_ends:
            self._ended_s = self._clock()

    def report_due(self, has_work: bool) -> None:
        """Reports if it is time to. ``has_work``: more will be sampled soon."""
        if self._is_due(has_work):
            self.report()
        elif self._sampled.has_ends and self._clock() - self._ended_s >= END_WAITS_S:
            self.report(ends_only=True)  # what still runs can wait for its period

    def _is_due(self, has_work: bool) -> bool:
        now_s, sampled = self._clock(), self._sampled
        if not sampled:
            return now_s - self._reported_s >= IDLE_S
        if not has_work or any(request_id in sampled for request_id in self._arrived):
            return True
        return now_s - self._reported_s >= self.period_s

    def report(self, ends_only: bool = False) -> None:
        """What the engine has produced since the last report; or of that, what is of requests that have ended."""
        version = self._sampled.version if self._sampled else self._engine.version
        self._arrived = {request_id for request_id in self._arrived if request_id not in self._sampled}
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
            version=version,
            at=time.time(),
            kv_tier=None if load.tier is None else convert.tier_to_wire(load.tier),
        )
        self._orders.send(pb.WorkerMessage(report=report))

    def answer(self, outcome: pb.WorkerOutcome, reports: bool = False) -> None:
        """``reports``: also where no token waits to be told, so that the load is told."""
        if self._sampled or reports:
            self.report()
        self.answer_ahead(outcome)

    def report_tokens(self) -> None:
        if self._sampled:
            self.report()
