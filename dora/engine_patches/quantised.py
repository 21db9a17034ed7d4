"""Quantises projections to int8 while a version is loaded, with one scale for each output channel.

The engine expects the form that compressed-tensors calls W8A8: symmetric int8 weights, and activations quantised token
by token. A trainer publishes in floating point, so the worker quantises the tensors during the load (round to nearest;
the largest value of a channel becomes 127). The reported logprobs are the quantised model's own. Experts, embeddings,
heads, norms and routers are not quantised. Source: vllm/model_executor/layers/quantization/compressed_tensors,
compressed_tensors_w8a8_int8.py.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from dora.models.int8 import int8_of, is_quantised

# Modules that are not quantised, by vLLM's names. MLA splits kv_b_proj, so it must be plain.
_PLAIN: Final = ("lm_head", "re:.*embed.*", "re:.*experts.*", "re:.*gate$", "re:.*kv_b_proj.*", "re:.*_mqa.*")


def settings(quantisation: str) -> dict[str, Any] | None:
    """Returns the quantisation settings of the engine's config.json, or None if nothing is quantised."""
    if not quantisation:
        return None
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations},
        },
        "ignore": list(_PLAIN),
        "quantization_status": "compressed",
    }


def quantised(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each projection as int8, followed by its scales, and every other tensor unchanged."""
    for name, tensor in tensors:
        if not is_quantised(name):
            yield name, tensor
            continue
        weights, scales = int8_of(tensor)
        yield name, weights
        yield f"{name}_scale", scales
