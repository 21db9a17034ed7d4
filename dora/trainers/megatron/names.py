"""Maps Megatron parameters to Hugging Face tensors, and describes how tensor parallelism cuts them.

Pure functions of names and tensors, without Megatron. Supports the names of Megatron's local layers and of Transformer
Engine's, which have norms inside the linear layers, and sequential and grouped experts.

    H hidden size, D size of a head, Q query heads, G key/value heads, I intermediate size, T tensor-parallel ranks

    linear_qkv.weight   ((Q + 2G) D, H): for each key/value head its query heads, its key, its value; cut in rows
    linear_fc1.weight   (2I, H): each rank has its I/T rows of gate, then those of up
    linear_fc2.weight   (H, I), linear_proj.weight (H, Q D): cut in columns

Source: megatron/core/transformer/attention.py (``get_query_key_value_tensors``), mlp.py, moe/experts.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from dora.errors import InvalidValue

Cut = Literal["whole", "rows", "columns", "gated", "qkv"]

_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_OUTER: Final[Mapping[str, tuple[str, Cut]]] = {
    "embedding.word_embeddings.weight": (_EMBEDDING, "rows"),
    "output_layer.weight": (_HEAD, "rows"),
    "decoder.final_layernorm.weight": ("model.norm.weight", "whole"),
}
_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj")
# Within a layer: the checkpoint names, and the cut.
_IN_LAYER: Final[Mapping[str, tuple[tuple[str, ...], Cut]]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{name}.weight" for name in _ATTENTION), "qkv"),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{name}.bias" for name in _ATTENTION), "qkv"),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), "whole"),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), "whole"),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), "whole"),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), "columns"),
    "mlp.router.weight": (("mlp.gate.weight",), "whole"),
}
_SEQUENTIAL: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_GROUPED: Final = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a model that determine its tensors' layout."""

    query_heads: int
    kv_heads: int
    vocab_size: int
    tied: bool  # the head is the embedding


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one parameter: its tensors' names in a checkpoint, in joining order, and its cut."""

    names: tuple[str, ...]
    cut: Cut
    of_expert: bool = False
    published: bool = True  # False: a copy of another parameter


def rule_of(name: str, first_layer: int, first_expert: int, shape: Shape) -> Rule:
    """Returns the rule of parameter ``name`` of a GPTModel, on a rank with this first layer and expert of the model.

    Raises InvalidValue for a parameter that no known checkpoint has.
    """
    if name in _OUTER:
        checkpoint_name, cut = _OUTER[name]
        if checkpoint_name == _HEAD and shape.tied:
            return Rule((_EMBEDDING,), cut, published=False)
        return Rule((checkpoint_name,), cut)
    found = _LAYER.fullmatch(name)
    if found is None:
        raise InvalidValue("Megatron parameter", name, "in a decoder layer, the embedding, the head or the final norm")
    layer, within = first_layer + int(found[1]), found[2]
    prefix = f"model.layers.{layer}."
    if within in _IN_LAYER:
        names, cut = _IN_LAYER[within]
        return Rule(tuple(prefix + each for each in names), cut)
    if sequential := _SEQUENTIAL.fullmatch(within):
        expert, linear = int(sequential[1]), sequential[2]
    elif grouped := _GROUPED.fullmatch(within):
        linear, expert = grouped[1], int(grouped[2])
    else:
        raise InvalidValue("Megatron parameter", name, f"one of {', '.join(_IN_LAYER)}, or in an expert's two layers")
    prefix += f"mlp.experts.{first_expert + expert}."
    if linear == "1":
        return Rule((prefix + "gate_proj.weight", prefix + "up_proj.weight"), "gated", of_expert=True)
    return Rule((prefix + "down_proj.weight",), "columns", of_expert=True)


def joined(rule: Rule, shards: Sequence[torch.Tensor], shape: Shape) -> dict[str, torch.Tensor]:
    """Returns the checkpoint's tensors, from the shards of a parameter on all tensor-parallel ranks, in rank order."""
    if rule.cut == "whole":
        return {rule.names[0]: shards[0]}
    if rule.cut == "columns":
        return {rule.names[0]: torch.cat(tuple(shards), dim=1)}
    if rule.cut == "gated":
        halves = [shard.chunk(2) for shard in shards]
        return {name: torch.cat([half[index] for half in halves]) for index, name in enumerate(rule.names)}
    whole = torch.cat(tuple(shards))
    if rule.cut == "rows":
        return {rule.names[0]: whole[: shape.vocab_size]}
    rest = whole.shape[1:]
    share = shape.query_heads // shape.kv_heads
    by_head = whole.unflatten(0, (shape.kv_heads, share + 2, -1))
    parts = by_head.split((share, 1, 1), dim=1)
    return {name: part.reshape(-1, *rest) for name, part in zip(rule.names, parts, strict=True)}


def cut(rule: Rule, tensors: Mapping[str, torch.Tensor], rank: int, ranks: int, shape: Shape) -> torch.Tensor:
    """Inverts :func:`joined`: returns the shard of rank ``rank`` of ``ranks`` of the parameter with these ``tensors``.
    Rows beyond the vocabulary are zero.
    """
    found = [tensors[name] for name in rule.names]
    if rule.cut == "whole":
        return found[0]
    if rule.cut == "columns":
        return found[0].chunk(ranks, dim=1)[rank]
    if rule.cut == "gated":
        return torch.cat([each.chunk(ranks)[rank] for each in found])
    if rule.cut == "rows":
        rows = padded_vocabulary(shape.vocab_size, ranks) // ranks
        own = found[0][rank * rows : (rank + 1) * rows]
        return torch.cat([own, own.new_zeros(rows - len(own), *own.shape[1:])])
    share = shape.query_heads // shape.kv_heads
    sizes = (share, 1, 1)
    by_head = [each.unflatten(0, (shape.kv_heads, size, -1)) for each, size in zip(found, sizes, strict=True)]
    return torch.cat(by_head, dim=1).flatten(0, 2).chunk(ranks)[rank]


def padded_vocabulary(vocab_size: int, ranks: int) -> int:
    """Returns the rows of the embedding and the head, padded to be equal on each of ``ranks``."""
    return -(-vocab_size // ranks) * ranks
