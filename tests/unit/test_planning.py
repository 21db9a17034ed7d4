"""Resource allocation: workloads, training times, Algorithm 1, dynamic adjustment."""

import math
from dataclasses import replace
from functools import partial

import pytest

from dora.core.forecast.adjustment import even_gain_s, groups_to_add
from dora.core.forecast.cost import CostModel
from dora.data.hardware import HARDWARE
from dora.errors import InvalidValue
from dora.lab.planning.allocation import Split, TrainingTime, allocate, allocate_across, transfer_s
from dora.lab.planning.generation import (
    EngineOption,
    Generation,
    bound_s,
    generation,
    ways_to_generate,
)
from dora.lab.planning.hardware import coefficients, kv_tokens
from dora.lab.planning.models import MODELS
from dora.lab.planning.plan import ANCHOR, Question, default_training, make_plan
from dora.lab.planning.workload import Lognormal, StepWorkload, lognormal_of_mean, step_workload
from dora.lab.sim.scenario import Scenario
from tests.refusals import refused

CLUSTER = Scenario().cluster
DORA_LENGTHS = Lognormal(7.0881, 1.2, 30_000)
DORA_STEP = step_workload(DORA_LENGTHS, groups=512, group_size=16, prompt_tokens=120)
OPTION = EngineOption(4, CostModel.of(CLUSTER.cost), CLUSTER.slots, CLUSTER.kv_tokens)


# The workload.


def test_the_workload_is_that_of_the_presets() -> None:
    assert DORA_STEP.n_tokens == pytest.approx(19.66e6, rel=1e-3)
    assert DORA_STEP.c_tokens == pytest.approx(8.04e10, rel=0.01)
    assert lognormal_of_mean(2400, 30_000).mu == pytest.approx(7.0881, abs=1e-4)


def test_moments_are_those_of_clipped_lengths() -> None:
    lengths = Lognormal(3.0, 0.7, 60)
    count = 20_000
    drawn = [
        min(60.0, math.exp(3.0 + 0.7 * _quantile((index + 0.5) / count))) for index in range(count)
    ]  # the distribution's own quantiles in place of random numbers
    assert lengths.moment(1) == pytest.approx(sum(drawn) / count, rel=1e-3)
    assert lengths.moment(2) == pytest.approx(sum(length**2 for length in drawn) / count, rel=1e-3)


def _quantile(share: float) -> float:
    low, high = -9.0, 9.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if math.erfc(-middle / math.sqrt(2)) / 2 < share else (low, middle)
    return low


# Training.


def test_one_point_scales_linearly_several_are_interpolated() -> None:
    assert TrainingTime(((40, 774.0),)).seconds(80) == 387.0
    several = TrainingTime(((40, 774.0), (88, 477.0)))
    assert (several.seconds(40), several.seconds(88)) == pytest.approx((774.0, 477.0))
    assert 477.0 < several.seconds(64) < 774.0
    assert several.seconds(36) == pytest.approx(834.5)
    assert [several.measured(gpus) for gpus in (36, 40, 64, 88, 92)] == [False, True, True, True, False]


def test_points_that_scale_too_well_are_not_extrapolated_below_zero() -> None:
    lucky = TrainingTime(((8, 100.0), (16, 40.0)))
    assert lucky.seconds(64) == 10.0
    assert lucky.seconds(4) == 200.0


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((8, math.nan),), ((8, -1.0),), ((8, 1.0), (8, 1.0)), ((8, 1.0), (16, 2.0))]
)
def test_impossible_training_points_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    with refused(InvalidValue, field="train_s_at"):
        TrainingTime(points)


def test_the_anchor_is_scaled_by_work_and_accelerator() -> None:
    same = default_training(MODELS["qwen2.5-32b"], HARDWARE["h800"], DORA_STEP, 4)
    assert same.seconds(64) == pytest.approx(ANCHOR.seconds(64), rel=1e-3)
    small = default_training(MODELS["qwen2.5-7b"], HARDWARE["h800"], DORA_STEP, 4)
    assert small.seconds(40) == pytest.approx(774.0 * 7.62 / 32.76, rel=1e-3)
    assert ANCHOR.scaled(2.0).seconds(80) == pytest.approx(774.0)


# Algorithm 1.


