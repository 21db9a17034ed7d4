"""The core decides the precision of each version, and restarts the workers that have another one."""

from typing import Any

import pytest

from dora.config import validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.rules import learning, precision
from tests.unit.test_machine import Bench

LIMIT = 0.1
ABOVE = 0.3


class Low(Bench):
    """A bench whose engines quantise."""

    def __init__(self, window: int = 2, groups: int = 1, **workers: Any) -> None:
        super().__init__(window, groups)
        tree = {"window": {"size": window}, "workers": {"quantisation": "int8", "mismatch_max": LIMIT, **workers}}
        self.machine = Machine(validated(tree))
        self.state = self.machine.state

    def step(self, mismatch: float) -> list[do.Command]:
        """Trains on one group and commits."""
        number = self.state.window.newest
        self.offer(1)
        self.complete(f"g{number}.0")
        self.post(on.StepRequested(1, number))
        return self.post(on.StepCommitted(1, number, mismatch=mismatch))

    def restarts(self) -> list[tuple[str, bool]]:
        return [(each.worker_id, each.full_precision) for each in self.given(do.RestartWorker)]

    def starts_again(self, name: str) -> None:
        """The worker obeys the last order: its epoch ends, and the next has the other engine."""
        (*_, order) = self.given(do.RestartWorker)
        assert order.worker_id == name
        self.post(on.WorkerLost(name, order.epoch, "it starts again"))
        self.epochs += 1
        self.post(on.WorkerJoined(name, self.epochs, 8, 100_000, full_precision=order.full_precision))


def test_the_next_version_after_a_large_mismatch_is_sampled_in_full_precision() -> None:
    bench = Low(window=1)
    bench.start("w0")
    commands = bench.step(ABOVE)
    assert [each for each in commands if isinstance(each, do.FallBack)] == [do.FallBack(2, 0, ABOVE)]
    assert not bench.restarts(), "version 1 is recorded in int8 already"
    bench.load_all()
    bench.step(ABOVE)
    assert bench.given(do.FallBack) == [do.FallBack(2, 0, ABOVE)], "once"
    assert bench.restarts() == [("w0", True)]
    assert [load.version for load in bench.given(do.LoadVersion)] == [0, 1]
    bench.starts_again("w0")
    bench.load_all()
    assert bench.state.workers["w0"].loaded == 2 and not bench.state.counters.workers_lost
    bench.step(ABOVE)
    bench.load_all()
    assert bench.state.workers["w0"].loaded == 3 and bench.restarts() == [("w0", True)]


@pytest.mark.parametrize(
    ("mismatch", "workers"),
    [
        (LIMIT, {}),
        (-1.0, {}),
        (ABOVE, {"quantisation": ""}),
        (ABOVE, {"mismatch_max": 0.0}),
        (ABOVE, {"mismatch_max": 0.5}),
    ],
    ids=["at the limit", "not told", "nothing to fall back from", "no limit", "another limit"],
)
def test_otherwise_precision_stays(mismatch: float, workers: dict[str, Any]) -> None:
    bench = Low(window=1, **workers)
    bench.start("w0")
    for _ in range(3):
        bench.step(mismatch)
        bench.load_all()
    assert not bench.given(do.FallBack) and not bench.restarts() and bench.state.workers["w0"].loaded == 3


def test_kv_in_low_precision_falls_back_too() -> None:
    bench = Low(window=1, quantisation="", kv_dtype="fp8")
    bench.start("w0")
    bench.step(ABOVE)
    assert bench.given(do.FallBack) and precision.is_full(bench.state, 2) and not precision.is_full(bench.state, 1)


def test_a_worker_of_either_precision_serves_the_versions_of_the_other_after_a_restart() -> None:
    bench = Low(window=1)
    bench.state.full_precision_from = 1
    bench.epochs += 1
    bench.post(on.WorkerJoined("w0", bench.epochs, 8, 100_000, full_precision=True))
    assert bench.restarts() == [("w0", False)], "version 0 is in int8"
    bench.starts_again("w0")
    bench.load_all()
    assert bench.state.workers["w0"].loaded == 0


def test_a_version_in_another_precision_is_not_believed() -> None:
    bench = Low(window=1)
    bench.post(on.WorkerJoined("w0", 1, 8, 100_000, version=0, full_precision=True))
    assert bench.state.workers["w0"].loaded < 0 and bench.restarts() == [("w0", False)]


def test_a_restored_core_knows_which_versions_are_in_full_precision() -> None:
    before, after = Low(), Low()
    learning.restore(after.state, learning.snapshot(before.state))
    assert after.state.full_precision_from == -1
    before.state.full_precision_from = 7
    learning.restore(after.state, learning.without_window(learning.snapshot(before.state)))
    assert [precision.is_full(after.state, version) for version in (6, 7, 8)] == [False, True, True]
