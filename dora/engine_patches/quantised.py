"""Quantises projections to int8 or fp8 while a version is loaded, with one scale for each output channel.

The engine expects the form that compressed-tensors calls W8A8: symmetric weights of 8 bits, and activations quantised
token by token. A trainer publishes in floating point, so the worker quantises the tensors during the load
(``dora.models.quantisation``). The reported logprobs are the quantised model's own. Experts, embeddings, heads, norms
and routers are not quantised. Source: vllm/model_executor/layers/quantization/compressed_tensors,
compressed_tensors_w8a8_int8.py, _fp8.py.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from dora.models.quantisation import QUANTISERS, is_quantised

# Modules that are not quantised, by vLLM's names. MLA splits kv_b_proj, so it must be plain.
_PLAIN: Final = ("lm_head", "re:.*embed.*", "re:.*experts.*", "re:.*gate$", "re:.*kv_b_proj.*", "re:.*_mqa.*")
_TYPES: Final = {"int8": "int", "fp8": "float"}  # of compressed-tensors


def settings(quantisation: str) -> dict[str, Any] | None:
    """Returns the quantisation settings of the engine's config.json, or None if nothing is quantised."""
    if not quantisation:
        return None
    kind = {"num_bits": 8, "type": _TYPES[quantisation], "symmetric": True}
    weights = {**kind, "strategy": "channel", "dynamic": False}
    activations = {**kind, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{_TYPES[quantisation]}-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
        },
        "ignore": list(_PLAIN),
        "quantization_status": "compressed",
    }


def kind_of(config: Any) -> str:
    """Returns the quantisation of an engine whose ``config`` has these ``settings``, or an empty text. vLLM adds to
    them.
    """
    found = getattr(config, "quantization_config", None) or {}
    return next((kind for kind in _TYPES if (settings(kind) or {}).items() <= found.items()), "")


def quantised(tensors: Iterable[tuple[str, torch.Tensor]], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each projection quantised, followed by its scales, and every other tensor unchanged."""
    for name, tensor in tensors:
        if not is_quantised(name):
            yield name, tensor
            continue
        weights, scales = QUANTISERS[kind](tensor)
        yield name, weights
        yield f"{name}_scale", scales
