"""Makes elementwise functions of a request independent of its neighbours in the batch.

PyTorch computes the last numbers of a tensor by another loop than those before them, with other last bits. Where a
token has few numbers, its neighbours decide which loop computes them: the gate of a shared expert (Qwen's mixtures) and
the time steps of Mamba-2.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.nn.functional import pad, softplus
from vllm.model_executor.layers.mamba.ops import ssd_combined
from vllm.model_executor.models import qwen2_moe

from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "elementwise"
_LANES: Final = 64  # a multiple of what any CPU's loop takes at once

_scan: Final = ssd_combined._mamba_chunk_scan_combined_fwd


def evenly(function: Callable[[torch.Tensor], torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
    """Applies an elementwise function to all numbers by the same loop."""
    flat = numbers.reshape(-1)
    return function(pad(flat, (0, -flat.numel() % _LANES)))[: flat.numel()].view(numbers.shape)


def _sigmoid(numbers: torch.Tensor) -> torch.Tensor:
    return evenly(torch.sigmoid, numbers)


def _even_scan(x: torch.Tensor, dt: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    bias, has_softplus = named.pop("dt_bias", None), named.pop("dt_softplus", False)
    steps = dt.float() if bias is None else dt.float() + bias.float()
    found: torch.Tensor = _scan(x, evenly(softplus, steps) if has_softplus else steps, *rest, **named)
    return found


def _apply() -> None:
    qwen2_moe.F = SimpleNamespace(**{**vars(torch.nn.functional), "sigmoid": _sigmoid})
    ssd_combined._mamba_chunk_scan_combined_fwd = _even_scan


def _verify(_runner: Any) -> None:
    gates = torch.linspace(-3, 3, 71)[:, None]
    alone = torch.cat([qwen2_moe.F.sigmoid(gate[None]) for gate in gates])
    if not torch.equal(qwen2_moe.F.sigmoid(gates), alone):
        raise PatchFailed(NAME, "a gate depends on the other tokens")
    if ssd_combined._mamba_chunk_scan_combined_fwd is not _even_scan:
        raise PatchFailed(NAME, "vLLM's scan of Mamba-2 is in place")


PATCH = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="on CPU the last bits of some layers depend on a token's place in the batch",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
