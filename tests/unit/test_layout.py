"""How a trainer's accelerators divide a model: what each holds, how long a step takes, which layout is chosen."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dora.errors import InvalidValue
from dora.planning.allocation import TrainingTime
from dora.planning.hardware import HARDWARE, PREFILL_EFFICIENCY, Hardware
from dora.planning.layout import Replica, footprints, layer_activation_bytes, limit_bytes, stages
from dora.planning.models import MODELS, ModelSpec
from dora.planning.options import best, even_s, options
from dora.planning.pace import LINK_EFFICIENCY, UPDATES, Batch, pace
from dora.planning.plan import ANCHOR, default_training, make_plan
from dora.planning.training import Trainers
from dora.planning.workload import lognormal_of_mean, step_workload
from tests.unit.test_planning import DORA_STEP, question

H800 = HARDWARE["h800"]
# 4 layers of 16 million parameters, and 10 million for each of the embeddings.
ROUND = ModelSpec("round", 84e6, 84e6, 4, 1000, 10, 10, 100, 10_000, ffn_dim=4000)
# The same with 8 experts of 1.5 million parameters in place of each dense network, of which a token uses 2.
EXPERTS = ModelSpec("experts", 84e6, 48e6, 4, 1000, 10, 10, 100, 10_000, experts=8, experts_per_token=2, expert_dim=500)
# Tensor and pipeline ranks, and the fewest accelerators of table 2.
LAMINAR = {"qwen2.5-7b": (2, 1, 8), "qwen2.5-32b": (4, 2, 16), "qwen2.5-72b": (4, 4, 32)}


def memory_bytes(model: ModelSpec, replica: Replica, data: int) -> float:
    return max(footprint.on(data) for footprint in footprints(model, replica))


@cache
def trainers(name: str, hardware: str = "h800", multiple: int = 4, cap_tokens: int = 30_000) -> Trainers:
    model, part = MODELS[name], HARDWARE[hardware]
    workload = step_workload(lognormal_of_mean(2400, cap_tokens), 512, 16, 120)
    return Trainers(model, part, workload, default_training(model, part, workload, multiple))


# The models' sizes.


def test_parameters_follow_from_the_sizes() -> None:
    for name in ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b", "qwen3-30b-a3b"):
        model = MODELS[name]
        heads_dim, kv_dim = model.heads * model.head_dim, model.kv_heads * model.head_dim
        attention = model.hidden_dim * (2 * heads_dim + 2 * kv_dim)
        experts = model.experts * 3 * model.hidden_dim * model.expert_dim
        layer = attention + 3 * model.hidden_dim * model.ffn_dim + experts
        total = model.layers * layer + 2 * model.vocabulary * model.hidden_dim
        assert total == pytest.approx(model.parameters, rel=3e-3), name
        active = total - model.layers * experts * (1 - model.experts_per_token / max(1, model.experts))
        assert active == pytest.approx(model.active_parameters, rel=0.02), name


def test_those_of_latent_attention_too() -> None:
    """LongCat-Flash: queries by 1,536 values, keys and values by 512, and 64 more for positions."""
    attention = 6144 * 1536 + 1536 * 64 * 192 + 6144 * 576 + 512 * 64 * 256 + 64 * 128 * 6144
    total = 56 * (attention + 3 * 6144 * 12_288) + 28 * 512 * 3 * 6144 * 2048 + 2 * 131_072 * 6144
    assert total == pytest.approx(MODELS["longcat-flash"].parameters, rel=3e-3)


# Memory.


class Norm(torch.autograd.Function):
    """A fused norm: it keeps its input, and computes the rest again."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return F.rms_norm(x, weight.shape, weight)


class Gated(torch.autograd.Function):
    """A fused gate: it keeps what comes in alone."""

    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up