def brute_force(gpus: int, training: TrainingTime, window: int) -> tuple[float, int]:
    """Shortest step and fewest accelerators over every pair, as the paper's loop has it."""
    return min(
        Split(way, trainer, training.seconds(trainer)).rank
        for way in [generation(OPTION, engines, DORA_STEP, window) for engines in range(1, gpus // 4 + 1)]
        for trainer in range(training.multiple, gpus - way.gpus + 1, training.multiple)
    )


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(("gpus", "multiple"), [(16, 4), (64, 4), (64, 8), (128, 8), (200, 4)])
def test_the_split_is_the_best_of_all_pairs(gpus: int, multiple: int, window: int) -> None:
    training = replace(ANCHOR, multiple=multiple)
    model = partial(generation, workload=DORA_STEP, window=window)
    best, candidates = allocate(gpus, lambda budget: ways_to_generate(budget, model, [OPTION]), training)
    assert best.rank == brute_force(gpus, training, window)
    assert all(split.gpus <= gpus and split.train_gpus % multiple == 0 for split in candidates)


def test_the_dora_papers_clusters_are_split_where_the_facts_say_it_is_within_reach() -> None:
    for gpus, rollout, train in ((64, 28, 36), (128, 48, 80)):
        answer = make_plan(question(gpus=gpus))
        assert (answer.best.generation.gpus, answer.best.train_gpus) == (rollout, train)
        assert answer.best.generation.option.gpus == 4
        assert answer.best.step_s < {64: 14.67, 128: 10.46}[gpus] * 60


def question(**changes: object) -> Question:
    h800, model = HARDWARE["h800"], MODELS["qwen2.5-32b"]
    asked = Question(model, h800, h800, DORA_STEP, default_training(model, h800, DORA_STEP, 4), window=3)
    return replace(asked, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rollout", "train"), [(256, 40), (24, 512), (24, 4), (8, 8)])
def test_two_datacentres_give_back_what_the_faster_stage_does_not_need(rollout: int, train: int) -> None:
    def seconds(gpus: int) -> Generation:
        return generation(OPTION, gpus // 4, DORA_STEP, window=8)

    whole = seconds(rollout).seconds - ANCHOR.seconds(train)
    best, _ = allocate_across(rollout, train, lambda gpus: [seconds(gpus)] if gpus >= 4 else [], ANCHOR)
    gap = abs(best.generation.seconds - best.training_s)
    if whole < 0:
        assert best.train_gpus == train
        others = [abs(seconds(gpus).seconds - best.training_s) for gpus in range(4, rollout + 1, 4)]
    else:
        assert best.generation.gpus == rollout
        others = [abs(ANCHOR.seconds(gpus) - best.generation.seconds) for gpus in range(4, train + 1, 4)]
    assert gap == min(others)


def test_budgets_without_an_engine_or_a_trainer_are_refused() -> None:
    for changes, field, value, least in (
        ({"gpus": 4}, "gpus", 4, 14),
        ({"rollout_gpus": 1, "train_gpus": 8}, "rollout_gpus", 1, 2),
        ({"rollout_gpus": 8, "train_gpus": 2}, "train_gpus", 2, 12),
    ):
        with refused(InvalidValue, field=field, value=value, names=(least,)):
            make_plan(question(**changes))
    for changes in ({}, {"gpus": 64, "rollout_gpus": 8, "train_gpus": 8}, {"rollout_gpus": 8}):
        with refused(InvalidValue, field="gpus, rollout_gpus, train_gpus"):
            make_plan(question(**changes))


def test_no_step_is_shorter_than_the_weights_are_on_the_link() -> None:
    apart = {"rollout_gpus": 64, "train_gpus": 64}
    fast = make_plan(question(**apart, link_bits_per_s=80e9))
    slow = make_plan(question(**apart, link_bits_per_s=80e6))
    assert fast.transfer_s is not None and fast.transfer_s < fast.best.step_s
    assert fast.best.step_s == make_plan(question(**apart)).best.step_s
    assert slow.best.step_s == slow.transfer_s == pytest.approx(1000 * fast.transfer_s)


@pytest.mark.parametrize("field", ["gpus", "rollout_gpus", "train_gpus"])
def test_more_accelerators_than_can_be_searched_are_refused(field: str) -> None:
    apart = {} if field == "gpus" else {"rollout_gpus": 8, "train_gpus": 8}
    with refused(InvalidValue, value=65537, names=(field,)):
        make_plan(question(**{**apart, field: 65_537}))


def test_weights_over_the_papers_link() -> None:
    assert transfer_s(MODELS["qwen2.5-72b"].weights_bytes, 80e9) == pytest.approx(14.5, abs=0.1)
    with refused(InvalidValue, field="link_gbps"):
        transfer_s(1.0, math.nan)


def test_a_large_cluster_is_planned_at_once() -> None:
    answer = make_plan(question(gpus=4096))
    assert answer.best.gpus <= 4096
    assert len(answer.candidates) > 200


@pytest.mark.parametrize(
    "field", ["kv_token_s", "weights_s", "request_s", "step_s", "imbalance", "expert_fraction", "shared_fraction"]
)
@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
def test_bad_coefficients_are_refused_by_name(field: str, value: float) -> None:
    cost = replace(OPTION.cost, **{field: value})
    with refused(InvalidValue, names=(field,)):
        bound_s(cost, 256, 772_000, 1e6, 1e9, 1)
    with refused(InvalidValue, names=(field,)):
        generation(replace(OPTION, cost=cost), 1, DORA_STEP, window=2)


def test_other_bad_numbers_are_refused_by_name() -> None:
    cost = OPTION.cost
    for field, call in (
        ("slots", lambda: bound_s(cost, 0, 1, 1.0, 1.0, 1)),
        ("kv_tokens", lambda: bound_s(cost, 1, 0, 1.0, 1.0, 1)),
        ("engines", lambda: bound_s(cost, 1, 1, 1.0, 1.0, 0)),
        ("n_tokens", lambda: bound_s(cost, 1, 1, math.nan, 1.0, 1)),
        ("window", lambda: generation(OPTION, 1, DORA_STEP, window=0)),
        ("efficiency", lambda: generation(OPTION, 1, DORA_STEP, window=1, efficiency=math.nan)),
        ("tail_load", lambda: generation(OPTION, 1, DORA_STEP, window=1, tail_load=2.0)),
        ("lengths.sigma", lambda: Lognormal(1.0, 0.0, 10)),
        ("lengths.mu", lambda: Lognormal(math.nan, 1.0, 10)),
        ("mean_tokens", lambda: lognormal_of_mean(100, 50)),
        ("groups", lambda: step_workload(DORA_LENGTHS, 0, 16, 120)),
        ("train_multiple", lambda: TrainingTime(((8, 1.0),), 0)),
    ):
        with pytest.raises(InvalidValue) as refused:
            call()
        assert refused.value.field == field


# Dynamic adjustment.


def test_groups_are_added_until_the_lag_is_below_the_next_gain() -> None:
    gain_s = even_gain_s(600.0, 2)  # 600, 400, 300, 240 s with 2, 3, 4, 5 groups
    assert [groups_to_add(600.0, training_s, 2, gain_s) for training_s in (700.0, 401.0, 400.0, 300.0, 241.0)] == [
        0,
        0,
        1,
        2,
        2,
    ]
    assert groups_to_add(600.0, 1.0, 2, lambda _: 0.0) == 0  # one response alone takes that long
    assert groups_to_add(600.0, 1e-9, 2, gain_s, most=5) == 5


@pytest.mark.parametrize(("generation_s", "training_s", "engines"), [(math.nan, 1.0, 1), (1.0, 0.0, 1), (1.0, 1.0, 0)])
def test_impossible_times_are_refused(generation_s: float, training_s: float, engines: int) -> None:
    with pytest.raises(InvalidValue):
        groups_to_add(generation_s, training_s, engines, even_gain_s(1.0, 1))


def test_growing_lengths_ask_for_one_more_node_as_in_figure_11() -> None:
    """7B on 32 GPUs, longest response from 10K to 20K over 20 steps: generation grows faster than training."""
    model, h800 = MODELS["qwen2.5-7b"], HARDWARE["h800"]

    def step_of(scale: float) -> StepWorkload:
        return step_workload(Lognormal(math.log(4_000 * scale), 0.8, int(10_000 * scale)), 1024, 1, 200)

    option = EngineOption(1, CostModel.of(coefficients(model, h800, 1)), 256, kv_tokens(model, h800, 1))
    nodes, added_at = 2, []
    balanced = TrainingTime(((16, generation(option, 16, step_of(1.0), window=2).work_s),))
    for iteration in range(21):
        scale = 1 + iteration / 20
        times = [generation(option, 8 * count, step_of(scale), window=2).work_s for count in range(1, 10)]
        added = groups_to_add(
            times[nodes - 1],
            balanced.seconds(16) * scale,
            nodes,
            lambda count, times=times: times[count - 1] - times[count],  # type: ignore[misc]
        )
        nodes += added
        added_at += [iteration] * added
    assert len(added_at) == 1
    assert 8 <= added_at[0] <= 18  # the paper adds a node after 10 and after 16
