"""Projections in int8: what a rollout engine with ``workers.quantisation = "int8"`` makes of a model. Loads torch.

The form that compressed-tensors calls W8A8: weights with one scale for each output channel, made anew of each version;
activations with one for each token; both symmetric, rounded to nearest, the largest becomes 127. Experts, embeddings,
heads, norms, routers, and what MLA takes apart stay as they are.
Source: vllm/model_executor/layers/quantization/compressed_tensors, compressed_tensors_w8a8_int8.py.
"""

import re
from collections.abc import Callable
from typing import Final

import torch

_MAX: Final = 127
_QUANTISED: Final = re.compile(r"^(?!.*(?:experts|kv_b_proj|_mqa)).*_proj\.weight$")


def is_quantised(name: str) -> bool:
    """Whether this tensor of a checkpoint is quantised."""
    return _QUANTISED.match(name) is not None


def int8_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix (rows, columns) and its scales (rows, 1): the matrix is about ``values * scales``."""
    whole = tensor.float()
    scales = (whole.abs().amax(dim=1, keepdim=True) / _MAX).clamp(min=torch.finfo(torch.float32).tiny)
    return (whole / scales).round_().clamp_(-_MAX, _MAX).to(torch.int8), scales


def quantise(module: torch.nn.Module) -> int:
    """Lets the projections of a model compute as the engine's do. Returns how many there are.

    ``module``: of transformers, with the names of its checkpoint.
    """
    found = 0
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Linear) and is_quantised(f"{name}.weight"):
            part.forward = _forward(part)
            found += 1
    return found


def _forward(part: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    values, scales = int8_of(part.weight.detach())
    weights, bias = values.float(), part.bias

    def forward(given: torch.Tensor) -> torch.Tensor:
        tokens, of_token = int8_of(given.reshape(-1, given.shape[-1]))
        found = (tokens.float() @ weights.T) * of_token * scales.T
        found = found if bias is None else found + bias
        return found.reshape(*given.shape[:-1], -1).to(given.dtype)

    return forward