def test_a_layer_keeps_as_much_as_autograd_says() -> None:
    tokens, hidden, heads, kv_heads, dim, ffn = 256, 64, 4, 2, 16, 96
    sizes = {"q": (heads * dim, hidden), "k": (kv_heads * dim, hidden), "v": (kv_heads * dim, hidden),
             "out": (hidden, heads * dim), "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn),
             "first": (hidden,), "second": (hidden,)}  # fmt: skip
    weights = {name: torch.ones(size, dtype=torch.bfloat16, requires_grad=True) for name, size in sizes.items()}
    own = {weight.data_ptr() for weight in weights.values()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (
            storage.data_ptr() not in own and tensor.dtype == torch.bfloat16
        ):  # one fp32 value a token and head is left out
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x = torch.ones(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        normed = Norm.apply(x, weights["first"])
        q, k, v = (F.linear(normed, weights[name]).view(1, tokens, -1, dim).transpose(1, 2) for name in ("q", "k", "v"))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(tokens, -1), weights["out"])
        normed = Norm.apply(x, weights["second"])
        gated = Gated.apply(F.linear(normed, weights["gate"]), F.linear(normed, weights["up"]))
        x = x + F.linear(gated, weights["down"])
    model = ModelSpec("layer", 1e6, 1e6, 1, hidden, heads, kv_heads, dim, 1000, ffn_dim=ffn)
    assert sum(kept.values()) / tokens == layer_activation_bytes(model)


@pytest.mark.parametrize(
    ("model", "replica", "data", "megabytes"),
    [
        # One token leaves 2 x (4 x 1000 + 4000 + 3 x 4000) = 40 KB in a layer, 1,000 on two ranks 20 MB.
        # First stage: 2 layers, 2 micro-batches of 20 MB each, 20 MB more; 42 million parameters, 6 bytes each over 2
        # ranks and 12 over 8. The last holds one micro-batch and 30 MB of logits.
        (ROUND, Replica(2, 2, 1, 1, False, 1000), 4, 100 + 126 + 63),
        # Of each layer the input, 1 MB; of one layer all of it, and its gradients.
        (ROUND, Replica(2, 2, 1, 1, True, 1000), 4, 44 + 126 + 63),
        # All layers and both embeddings; logits of 10,000 x 6 bytes a token are more than a layer.
        (ROUND, Replica(1, 1, 1, 1, False, 1000), 1, 4 * 40 + 60 + 84 * 18),
        # A sequence on two ranks: half the activations, and the optimizer over both.
        (ROUND, Replica(1, 1, 2, 1, False, 1000), 1, 4 * 20 + 30 + 84 * (6 + 6)),
        # 4 layers of 2 x (4 x 1000 + 4000 + 2 x (2000 + 1500)) = 30 KB a token; 36 million dense parameters, 48 million
        # of experts over 4 ranks; the optimizer over 2 x 2.
        (EXPERTS, Replica(2, 1, 1, 4, False, 1000), 2, 4 * 15 + 30 + 6 * (18 + 12) + 12 * 84 / 4),
    ],
)
def test_memory_is_what_it_is_by_hand(model: ModelSpec, replica: Replica, data: int, megabytes: float) -> None:
    assert memory_bytes(model, replica, data) == pytest.approx(megabytes * 1e6)


def test_stages_have_whole_blocks_and_the_last_fewer_as_its_logits_weigh_some() -> None:
    """Logits weigh 1.6 layers of the 32B model and 5.6 of the mixture of experts; two attentions are one block."""
    for name, pipeline, first, last in (
        ("qwen2.5-32b", 1, 64, 64),
        ("qwen2.5-32b", 2, 33, 31),
        ("qwen2.5-32b", 3, 22, 20),
        ("qwen2.5-32b", 64, 1, 1),
        ("qwen3-30b-a3b", 8, 7, 1),
        ("longcat-flash", 4, 14, 14),
    ):
        parts = stages(MODELS[name], pipeline)
        assert (parts[0].layers, parts[-1].layers) == (first, last), (name, pipeline)
        assert [part.logits for part in parts] == ([True] if pipeline == 1 else [False, True])


@given(
    model=st.sampled_from([ROUND, EXPERTS, *MODELS.values()]),
    pipeline=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    recompute=st.booleans(),
    tokens=st.integers(1, 100_000),
    data=st.integers(1, 64),
)
def test_memory_falls_with_everything_that_divides_it(
    model: ModelSpec, pipeline: int, context: int, recompute: bool, tokens: int, data: int
) -> None:
    replica = Replica(1, pipeline, context, 1, recompute, tokens)
    whole = memory_bytes(model, replica, data)
    assert memory_bytes(model, replica, data + 1) < whole
    for smaller in ({"tensor": 2}, {"context": 2 * context}):
        assert memory_bytes(model, replace(replica, **smaller), data) < whole  # type: ignore[arg-type]
    assert memory_bytes(model, replace(replica, micro_batch_tokens=tokens + 1), data) > whole
    if model.experts:
        assert memory_bytes(model, replace(replica, expert=2), data) < whole


def test_laminars_layouts_fit_and_much_smaller_ones_do_not() -> None:
    """Paper 001, appendix A.3: AReaL's tensor and pipeline ranks there; responses of 16K tokens, prompts of 2K."""
    for name, (tensor, pipeline, gpus) in LAMINAR.items():
        replica = Replica(tensor, pipeline, 1, 1, True, 18 * 1024)
        assert memory_bytes(MODELS[name], replica, gpus // replica.gpus) < limit_bytes(H800), name
    for name, tensor, pipeline, data in (
        ("qwen2.5-72b", 4, 1, 2),
        ("qwen2.5-72b", 8, 2, 1),
        ("qwen2.5-32b", 4, 1, 2),
        ("qwen2.5-7b", 1, 1, 1),
    ):
        replica = Replica(tensor, pipeline, 1, 1, True, 18 * 1024)
        assert memory_bytes(MODELS[name], replica, data) > limit_bytes(H800), name


# Pace.

BATCH = Batch(tokens=64_000.0, longest_tokens=1000, context_tokens=0.0)
FREE = Hardware("free", 80e9, 1e12, 1e12, math.inf, math.inf)  # sending takes no time
COMPUTE = FREE.flops * PREFILL_EFFICIENCY


def step_s(replica: Replica, data: float, hardware: Hardware = FREE, model: ModelSpec = ROUND) -> float:
    return pace(model, hardware, BATCH, replica).step_s(data)


def test_a_step_computes_every_token_four_times_and_five_where_it_is_recomputed() -> None:
    """Two operations a weight and pass, 64 million in layers and 10 million for the logits."""
    once_s = UPDATES * 64_000 * 2 * 74e6 / COMPUTE
    kept, recomputed = (Replica(2, 1, 1, 1, recompute, 8000) for recompute in (False, True))
    assert step_s(kept, 2) == pytest.approx(4 * once_s / 4)
    assert step_s(recomputed, 2) == pytest.approx(5 * once_s / 4)


def test_a_pipeline_waits_for_as_many_micro_batches_as_it_has_stages_but_one() -> None:
    """Two stages of two layers and the last with the logits: 32 + 10 million weights; 8 micro-batches on each."""
    assert step_s(Replica(1, 2, 1, 1, False, 4000), 2) == pytest.approx(
        UPDATES * (8 + 1) * 4000 * 4 * 2 * 42e6 / COMPUTE
    )


def test_attention_is_two_operations_for_every_value_of_every_token_of_the_context() -> None:
    """10 heads of 100 + 100 values, 4 layers."""
    near, far = (replace(BATCH, context_tokens=tokens) for tokens in (0.0, 500.0))
    replica = Replica(1, 1, 1, 1, False, 8000)
    longer_s = pace(ROUND, FREE, far, replica).step_s(1) - pace(ROUND, FREE, near, replica).step_s(1)
    assert longer_s == pytest.approx(UPDATES * 64_000 * 4 * 4 * 2 * 2000 * 500 / COMPUTE)


def test_no_replica_has_less_than_the_longest_response() -> None:
    replica = Replica(1, 1, 1, 1, False, 1000)
    assert step_s(replica, 64) == pytest.approx(step_s(replica, 1) / 64)
    assert step_s(replica, 128) == step_s(replica, 64)


def test_micro_batches_take_no_less_than_their_launches() -> None:
    one = replace(BATCH, tokens=64.0, longest_tokens=1)
    assert pace(ROUND, FREE, one, Replica(1, 1, 1, 1, False, 1)).step_s(1) == pytest.approx(
        UPDATES * 64 * 4 * 4 * 223e-6
    )


@pytest.mark.parametrize(
    ("model", "replica", "data", "link_bytes", "network_bytes"),
    [
        # 4 layers, each with 4 exchanges of 2 KB a token in 3 passes, of which a rank sends half to the other.
        (ROUND, Replica(2, 1, 1, 1, False, 1000), 1, 64_000 * 4 * 4 * 3 * 2000 / 2, 0),
        # Keys and values, 4 KB a token; backward twice.
        (ROUND, Replica(1, 1, 2, 1, False, 1000), 1, 64_000 * 4 * 4 * 4000 / 2 + 6 * 84e6 / 2, 0),
        # From stage to stage, forward, backward and for logprobs; two stages' 8 replicas are on two nodes.
        (ROUND, Replica(1, 2, 1, 1, False, 1000), 8, 6 * 42e6 * 7 / 8, 9 / 8 * 8000 * 3 * 2000),
        # Gradients and weights, within a node and across.
        (ROUND, Replica(1, 1, 1, 1, False, 1000), 8, 6 * 84e6 * 7 / 8, 0),
        (ROUND, Replica(1, 1, 1, 1, False, 1000), 16, 0, 6 * 84e6 * 15 / 16),
        # Two copies of 2 KB to experts and back, of which 3 in 4 to other ranks; experts on 2 times 4 of them.
        (EXPERTS, Replica(1, 1, 1, 4, False, 1000), 8,
         8000 * 4 * 3 * 2 * 2 * 2000 * 3 / 4 + 6 * (36e6 * 7 / 8 + 12e6 / 2), 0),
    ],
)  # fmt: skip
def test_what_is_sent_is_what_it_is_by_hand(
    model: ModelSpec, replica: Replica, data: int, link_bytes: float, network_bytes: float
) -> None:
    slow = replace(FREE, link_bytes_per_s=1e9, network_bytes_per_s=1e8)
    longer_s = step_s(replica, data, slow, model) - step_s(replica, data, FREE, model)
    assert longer_s == pytest.approx(UPDATES * (link_bytes / 1e9 + network_bytes / 1e8) / LINK_EFFICIENCY)


# The choice.

TRIED = [("qwen2.5-7b", "h800"), ("qwen2.5-32b", "h800"), ("qwen2.5-72b", "h800"), ("qwen3-30b-a3b", "h20")]


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
    """Where sending takes no time, 4 accelerators are as fast as 4 copies as they are as 2 on two ranks."""
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
@pytest.mark.parametrize("multiple", [1, 4, 6])
def test_the_least_number_that_fits_is_the_first_of_all(name: str, hardware: str, multiple: int) -> None:
    found = trainers(name, hardware, multiple)
    first = next(gpus for gpus in range(multiple, 1000, multiple) if found.fits(gpus))
    assert found.least == first == found.numbers(first)[0]
    with pytest.raises(InvalidValue, match=rf"train_gpus = {first - multiple} .* as on {first}"):
        found.layout(first - multiple)


def test_the_fewest_accelerators_that_can_train() -> None:
    """The states alone are 18 bytes a parameter, 590 GB for the 32B and 1,309 GB for the 72B model; 71 GB are there."""
    found = {name: trainers(name, hardware, 1).least for name, hardware in TRIED[:3]}
    assert all(count * 71e9 > 18 * MODELS[name].parameters for name, count in found.items())
    assert found == {"qwen2.5-7b": 4, "qwen2.5-32b": 12, "qwen2.5-72b": 24}


def test_a_response_that_no_layout_holds_is_refused_with_the_longest_that_one_does() -> None:
    with pytest.raises(InvalidValue, match=r"^cap_tokens = 9000000 is not allowed: at most") as refused:
        trainers("qwen2.5-7b", cap_tokens=9_000_000)
    most = int(refused.value.allowed.split()[2].rstrip(":").replace(",", ""))
    assert trainers("qwen2.5-7b", cap_tokens=most).least > 0
    with pytest.raises(InvalidValue, match="cap_tokens"):
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
        ({"gpus": 12}, "gpus", "14: room for an engine of 2 and a trainer of 12"),
        ({"rollout_gpus": 1, "train_gpus": 8}, "rollout_gpus", "2: room for an engine of 2"),
        ({"rollout_gpus": 8, "train_gpus": 8}, "train_gpus", "12: room for a trainer of 12"),
        (
            {"gpus": 12, "training": replace(ANCHOR, multiple=8)},
            "gpus",
            "18: room for an engine of 2 and a trainer of 16",
        ),
    ):
        with pytest.raises(InvalidValue) as refused:
            make_plan(question(**changes))
        assert (refused.value.field, refused.value.value) == (field, changes[field])  # type: ignore[index]
        assert refused.value.allowed.startswith(f"at least {least}")
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
