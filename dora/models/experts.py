"""The number of experts of a mixture and its layers with experts, from the differing configs of model families."""

from collections.abc import Mapping, Sequence
from typing import Any

from dora.data.types import RoutingShape
from dora.errors import InvalidValue
from dora.models.text_part import text_part

# Experts per layer, and experts per token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOKEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")


def experts_of(config: Mapping[str, Any], source: str) -> tuple[int, int] | None:
    """Returns the experts per layer and per token of a mixture of experts, or None for other models.

    Reads config.json or its ``text_config``. Raises InvalidValue, naming the ``source``, if only one of the two is
    given.
    """
    fields = {**config, **text_part(config)}
    total, chosen = (_first_number(fields, names) for names in (_EXPERTS, _TOKEN_EXPERTS))
    if total < 2:
        return None
    if not 1 <= chosen <= total:
        raise InvalidValue(f"{source}: {_TOKEN_EXPERTS[0]}", chosen, f"1 to the {total} experts of a layer")
    return total, chosen


def routing_of(config: Mapping[str, Any], source: str) -> RoutingShape | None:
    """Returns the routing of one token, or None for a model without experts. Raises as :func:`experts_of`.

    Layers without experts are recognised in the configs of Qwen-MoE, DeepSeek, GLM and Llama 4. For other families all
    layers count as having experts; an engine compares that with its own layers.
    """
    counts = experts_of(config, source)
    if counts is None:
        return None
    fields = {**config, **text_part(config)}
    layers = sum(_has_experts(fields, layer) for layer in range(_first_number(fields, ("num_hidden_layers",))))
    return RoutingShape(layers, counts[1], counts[0])


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """The rules come from transformers, models/qwen3_moe, deepseek_v2, glm4_moe and llama4, ``modeling_*``."""
    named = config.get("moe_layers")  # Llama 4
    if isinstance(named, list):
        return layer in named
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(frequency[layer]) if layer < len(frequency) else False
    every = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % every == 0
        and layer >= (config.get("first_k_dense_replace") or 0)
        and layer % (frequency or 1) == 0
    )


def _first_number(config: Mapping[str, Any], names: Sequence[str]) -> int:
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
