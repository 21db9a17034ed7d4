"""Projections in int8, as computed by a rollout engine with ``workers.quantisation = "int8"``. Loads torch.

The scheme is W8A8 of compressed-tensors: weights have one scale per output channel, computed for each version;
activations have one per token; both are symmetric, rounded to nearest, with the largest value at 127. Experts,
embeddings, heads, norms, routers, and the tensors that MLA splits are not quantised. Source:
vllm/model_executor/layers/quantization/compressed_tensors, compressed_tensors_w8a8_int8.py.
"""

import re
from collections.abc import Callable
from typing import Final

import torch

_MAX: Final = 127
_QUANTISED: Final = re.compile(r"^(?!.*(?:experts|kv_b_proj|_mqa)).*_proj\.weight$")


def is_quantised(name: str) -> bool:
    return _QUANTISED.match(name) is not None


def int8_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix (rows, columns) and its scales (rows, 1): ``values * scales`` approximates ``tensor``."""
    whole = tensor.float()
    scales = (whole.abs().amax(dim=1, keepdim=True) / _MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (whole / scales).round_().clamp_(-_MAX, _MAX).to(torch.int8), scales


def quantise(module: torch.nn.Module) -> int:
    """Makes the projections of transformers' ``module`` compute as the engine's do. Returns their number."""
    found = 0
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Linear) and is_quantised(f"{name}.weight"):
            part.forward = _forward(part)
            found += 1
    return found


def _forward(part: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    values, scales = int8_of(part.weight.detach())
    weights, bias = values.float(), part.bias

    def forward(incoming: torch.Tensor) -> torch.Tensor:
        tokens, of_token = int8_of(incoming.reshape(-1, incoming.shape[-1]))
        found = (tokens.float() @ weights.T) * of_token * scales.T
        found = found if bias is None else found + bias
        return found.reshape(*incoming.shape[:-1], -1).to(incoming.dtype)

    return forward
