"""Progress is the sign of life: a worker or pool that reports and makes none is replaced, and no other is."""

from collections.abc import Callable

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.stalls import GAPS, LEAST_S, STALLED
from tests.unit.test_evaluation import Evaluating

PERIOD_S = 0.5
LIMIT_S = 300.0  # workers.stall_timeout_s


class Reporting(Evaluating):
    """Time passes; ``w0`` reports what it has."""

    def begin(self) -> None:
        self.start("w0")
        self.offer(4)
        self.obey(do.StartRequest)

    def reports(self, for_s: float, pace_s: float = 0.0, waiting: int = 0) -> float:
        """For so long, or until the worker is replaced; a token of each request every ``pace_s``, 0: none. Returns the
        time."""
        began_s, next_s = self.now_s, self.now_s + pace_s
        worker = self.state.workers["w0"]
        tokens = {self.state.request_id[row]: int(self.state.requests["tokens"][row]) for row in worker.rows}
        while self.now_s - began_s < for_s and not worker.stopping:
            self.now_s += PERIOD_S
            if pace_s and self.now_s >= next_s:
                next_s += pace_s
                tokens = {name: count + 1 for name, count in tokens.items()}
            self.post(on.Progress("w0", worker.epoch, worker.loaded, tokens, {}, waiting, 50))
            self.post(on.Tick())
        return self.now_s - began_s

    @property
    def replaced(self) -> list[str]:
        return [command.reason for command in self.given(do.EvictWorker)]

    def knows_the_pace(self) -> None:
        """A request has ended."""
        self.report("g0.0", 20, end=True)


def test_a_worker_that_yields_no_token_is_replaced_and_its_requests_go_on_elsewhere() -> None:
    bench = Reporting(window=2, groups=16)
    bench.begin()
    bench.knows_the_pace()
    bench.report("g1.0", 7)
    took_s = bench.reports(LIMIT_S)
    (reason,) = bench.replaced
    assert reason.startswith(f"{STALLED}no token of 3 requests") and LEAST_S <= took_s < 2 * LEAST_S
    assert bench.machine.counters.stalls == 1
    bench.join("w1")
    bench.load_all()
    bench.post(on.WorkerLost("w0", 1, reason))
    assert bench.owner("g1.0") == "w1"
    resumed = [command for command in bench.given(do.StartRequest) if command.request_id == "g1.0"]
    assert (resumed[-1].worker_id, resumed[-1].arrival) == ("w1", "re-prefilled"), "with the tokens that it had"


def test_so_is_one_that_does_not_begin_what_it_is_given_and_one_that_only_evaluates() -> None:
    bench = Reporting(window=2, groups=16)
    bench.start("w0")
    bench.offer(1)
    assert bench.reports(2 * LIMIT_S) < LIMIT_S + 2, "nothing is known of the pace"
    assert bench.replaced
    bench = Reporting()
    bench.start("w0")
    bench.ask()
    bench.obey(do.StartRequest)
    bench.reports(2 * LIMIT_S)
    assert "of 4 requests" in bench.replaced[0]


@pytest.mark.parametrize("pace_s", [1.0, 5.0, 12.0])
def test_how_long_follows_from_the_workers_own_pace(pace_s: float) -> None:
    bench = Reporting(window=2, groups=16)
    bench.begin()
    bench.reports(3 * pace_s, pace_s)
    bench.knows_the_pace()
    bench.reports(20 * pace_s, pace_s)
    assert not bench.replaced
    took_s = bench.reports(2 * LIMIT_S)
    assert bench.replaced and took_s == pytest.approx(min(LIMIT_S, max(LEAST_S, GAPS * pace_s)), rel=0.25, abs=4)


def _prefills(bench: Reporting) -> None:
    """A prompt of 6,000 tokens, where a token takes 20 ms."""
    prompt = on.OfferedPrompt("long", "task", 6_000, 1, 60)
    bench.now_s += 0.4
    bench.report("g0.0", 20, end=True)
    bench.post(on.PromptsOffered((prompt,)))
    bench.obey(do.StartRequest)
    bench.reports(200.0)


def _loads(bench: Reporting) -> None:
    bench.join("w1")
    bench.now_s += bench.state.config.workers.load_timeout_s - 1
    bench.post(on.Tick())


def _stops(bench: Reporting) -> None:
    """SIGSTOP: nothing is heard of it. Its silence is another's limit."""
    for _ in range(8):
        bench.now_s += LIMIT_S
        bench.post(on.Tick())
        bench.reports(PERIOD_S)


def _idles(bench: Reporting) -> None:
    for group_id in [*bench.state.group_row]:
        bench.post(on.GroupCancelled(group_id, "asked for"))
    bench.obey(do.RemoveRequest)
    bench.reports(2 * LIMIT_S)


def _waits_for_storage(bench: Reporting) -> None:
    """A worker that cannot give its responses away stops, and goes on."""
    bench.post(on.StorageChanged("record: full"))
    bench.reports(2 * LIMIT_S)


@pytest.mark.parametrize("does", [_prefills, _loads, _stops, _idles, _waits_for_storage])
def test_no_other_is(does: Callable[[Reporting], None]) -> None:
    bench = Reporting(window=2, groups=16)
    bench.begin()
    does(bench)
    assert not bench.replaced


def test_a_pool_that_leaves_commands_unanswered_is_replaced() -> None:
    bench = Reporting(window=2, groups=16, handoff_timeout_s=10.0)
    bench.begin()
    bench.post(on.PoolJoined("pool-0", 7, 1000))
    bench.post(on.MigrationRequested("g0.0", "pool-0"))
    limit_s = 2 * 10.0 + bench.state.config.workers.silence_timeout_s
    while not bench.replaced and bench.now_s < 2 * limit_s:
        bench.reports(1.0, 0.5)
        bench.obey(do.Thaw)
    (reason,) = bench.replaced
    assert "ReserveSlot was not answered" in reason and bench.given(do.EvictWorker)[0].worker_id == "pool-0"
    assert bench.now_s == pytest.approx(limit_s, abs=3)
    bench.post(on.Tick())
    assert len(bench.replaced) == 1, "once"
