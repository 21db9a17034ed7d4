"""Megatron's parameters and the checkpoint's tensors: cut for any number of ranks, and joined again; dealing rows."""

from collections.abc import Sequence

import pytest
import torch

from dora.errors import InvalidValue
from dora.trainers.megatron.dealing import batches_from_bytes, batches_to_bytes, deal
from dora.trainers.megatron.layout import Layout
from dora.trainers.megatron.names import Shape, cut, joined, padded_vocabulary, rule_of
from dora.trainers.objectives.batch import Row
from tests.refusals import refused
from tests.unit.test_batches import GROUPS

SHAPE = Shape(query_heads=4, kv_heads=2, vocab_size=7, tied=False)
SIZE, HIDDEN, INNER = 3, 5, 8
CHECKPOINT = {
    "self_attn.q_proj.weight": (4 * SIZE, HIDDEN),
    "self_attn.k_proj.weight": (2 * SIZE, HIDDEN),
    "self_attn.v_proj.weight": (2 * SIZE, HIDDEN),
    "self_attn.q_proj.bias": (4 * SIZE,),
    "self_attn.k_proj.bias": (2 * SIZE,),
    "self_attn.v_proj.bias": (2 * SIZE,),
    "self_attn.o_proj.weight": (HIDDEN, 4 * SIZE),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
}


def tensors(names: Sequence[str]) -> dict[str, torch.Tensor]:
    """As a checkpoint of SHAPE has them, with a different number for each element."""
    shapes = {**{f"model.layers.5.{name}": shape for name, shape in CHECKPOINT.items()}, "lm_head.weight": (7, HIDDEN)}
    return {name: torch.arange(1.0, 1.0 + torch.Size(shapes[name]).numel()).reshape(shapes[name]) for name in names}


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.2.self_attention.linear_qkv.bias",
        "decoder.layers.2.self_attention.linear_proj.weight",
        "decoder.layers.2.mlp.linear_fc1.weight",
        "decoder.layers.2.mlp.linear_fc2.weight",
        "decoder.layers.2.input_layernorm.weight",
        "output_layer.weight",
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_cut_is_joined_again(name: str, ranks: int) -> None:
    rule = rule_of(name, first_layer=3, first_expert=0, shape=SHAPE)
    found = tensors(rule.names)
    shards = [cut(rule, found, rank, ranks, SHAPE) for rank in range(ranks)]
    assert len({shard.shape for shard in shards}) == 1, "every rank has as much"
    again = joined(rule, shards, SHAPE)
    assert again.keys() == found.keys() and all(again[each].equal(found[each]) for each in found)


def test_heads_stand_together_in_a_rank() -> None:
    """By hand: of two key/value heads each rank has one, with its two query heads before it."""
    rule = rule_of("decoder.layers.0.self_attention.linear_qkv.bias", 5, 0, SHAPE)
    found = tensors(rule.names)
    second = cut(rule, found, 1, 2, SHAPE)
    query, key, value = (found[name] for name in rule.names)
    assert second.equal(torch.cat([query[2 * SIZE :], key[SIZE:], value[SIZE:]]))


def test_rows_beyond_the_vocabulary_are_zeros_and_are_not_published() -> None:
    rule = rule_of("output_layer.weight", 0, 0, SHAPE)
    assert padded_vocabulary(7, 4) == 8
    last = cut(rule, tensors(rule.names), 3, 4, SHAPE)
    assert last.shape == (2, HIDDEN) and not last[1].any() and last[0].any()


def test_names_of_both_kinds_of_layers() -> None:
    def names(name: str) -> tuple[str, ...]:
        return rule_of(name, first_layer=4, first_expert=6, shape=SHAPE).names

    expert = "model.layers.5.mlp.experts.8."
    for sequential, grouped in (
        ("mlp.experts.local_experts.2.linear_fc1.weight", "mlp.experts.linear_fc1.weight2"),
        ("mlp.experts.local_experts.2.linear_fc2.weight", "mlp.experts.linear_fc2.weight2"),
    ):
        of_both = names(f"decoder.layers.1.{sequential}")
        assert of_both == names(f"decoder.layers.1.{grouped}") and all(each.startswith(expert) for each in of_both)
    local, fused = "decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert names(local) == names(fused) == ("model.layers.5.post_attention_layernorm.weight",)
    tied = Shape(4, 2, 7, tied=True)
    head = rule_of("output_layer.weight", 0, 0, tied)
    assert not head.published and head.names == ("model.embed_tokens.weight",)
    with refused(InvalidValue, field="Megatron parameter", value="mtp.layers.0.weight"):
        names("mtp.layers.0.weight")
    with refused(
        InvalidValue, field="Megatron parameter", value="decoder.layers.1.mlp.shared_experts.linear_fc1.weight"
    ):
        names("decoder.layers.1.mlp.shared_experts.linear_fc1.weight")


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("tokens_max", [8, 24, 1000])
def test_each_shard_gets_as_many_micro_batches_and_each_row_counts_once(shards: int, tokens_max: int) -> None:
    rows = [Row(each, 1.0) for group in GROUPS for each in group.trajectories]
    dealt = deal(rows, shards, tokens_max)
    assert len(dealt) == shards and len({len(batches) for batches in dealt}) == 1
    counting = [row for batches in dealt for batch in batches for row in batch if row.advantage]
    assert sorted(row.trajectory.trajectory_id for row in counting) == sorted(r.trajectory.trajectory_id for r in rows)
    fillers = [row for batches in dealt for batch in batches for row in batch if not row.advantage]
    assert not any(row.trajectory.loss_mask.any() for row in fillers) and len(fillers) < shards
    for batches in dealt:
        again = batches_from_bytes(batches_to_bytes(batches))
        assert [[row.advantage for row in rows] for rows in again] == [[row.advantage for row in b] for b in batches]
        assert again[0][0].trajectory.logprobs.tolist() == batches[0][0].trajectory.logprobs.tolist()


def test_a_layout_has_to_fit_the_ranks() -> None:
    Layout(tp=2, pp=2, ep=4).check(16)
    with refused(InvalidValue, field="--tp * --pp * --cp", value=3, names=("4",)):
        Layout(tp=3).check(4)
    with refused(InvalidValue, field="--etp * --pp * --ep", value=8):
        Layout(ep=8).check(4)
    with refused(InvalidValue, field="--cp", value=0):
        Layout(cp=0)
