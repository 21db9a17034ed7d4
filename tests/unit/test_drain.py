"""A step of window 1: a batch that empties its engines, and training beside it."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.lab.planning.allocation import Split, allocate_across
from dora.lab.planning.drain import SIMULATED, ready_s, streamed_s
from dora.lab.planning.generation import EFFICIENCY, Generation, bound_s, generation
from dora.lab.planning.plan import ANCHOR, make_plan
from dora.lab.planning.workload import Lognormal, step_workload
from dora.lab.sim.presets import composed, planned
from dora.lab.sim.run import simulate
from tests.unit.test_planning import DORA_STEP, OPTION, question


def ready(engines: int, micro_batches: int = 16, workload=DORA_STEP) -> tuple[float, ...]:  # type: ignore[no-untyped-def]
    return ready_s(OPTION.cost, OPTION.slots, OPTION.kv_tokens, workload, engines, micro_batches)


@given(
    ready=st.lists(st.floats(0.0, 1e4), min_size=1, max_size=20).map(sorted),
    training_s=st.floats(0.0, 1e5),
)
def test_training_is_between_all_of_it_after_generation_and_all_but_the_last_beside_it(
    ready: list[float], training_s: float
) -> None:
    step_s = streamed_s(ready, training_s)
    assert step_s <= (ready[-1] + training_s) * (1 + 1e-9)
    assert step_s >= max(training_s, ready[-1] + training_s / len(ready)) * (1 - 1e-9)


def test_one_micro_batch_is_trained_on_after_all_is_generated() -> None:
    (at_s,) = ready(6, micro_batches=1)
    assert streamed_s((at_s,), 100.0) == pytest.approx(at_s + 100.0)


@pytest.mark.parametrize("engines", [1, 4, 6, 60, 8192, 10_000])
def test_a_batch_that_empties_its_engines_is_above_the_bound_and_the_longest_response_alone(engines: int) -> None:
    ends = ready(engines)
    assert all(earlier <= later for earlier, later in pairwise(ends))
    workload = DORA_STEP
    bound = bound_s(OPTION.cost, OPTION.slots, OPTION.kv_tokens, workload.n_tokens, workload.c_tokens, engines)
    alone_s = workload.cap_tokens * OPTION.cost.decode_step_s(1, workload.cap_tokens / 2)
    assert ends[-1] > bound
    if engines <= 60:  # beyond, one engine has too few responses for one of the longest at even quantiles
        assert ends[-1] > 0.99 * alone_s


def test_beyond_what_is_simulated_engines_are_full() -> None:
    """Twice the batch on the same engines takes longer by the time of half of it on full engines."""
    engines = DORA_STEP.responses // SIMULATED
    once, twice = (step_workload(Lognormal(7.0881, 1.2, 30_000), groups, 16, 120) for groups in (512, 1024))
    longer_s = ready(engines, workload=twice)[-1] - ready(engines, workload=once)[-1]
    full_s = bound_s(OPTION.cost, OPTION.slots, OPTION.kv_tokens, once.n_tokens, once.c_tokens, engines)
    assert longer_s == pytest.approx(full_s, rel=0.01)


def test_the_efficiency_counts() -> None:
    found = generation(OPTION, 6, DORA_STEP, window=1)
    assert found.ready_s == pytest.approx([EFFICIENCY * at_s for at_s in ready(6)])
    assert found.seconds == found.ready_s[-1]


@pytest.mark.full  # a minute and a half for both
@pytest.mark.parametrize("rollout_gpus", [24, 40])
def test_a_simulated_step_takes_as_long(rollout_gpus: int) -> None:
    """Within 8%: one step of the default strategy, lengths known, on the DORA paper's 64 GPUs."""
    step_s = ANCHOR.seconds(64 - rollout_gpus)
    over = {"cluster": {"rollout_gpus": rollout_gpus}, "trainer": {"step_s": step_s}}
    report = simulate(composed(over, "dora-64", "laxity", 1), steps=2, warmup=1, seed=0)
    split = Split(generation(OPTION, rollout_gpus // 4, DORA_STEP, window=1), 64 - rollout_gpus, step_s)
    assert split.step_s / 60 == pytest.approx(report.step_time_min, rel=0.08)


def test_planned_splits_of_a_window_of_1_know_whether_training_is_streamed() -> None:
    scenario = composed({}, "dora-64", "laxity", 1)
    whole = scenario.model_copy(update={"trainer": scenario.trainer.model_copy(update={"streams": False})})
    # all of the training comes after generation there, so more accelerators are worth while for it
    assert planned(whole).cluster.train_gpus > planned(scenario).cluster.train_gpus


def test_weights_between_two_datacentres_are_part_of_the_step() -> None:
    budgets = {"rollout_gpus": 32, "train_gpus": 32, "link_bits_per_s": 80e9}
    near, far = (make_plan(question(window=1, **over)) for over in ({**budgets, "link_bits_per_s": 0.0}, budgets))
    assert far.transfer_s is not None
    assert far.best.step_s == pytest.approx(near.best.step_s + far.transfer_s)
    hidden, none = (make_plan(question(window=3, **{**budgets, "link_bits_per_s": bits})) for bits in (80e9, 0.0))
    assert hidden.best.step_s == none.best.step_s


def test_two_datacentres_give_back_only_what_does_not_shorten_the_step() -> None:
    def ways(gpus: int) -> list[Generation]:
        way = generation(OPTION, min(8, gpus // 4), DORA_STEP, window=1) if gpus >= 4 else None
        return [] if way is None else [replace(way, engines=gpus // 4)]  # beyond 8 engines nothing gets faster

    best, candidates = allocate_across(64, 32, ways, ANCHOR)
    assert (best.generation.gpus, best.train_gpus) == (32, 32)
    assert len(candidates) == 16
