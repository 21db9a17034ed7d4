"""Projections in low precision, as computed by a rollout engine with ``workers.quantisation``. Loads torch.

The scheme is W8A8 of compressed-tensors: weights have one scale per output channel, computed for each version;
activations have one per token; both are symmetric, rounded to nearest, with the largest value at 127 (int8) or 448
(fp8, which is E4M3). Experts, embeddings, heads, norms, routers, and the tensors that MLA splits are not quantised.
Source: vllm/model_executor/layers/quantization/compressed_tensors, compressed_tensors_w8a8_int8.py, _fp8.py.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

import torch

_INT8_MAX: Final = 127
_FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = torch.finfo(_FP8).max
_QUANTISED: Final = re.compile(r"^(?!.*(?:experts|kv_b_proj|_mqa)).*_proj\.weight$")

Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def is_quantised(name: str) -> bool:
    return _QUANTISED.match(name) is not None


def int8_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a matrix (rows, columns) and its scales (rows, 1): ``values * scales`` approximates ``tensor``."""
    scaled, scales = _scaled(tensor, _INT8_MAX)
    return scaled.round_().to(torch.int8), scales


def fp8_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same in fp8."""
    scaled, scales = _scaled(tensor, _FP8_MAX)
    return scaled.to(_FP8), scales


QUANTISERS: Final[Mapping[str, Quantise]] = {"int8": int8_of, "fp8": fp8_of}


def _scaled(tensor: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    whole = tensor.float()
    scales = (whole.abs().amax(dim=1, keepdim=True) / most).clamp(min=torch.finfo(torch.float32).tiny)
    return (whole / scales).clamp_(-most, most), scales


def quantise(module: torch.nn.Module, kind: str) -> int:
    """Makes the projections of transformers' ``module`` compute as the engine's do. ``kind`` is of ``QUANTISERS``.

    Returns their number.
    """
    found = 0
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Linear) and is_quantised(f"{name}.weight"):
            part.forward = _forward(part, QUANTISERS[kind])
            found += 1
    return found


def _forward(part: torch.nn.Linear, quantised: Quantise) -> Callable[[torch.Tensor], torch.Tensor]:
    values, scales = quantised(part.weight.detach())
    weights, bias = values.float(), part.bias

    def forward(incoming: torch.Tensor) -> torch.Tensor:
        tokens, of_token = quantised(incoming.reshape(-1, incoming.shape[-1]))
        found = (tokens.float() @ weights.T) * of_token * scales.T
        found = found if bias is None else found + bias
        return found.reshape(*incoming.shape[:-1], -1).to(incoming.dtype)

    return forward
