"""`laxity` where there is far more KV than can be filled, on a machine: nobody is packed tight."""

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.observation import view_of
from dora.core.policies import POLICIES, Strategy
from dora.core.policies.laxity import LaxityPolicy
from dora.lab.sim.presets import composed
from dora.lab.sim.run import simulate
from tests.unit.test_machine import Bench


def after_a_step() -> Bench:
    """Version 1 was just published; four of ten workers still work for version 0, on one response each."""
    bench = Bench(window=2, groups=4, policy="laxity")
    bench.start(*(f"w{number}" for number in range(10)))
    bench.offer(32, group_size=4)
    bench.post(on.StepRequested(1, 0))
    for group in range(8):
        for response in range(4 if group < 4 else 3):
            bench.complete(f"g{group}.{response}")
    bench.post(on.StepCommitted(1, 0))
    return bench


def test_where_kv_is_ample_old_responses_stay_and_new_ones_spread_over_all_that_load() -> None:
    """The six workers that do not work for version 0 get an even share of version 1 as each is ready."""
    bench = after_a_step()
    workers = bench.state.workers.values()
    assert sorted((worker.target, worker.assigned) for worker in workers) == [(0, 1)] * 4 + [(1, 0)] * 6
    bench.load_all()
    assert not bench.given(do.ReserveSlot)
    assert sorted(worker.assigned for worker in workers if worker.hosts == 1) == [1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(("groups", "held"), [(4, 2), (10_000, 8)])
def test_where_a_step_fills_the_kv_the_first_worker_is_filled_and_does_not_wait_for_others(
    groups: int, held: int
) -> None:
    """Nine workers join the one that has two responses, and eight more prompts come while they load."""
    bench = Bench(window=2, groups=groups, policy="laxity")
    bench.start("w0")
    bench.offer(2)
    for number in range(1, 10):
        bench.join(f"w{number}")
    bench.offer(8)
    assert bench.state.workers["w0"].assigned == held


def test_without_an_older_version_kv_is_still_known_to_be_ample_at_a_publish() -> None:
    """Window 1: no group is left when version 1 is published, but the plan before saw some."""
    bench = Bench(window=1, groups=4, policy="laxity")
    bench.start(*(f"w{number}" for number in range(9)))
    bench.offer(8, group_size=4)
    bench.join("w9")
    bench.load_all()
    bench.post(on.StepRequested(1, 0))
    for group in range(4):
        for response in range(4):
            bench.complete(f"g{group}.{response}")
    bench.post(on.StepCommitted(1, 0))
    assert not bench.state.groups.used
    bench.load_all()
    assert not bench.given(do.ReserveSlot)
    assert sorted(worker.assigned for worker in bench.state.workers.values()) == [0, 0] + [2] * 8


def test_what_runs_dry_gets_the_newest_version_without_a_plan() -> None:
    """The first of the four that work for version 0."""
    bench = after_a_step()
    bench.load_all()
    before = bench.state.counters.rebalances
    dry = bench.state.workers[bench.owner("g4.3")]
    bench.complete("g4.3")
    assert (dry.assigned, dry.target, dry.loading) == (0, 1, 1)
    assert bench.state.counters.rebalances == before


def test_what_runs_dry_goes_where_a_plan_would_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more workers than can be filled: at every hand-on a plan would change that, and nothing else."""
    handed_on: list[bool] = []

    class Compared(LaxityPolicy):
        def successor(self, dispatcher: Dispatcher) -> int | None:
            version = super().successor(dispatcher)
            if version is not None:
                seen = view_of(dispatcher._state)
                plan, now = self._allocation(seen).targets(), seen.workers.target
                changes = {index: target for index, target in plan.items() if target != now[index]}
                handed_on.append(changes == dict.fromkeys(sorted(_dry(dispatcher)), version))
            return version

    monkeypatch.setitem(POLICIES, "compared", Strategy(Compared))
    ample = {"cluster": {"gpus": 72, "rollout_gpus": 64}}
    simulate(composed(ample, "small", "compared", 3), steps=6, warmup=2, seed=0)
    assert len(handed_on) > 20
    assert all(handed_on)


def _dry(dispatcher: Dispatcher) -> set[int]:
    """Indexes that hold nothing and are to host an older version."""
    return {
        worker.index
        for worker in dispatcher.workers()
        if not worker.assigned and 0 <= worker.target < dispatcher.newest
    }
