"""When a worker reports: ends and first tokens that somebody waits for at once, the rest once a period."""

from types import SimpleNamespace
from typing import Any

import pytest

from dora.data.types import EngineLoad, FinishReason, TokenDelta
from dora.rpc import dora_pb2 as pb
from dora.worker.reporting import ENDS_APART_S, ENDS_SHARE, Reporting

PERIOD_S = 10.0


class Bench:
    """A reporting worker, whose steps take a millisecond."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sent: list[pb.WorkerMessage] = []
        engine: Any = SimpleNamespace(version=0, load=lambda: EngineLoad(0, 0, 0, 0, 0))
        orders: Any = SimpleNamespace(send=self.sent.append)
        self.reporting = Reporting(engine, orders, PERIOD_S, lambda: self.now_s)
        self.tokens: dict[str, int] = {}

    def begin(self, *names: str, arrives: bool = False, keeps: bool = False) -> None:
        for name in names:
            self.reporting.begin(name, len(self.tokens), arrives=arrives, keeps=keeps)
            self.tokens[name] = 0

    def step(self, *names: str, end: FinishReason | None = None) -> int:
        """Samples a token of each. Returns how many reports follow."""
        before = len(self.sent)
        self.now_s += 0.001
        deltas = [TokenDelta(name, 0, self.tokens[name], (3,), (-1.0,), end) for name in names]
        for name in names:
            self.tokens[name] += 1
        self.reporting.add(deltas)
        self.reporting.report_due(True)
        return len(self.sent) - before


@pytest.mark.parametrize(("keeps", "apart_s"), [(False, ENDS_SHARE * PERIOD_S), (True, ENDS_APART_S)])
def test_an_end_is_reported_at_once_and_those_soon_after_it_together(keeps: bool, apart_s: float) -> None:
    """An environment waits for the end of a session's turn."""
    bench = Bench()
    bench.begin("a", "b", "c", "d", keeps=keeps)
    assert bench.step("a", "b", "c", "d") == 0, "they run, and their period is long"
    assert bench.step("a", end="stop") == 1
    assert bench.step("b", end="stop") == bench.step("c", end="stop") == 0
    bench.now_s += apart_s
    assert bench.step("d") == 1
    assert [len(message.report.tokens.rows) // 4 for message in bench.sent] == [1, 2], "that which runs waits"


def test_the_first_token_that_somebody_waits_for_is_reported_at_once() -> None:
    bench = Bench()
    bench.begin("a")
    bench.begin("b", arrives=True)
    assert bench.step("a") == 0
    assert bench.step("a", "b") == 1
    assert bench.step("a", "b") == 0


def test_the_next_report_tells_what_has_begun_and_a_failure_is_told_at_once() -> None:
    bench = Bench()
    bench.begin("a")
    bench.reporting.has_begun(pb.WorkerOutcome(command_id=7, ok=True))
    bench.reporting.has_begun(pb.WorkerOutcome(command_id=8, ok=False))
    assert [message.outcome.command_id for message in bench.sent] == [8]
    assert bench.step("a", end="stop") == 1
    bench.reporting.report()
    assert [list(message.report.begun) for message in bench.sent[1:]] == [[7], []], "told once"
