"""The division of a model among a trainer's accelerators, and the share of each."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dora.data.hardware import HARDWARE
from dora.lab.planning.layout import Replica, footprints, layer_activation_bytes, limit_bytes, stages
from dora.lab.planning.models import MODELS, ModelSpec

H800 = HARDWARE["h800"]
# 4 layers of 16 million parameters, and 10 million for each of the embeddings.
ROUND = ModelSpec("round", 84e6, 84e6, 4, 1000, 10, 10, 100, 10_000, ffn_dim=4000)
# The same with 8 experts of 1.5 million parameters in place of each dense network, of which a token uses 2.
EXPERTS = ModelSpec("experts", 84e6, 48e6, 4, 1000, 10, 10, 100, 10_000, experts=8, experts_per_token=2, expert_dim=500)
# Tensor and pipeline ranks, and the fewest accelerators of table 2.
LAMINAR = {"qwen2.5-7b": (2, 1, 8), "qwen2.5-32b": (4, 2, 16), "qwen2.5-72b": (4, 4, 32)}


def memory_bytes(model: ModelSpec, replica: Replica, data: int) -> float:
    return max(footprint.on(data) for footprint in footprints(model, replica))


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
