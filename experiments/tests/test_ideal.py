"""experiments/ideal.py: steps without friction, under the core's window."""

import pytest

from dora.lab.sim.presets import preset
from experiments.ideal import LENGTHS, Ideal, measure
from tests.sweeps import some_of

SMALL = preset("small")


@pytest.mark.parametrize("lengths", some_of(LENGTHS, "believed"))
def test_no_step_is_faster_than_its_work(lengths: str) -> None:
    row = measure(SMALL, window=3, steps=6, seed=0, lengths=lengths, overcommit=0.0)
    assert row["over_bound"] > 1.0
    assert row["step_min"] >= SMALL.trainer.step_s / 60
    assert row == measure(SMALL, window=3, steps=6, seed=0, lengths=lengths, overcommit=0.0)


@pytest.mark.parametrize("overcommit", [0.0, 0.5])
def test_engines_are_shared_out_and_never_overcommitted_by_more_than_asked(overcommit: float) -> None:
    run = Ideal(SMALL, window=3, seed=0, lengths="believed", overcommit=overcommit)
    for _ in range(5):
        run.step()
        groups = run._dp_groups()
        assert sum(groups.values()) == SMALL.cluster.engines
        for version in sorted(groups)[1:-1]:
            pool = run.pools[version]
            need = pool.kv(pool.running()) / SMALL.cluster.kv_tokens
            assert not pool.running().any() or groups[version] >= 1
            assert groups[version] >= min(need - overcommit, SMALL.cluster.engines - groups[min(groups)])


def test_known_lengths_begin_only_what_ends_in_time() -> None:
    run = Ideal(SMALL, window=3, seed=0, lengths="known", overcommit=0.0)
    for _ in range(5):
        run.step()
    late = run.longest * run.pace_s > SMALL.trainer.step_s
    due = run.window.oldest_live
    assert not any(late[index] for index in run._may_begin(due))
    assert len(run._may_begin(run.window.newest)) >= len(run._may_begin(due))
