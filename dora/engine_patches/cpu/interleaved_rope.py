"""Corrects rotary positions that vLLM's CPU kernel applies to one head only: those of interleaved pairs (DeepSeek's
models), and of heads that have an axis of their own (LFM2).

With vLLM's kernel the logprobs are wrong and depend on the other requests of the batch, without an error. This patch
makes such layers use vLLM's own arithmetic in PyTorch.
"""

from typing import Any, Final

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "interleaved_rope"
# absolute, for values about 1: half precision stays well below it, an unrotated pair exceeds it
_TOLERANCE: Final = 0.05

_kernel: Final = RotaryEmbedding.forward_cpu


def _forward_cpu(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> Any:
    is_fit = self.is_neox_style and query.dim() == 2
    return (_kernel if is_fit else RotaryEmbedding.forward_native)(self, positions, query, key)


def _apply() -> None:
    RotaryEmbedding.forward_cpu = _forward_cpu


@torch.inference_mode()
def _verify(runner: Any) -> None:
    """Rotates two heads that are slices of a wider array, as the models pass them."""
    for module in runner.get_model().modules():
        if isinstance(module, RotaryEmbedding):
            wide = torch.randn(3, 2, module.head_size + 8, generator=torch.Generator().manual_seed(1))
            heads = wide.to(module.cos_sin_cache.dtype)[..., 8:]
            positions = torch.arange(1, 4)
            expected, _ = module.forward_native(positions, heads.clone(), heads[:, :1].clone())
            found, _ = module(positions, heads.clone(), heads[:, :1].clone())
            error = float((found - expected).abs().max())
            if not error < _TOLERANCE:
                raise PatchFailed(NAME, f"positions turn a head by {error:g} too much or too little")
            return


PATCH = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="on CPU vLLM turns interleaved pairs, and heads with an axis of their own, of one head alone",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
