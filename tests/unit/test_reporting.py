"""When a worker reports: ends and first tokens that somebody waits for at once, the rest once a period."""

from types import SimpleNamespace
from typing import Any

from dora.data.types import EngineLoad, FinishReason, TokenDelta
from dora.rpc import dora_pb2 as pb
from dora.worker.reporting import ENDS_APART_S, Reporting

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

    def begin(self, *names: str, arrives: bool = False) -> None:
        for name in names:
            self.reporting.begin(name, len(self.tokens), arrives=arrives)
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


def test_an_end_is_reported_at_once_and_those_soon_after_it_together() -> None:
    bench = Bench()
    bench.begin("a", "b", "c", "d")
    assert bench.step("a", "b", "c", "d") == 0, "they run, and their period is long"
    assert bench.step("a", end="stop") == 1
    assert bench.step("b", end="stop") == bench.step("c", end="stop") == 0
    bench.now_s += ENDS_APART_S
    assert bench.step("d") == 1
    assert [len(message.report.tokens.rows) // 4 for message in bench.sent] == [1, 2], "that which runs waits"


def test_the_first_token_that_somebody_waits_for_is_reported_at_once() -> None:
    bench = Bench()
    bench.begin("a")
    bench.begin("b", arrives=True)
    assert bench.step("a") == 0
    assert bench.step("a", "b") == 1
    assert bench.step("a", "b") == 0
