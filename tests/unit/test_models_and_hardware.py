"""Models and accelerators that plans know: KV, weights, rooflines, what fits."""

from dataclasses import replace
from functools import partial

import pytest

from dora.core.forecast.cost import CostModel
from dora.data.hardware import HARDWARE, find_hardware
from dora.errors import InvalidValue
from dora.lab.planning.generation import (
    engine_options,
)
from dora.lab.planning.hardware import coefficients, kv_tokens
from dora.lab.planning.models import MODELS, find_model
from dora.lab.planning.workload import Lognormal, step_workload
from dora.lab.sim.scenario import Scenario
from tests.refusals import refused

CLUSTER = Scenario().cluster
STEP = step_workload(Lognormal(7.0881, 1.2, 30_000), groups=512, group_size=16, prompt_tokens=120)


def test_kv_and_weights_follow_from_the_architecture() -> None:
    assert {name: model.kv_token_bytes for name, model in MODELS.items()} == {
        "qwen2.5-7b": 57_344,
        "qwen2.5-14b": 196_608,
        "qwen2.5-32b": 262_144,
        "qwen2.5-72b": 327_680,
        "qwen3-30b-a3b": 98_304,
        "qwen3-next-80b-a3b": 24_576,
        "longcat-flash": 64_512,
    }
    assert MODELS["qwen2.5-32b"].weights_bytes == pytest.approx(CLUSTER.weights_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tflops", "memory_gb", "bandwidth_gb_per_s"),
    [
        ("a100-80gb", 312, 80, 2039),
        ("h100", 989.4, 80, 3350),
        ("h200", 989.4, 141, 4800),
        ("b200", 2250, 180, 7700),
        ("mi300x", 1307.4, 192, 5300),
    ],
)
def test_an_accelerator_has_the_figures_of_its_data_sheet(
    name: str, tflops: float, memory_gb: float, bandwidth_gb_per_s: float
) -> None:
    part = find_hardware(name.upper())
    assert part.flops == pytest.approx(tflops * 1e12)
    assert part.memory_bytes == pytest.approx(memory_gb * 1e9)
    assert part.bandwidth_bytes_per_s == pytest.approx(bandwidth_gb_per_s * 1e9)


def test_a_state_costs_each_request_the_same_and_takes_room_from_the_kv() -> None:
    hybrid, h800 = MODELS["qwen3-next-80b-a3b"], HARDWARE["h800"]
    assert hybrid.state_bytes / hybrid.kv_token_bytes == 1_608
    attention = replace(hybrid, kv_layers=0, state_bytes=0)
    costs = [CostModel.of(coefficients(model, h800, 4)) for model in (hybrid, attention)]
    short, long = ([cost.decode_step_s(1, tokens) for cost in costs] for tokens in (1, 100_000))
    assert short[0] > short[1] and long[0] < long[1]
    without = kv_tokens(hybrid, h800, 4)
    assert without - kv_tokens(hybrid, h800, 4, 256) == pytest.approx(256 * 1_608, abs=1)
    assert without > 4 * kv_tokens(attention, h800, 4) - 4


def test_the_roofline_meets_its_calibration() -> None:
    cost = coefficients(MODELS["qwen2.5-32b"], HARDWARE["h800"], 4)
    for field in ("kv_token_s", "weights_s", "request_s", "step_s", "prefill_token_s"):
        assert getattr(cost, field) == pytest.approx(getattr(CLUSTER.cost, field), rel=1e-3), field
    assert kv_tokens(MODELS["qwen2.5-32b"], HARDWARE["h800"], 4) == pytest.approx(CLUSTER.kv_tokens, rel=1e-3)


def test_the_roofline_against_staleflows_table_is_as_far_off_as_it_says() -> None:
    cost = coefficients(MODELS["qwen3-30b-a3b"], HARDWARE["h20"], 1)
    one_request_s = cost.weights_s * 3.3 / 30.5  # billions of parameters: active, and all
    assert CostModel.of(cost).matmul_s(1) - cost.step_s == pytest.approx(one_request_s)
    for found, table, error in (
        (cost.kv_token_s, 7.28e-8, -0.44),
        (one_request_s, 1.72e-3, 0.28),
        (cost.request_s, 1.25e-4, 0.01),
        (cost.step_s, 1.07e-2, 0.0),
    ):
        assert found / table - 1 == pytest.approx(error, abs=0.005)


def test_a_mixtures_weights_are_those_of_its_published_configuration() -> None:
    """LongCat-Flash: 18.6 billion parameters are active where a token chooses no expert that computes anything.
    Qwen3-30B-A3B: 48 layers of 128 experts, each 3 matrices of 2,048 x 768."""
    longcat, qwen = MODELS["longcat-flash"], MODELS["qwen3-30b-a3b"]
    assert longcat.shared_fraction * longcat.parameters == pytest.approx(18.6e9, rel=0.005)
    experts = 48 * 128 * 3 * 2048 * 768
    assert (1 - qwen.shared_fraction) * qwen.parameters == pytest.approx(experts, rel=0.005)
    assert qwen.chosen_share == pytest.approx(experts / 16 / 3.3e9, rel=0.005)
    dense = MODELS["qwen2.5-32b"]
    assert (dense.expert_fraction, dense.shared_fraction, dense.chosen_share) == (1.0, 0.0, 0.0)


def test_only_experts_spread_over_several_accelerators_are_uneven() -> None:
    found = [
        coefficients(MODELS[model], HARDWARE[hardware], gpus)
        for model, hardware, gpus in (
            ("longcat-flash", "npu-60gb", 32),
            ("qwen3-30b-a3b", "h20", 4),
            ("qwen3-30b-a3b", "h20", 1),
            ("qwen2.5-32b", "h800", 4),
        )
    ]
    # the fullest of 32 ranks is 2.07 deviations above the mean, of 4 1.03; a deviation is sqrt(ranks / 8 experts)
    of_chosen = [2.07 * 2.0 * 8.4 / 27, 1.03 * 0.707 * 1.81 / 3.3, 0.0, 0.0]
    assert [cost.imbalance for cost in found] == pytest.approx(of_chosen, rel=0.03)
    assert [cost.expert_fraction for cost in found] == [1 / 64, 1 / 16, 1 / 16, 1.0]


@pytest.mark.parametrize(
    ("name", "meant"), [("qwen2.5-32", "qwen2.5-32b"), ("Qwen-72B", "qwen2.5-72b"), ("longcat", "longcat-flash")]
)
def test_an_unknown_model_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    with refused(
        InvalidValue,
        field="--model",
        names=(
            name,
            meant,
        ),
    ):
        find_model(name)


def test_an_unknown_accelerator_is_refused_with_the_nearest_name() -> None:
    assert find_hardware("H20").name == "h20"
    with refused(InvalidValue, field="--hardware", value="h900", names=("h800",)):
        find_hardware("h900")


def test_a_model_that_does_not_fit_is_refused_and_one_that_fits_no_node_spans_nodes() -> None:
    options = partial(engine_options, workload=STEP)
    assert [option.gpus for option in options(MODELS["qwen2.5-32b"], HARDWARE["h800"])] == [2, 4, 8]
    assert [option.gpus for option in options(MODELS["longcat-flash"], HARDWARE["npu-60gb"])] == [32]
    with refused(InvalidValue, field="gpus_per_engine", value=1, names=("2", "qwen2.5-32b", "65.5")):
        options(MODELS["qwen2.5-32b"], HARDWARE["h800"], sizes=(1,))
