"""The chosen layout for numbers of accelerators, and the duration of a step."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest

from dora.data.hardware import HARDWARE
from dora.errors import InvalidValue
from dora.lab.planning.allocation import TrainingTime
from dora.lab.planning.models import MODELS
from dora.lab.planning.options import best, even_s, options
from dora.lab.planning.pace import Batch
from dora.lab.planning.plan import ANCHOR, default_training, make_plan
from dora.lab.planning.training import Trainers
from dora.lab.planning.workload import lognormal_of_mean, step_workload
from tests.refusals import refused
from tests.sweeps import some_of
from tests.unit.test_layout import H800, ROUND, memory_bytes
from tests.unit.test_pace import BATCH, FREE
from tests.unit.test_planning import DORA_STEP, question

TRIED = [("qwen2.5-7b", "h800"), ("qwen2.5-32b", "h800"), ("qwen2.5-72b", "h800"), ("qwen3-30b-a3b", "h20")]


@cache
def trainers(name: str, hardware: str = "h800", multiple: int = 4, cap_tokens: int = 30_000) -> Trainers:
    model, part = MODELS[name], HARDWARE[hardware]
    workload = step_workload(lognormal_of_mean(2400, cap_tokens), 512, 16, 120)
    return Trainers(model, part, workload, default_training(model, part, workload, multiple))


@pytest.mark.parametrize(("name", "hardware"), [*TRIED, ("longcat-flash", "npu-60gb")])
def test_layouts_use_all_accelerators_divide_what_they_must_and_fit(name: str, hardware: str) -> None:
    model, found = MODELS[name], trainers(name, hardware)
    numbers = [gpus for gpus in range(4, 512, 4) if found.fits(gpus)]
    assert len(numbers) > 5
    for gpus in numbers:
        layout = found.layout(gpus)
        replica = layout.replica
        assert replica.tensor * replica.pipeline * replica.context * layout.data == layout.gpus == gpus
        assert model.kv_heads % replica.tensor == 0
        assert replica.pipeline <= model.blocks
        assert max(1, model.experts) % replica.expert == 0
        assert replica.tensor * replica.context * layout.data % replica.expert == 0
        assert layout.memory_bytes == memory_bytes(model, replica, layout.data) <= found.limit_bytes
        assert replica.micro_batch_tokens >= 30_120


@pytest.mark.parametrize(("name", "hardware"), TRIED)
def test_the_choice_is_the_fastest_whatever_the_order(name: str, hardware: str) -> None:
    batch = Batch(1.3e6, 30_120, 4000.0)
    ways = list(options(MODELS[name], HARDWARE[hardware], batch, 1))
    shuffled = Random(0).sample(ways, len(ways))
    for gpus in range(4, 300, 4):
        first, second = best(ways, gpus), best(shuffled, gpus)
        assert first == second
        if first is not None:
            time_s = first.pace.step_s(gpus // first.replica.gpus)
            fitting = [option for option in ways if option.fits(gpus)]
            assert time_s == min(option.pace.step_s(gpus // option.replica.gpus) for option in fitting)
            assert even_s(ways, gpus) <= time_s


def test_of_equally_fast_layouts_the_least_divided_is_chosen() -> None:
    """If sending takes no time, 4 accelerators are as fast as 4 copies as they are as 2 on two ranks."""
    ways = [option for option in options(ROUND, FREE, BATCH, 1) if option.replica.pipeline == 1]
    tied = [option for option in ways if option.step_s(4) == min(each.step_s(4) for each in ways)]
    assert {option.replica.tensor for option in tied} == {1, 2}
    for order in (ways, ways[::-1]):
        chosen = best(order, 4)
        assert chosen is not None
        assert chosen.replica.tensor == 1


def test_short_responses_are_packed_into_micro_batches_and_long_ones_are_not() -> None:
    short = trainers("qwen2.5-7b", cap_tokens=2_500).layout(32).replica.micro_batch_tokens
    assert short % 2_620 == 0
    assert short <= 16_384
    assert trainers("qwen2.5-7b").layout(32).replica.micro_batch_tokens == 30_120


@pytest.mark.parametrize(("cap_tokens", "contexts"), [(30_000, {1}), (300_000, {1, 2}), (500_000, {2, 4})])
def test_a_sequence_is_on_several_ranks_only_where_nothing_fits_without(cap_tokens: int, contexts: set[int]) -> None:
    model, found = MODELS["qwen2.5-7b"], trainers("qwen2.5-7b", cap_tokens=cap_tokens)
    batch = Batch(1.3e6, cap_tokens + 120, 4000.0)
    tiers = {context: options(model, H800, batch, context) for context in (1, 2, 4, 8)}
    chosen = {gpus: found.layout(gpus).replica.context for gpus in range(4, 128, 4) if found.fits(gpus)}
    for gpus, context in chosen.items():
        assert context == next(each for each, tier in tiers.items() if best(tier, gpus))
    assert set(chosen.values()) == contexts


@pytest.mark.parametrize(("name", "hardware"), TRIED)
@pytest.mark.parametrize("multiple", some_of((1, 4, 6), 6))
def test_the_least_number_that_fits_is_the_first_of_all(name: str, hardware: str, multiple: int) -> None:
    found = trainers(name, hardware, multiple)
    first = next(gpus for gpus in range(multiple, 1000, multiple) if found.fits(gpus))
    assert found.least == first == found.numbers(first)[0]
    with refused(
        InvalidValue,
        field="train_gpus",
        names=(
            first - multiple,
            first,
        ),
    ):
        found.layout(first - multiple)


def test_the_fewest_accelerators_that_can_train() -> None:
    """The states alone are 18 bytes a parameter, 590 GB for the 32B and 1,309 GB for the 72B model; 71 GB are there."""
    found = {name: trainers(name, hardware, 1).least for name, hardware in TRIED[:3]}
    assert all(count * 71e9 > 18 * MODELS[name].parameters for name, count in found.items())
    assert found == {"qwen2.5-7b": 4, "qwen2.5-32b": 12, "qwen2.5-72b": 24}


def test_a_response_that_no_layout_holds_is_refused_with_the_longest_that_one_does() -> None:
    with refused(InvalidValue, field="cap_tokens", value=9000000) as caught:
        trainers("qwen2.5-7b", cap_tokens=9_000_000)
    most = int(caught.value.allowed.split()[2].rstrip(":,").replace(",", ""))
    assert trainers("qwen2.5-7b", cap_tokens=most).least > 0
    with refused(InvalidValue, field="cap_tokens", value=2430027):
        trainers("qwen2.5-7b", cap_tokens=most + 1)


# How long a step takes.


@pytest.mark.parametrize("points", [((36, 800.0),), ((16, 1900.0), (44, 700.0), (100, 400.0)), ((4, 6000.0),)])
def test_a_measured_time_is_left_as_it_is(points: tuple[tuple[int, float], ...]) -> None:
    found = Trainers(MODELS["qwen2.5-32b"], H800, DORA_STEP, TrainingTime(points))
    for gpus, seconds in points:
        if found.fits(gpus):
            assert found.seconds(gpus) == pytest.approx(seconds)
    assert found.measured(points[0][0])
    assert not found.measured(104)


def test_times_scaled_from_another_model_are_of_a_trainer_that_divides_evenly() -> None:
    """28 divides badly, which a time measured there contains and a scaled one does not."""
    model = MODELS["qwen2.5-32b"]
    own = Trainers(model, H800, DORA_STEP, TrainingTime(((28, 1000.0),)))
    scaled = Trainers(model, H800, DORA_STEP, TrainingTime(((14, 1000.0),), even=True).scaled(2.0))
    assert own.seconds(28) == pytest.approx(1000.0)
    assert scaled.seconds(28) > 1100.0
    assert scaled.seconds(40) == pytest.approx(700.0)
    assert own.seconds(40) < 640.0


def test_the_anchor_divides_evenly_and_is_left_as_it_is() -> None:
    found = make_plan(question(gpus=256)).trainers
    assert [found.seconds(gpus) for gpus in (40, 88)] == pytest.approx([774.0, 477.0], rel=1e-3)


def test_a_number_that_divides_badly_takes_longer_than_measured_ones_say() -> None:
    """28 is 4 x 7: of 7 replicas on 4 none fits, and a pipeline of 7 waits for 6 of its micro-batches."""
    found = trainers("qwen2.5-32b")
    for gpus in (24, 28, 32):
        assert found.seconds(gpus) >= found.time.seconds(gpus)
    assert found.seconds(28) > 1.1 * found.time.seconds(28)
    assert found.layout(28).replica.pipeline == 7


@pytest.mark.parametrize(("name", "hardware"), TRIED)
def test_more_accelerators_are_named_only_where_they_shorten_the_step(name: str, hardware: str) -> None:
    found = trainers(name, hardware)
    numbers = found.numbers(400)
    times = [found.seconds(gpus) for gpus in numbers]
    assert all(later < earlier for earlier, later in pairwise(times))
    left_out = [gpus for gpus in range(4, 401, 4) if gpus not in numbers and found.fits(gpus)]
    for gpus in left_out:
        assert found.seconds(gpus) >= min(found.seconds(fewer) for fewer in numbers if fewer < gpus)
    assert left_out or name == "qwen2.5-7b"


# In a plan.


def test_a_trainer_that_does_not_fit_is_not_planned() -> None:
    """332 is 4 x 83: more stages than the model has layers, and 83 replicas would be on 4 accelerators each."""
    model = MODELS["qwen2.5-72b"]
    training = default_training(model, H800, DORA_STEP, 4)
    answer = make_plan(question(model=model, training=training, gpus=128))
    assert all(answer.trainers.fits(split.train_gpus) for split in answer.candidates)
    apart = make_plan(question(model=model, training=training, rollout_gpus=512, train_gpus=332))
    assert not apart.trainers.fits(332)
    assert apart.candidates[-1].train_gpus == 328


def test_budgets_are_refused_with_the_least_that_fits() -> None:
    for changes, field, least in (
        ({"gpus": 12}, "gpus", "14, to have room for an engine of 2 and a trainer of 12"),
        ({"rollout_gpus": 1, "train_gpus": 8}, "rollout_gpus", "2, to have room for an engine of 2"),
        ({"rollout_gpus": 8, "train_gpus": 8}, "train_gpus", "12, to have room for a trainer of 12"),
        (
            {"gpus": 12, "training": replace(ANCHOR, multiple=8)},
            "gpus",
            "18, to have room for an engine of 2 and a trainer of 16",
        ),
    ):
        with pytest.raises(InvalidValue) as caught:
            make_plan(question(**changes))
        assert (caught.value.field, caught.value.value) == (field, changes[field])  # type: ignore[index]
        assert caught.value.allowed.startswith(f"at least {least}")
    assert make_plan(question(gpus=14)).best.train_gpus == 12
    assert make_plan(question(rollout_gpus=2, train_gpus=12)).best.train_gpus == 12


def test_the_hardware_of_the_trainer_is_not_that_of_rollout() -> None:
    small = replace(H800, name="small", memory_bytes=40e9)
    apart = {"rollout_gpus": 64, "train_gpus": 64}
    usual, less = make_plan(question(**apart)), make_plan(question(**apart, train_hardware=small))
    assert usual.trainers.limit_bytes == pytest.approx(71e9)
    assert less.trainers.limit_bytes == pytest.approx(33e9)
    assert less.trainers.layout(less.best.train_gpus).memory_bytes <= 33e9
    assert usual.best.generation == less.best.generation
