"""Makes a head that is tied to the embedding use weights that were replaced in place.

On CPU vLLM packs a linear layer's weights into a kernel when they are loaded. A reload re-packs a layer only if weights
of its own arrive. A tied head has none, so it would keep the previous version: wrong logprobs, without an error. This
patch packs every vocabulary layer again after a reload.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "tied_head"
_TOLERANCE: Final = 0.05  # relative: half precision stays well below it, a stale row is off by 1


def _packed_layers(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            yield module


def _repack(model: torch.nn.Module) -> None:
    for layer in _packed_layers(model):
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


@torch.inference_mode()
def _verify(runner: Any) -> None:
    """Changes one row of each layer, repairs the layer, and compares its result with the expected one."""
    model = runner.get_model()
    for layer in _packed_layers(model):
        row = layer.weight.data[0]
        kept = row.clone()
        row.fill_(1.0)
        _repack(model)
        probe = torch.ones(1, row.numel(), dtype=row.dtype)
        found = float(layer.cpu_linear(probe, layer.weight, None)[0, 0])
        row.copy_(kept)
        if abs(found - row.numel()) > _TOLERANCE * row.numel():
            raise PatchFailed(NAME, f"{type(layer).__name__} computes {found:g} where {row.numel()} is right")
    _repack(model)


PATCH = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="on CPU a tied head keeps the old version's packed weights after a reload",
    apply=nothing,
    verify=_verify,
    after_reload=_repack,
)
