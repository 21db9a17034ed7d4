"""Packs experts for the CPU kernel again after their weights were replaced in place.

vLLM packs unquantised experts when their kernel is first set up and copies later weights over the packed ones, so the
kernel reads raw weights as packed ones: tokens are wrong, without an error.
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "moe_experts"
_TOLERANCE: Final = 0.05  # relative: half precision stays well below it, weights in the wrong order exceed it
_WEIGHTS: Final = ("w13_weight", "w2_weight")


def _layers(model: torch.nn.Module) -> Iterator[tuple[Any, CPUUnquantizedExperts]]:
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            yield module, experts


def _repack(model: torch.nn.Module) -> None:
    for layer, experts in _layers(model):
        experts.process_weights_after_loading(layer)


@torch.inference_mode()
def _verify(runner: Any) -> None:
    """Writes known raw weights into one layer, repairs it, and compares one expert with plain PyTorch."""
    for layer, experts in _layers(runner.get_model()):
        kept = {name: getattr(layer, name).data.clone() for name in _WEIGHTS}
        intermediate = experts.moe_config.intermediate_size_per_partition
        if kept["w2_weight"].numel() != kept["w2_weight"].shape[0] * experts.moe_config.hidden_dim * intermediate:
            raise PatchFailed(NAME, f"experts of intermediate size {intermediate} are padded: no reload in place")
        found, expected = _one_expert(layer, experts)
        for name, packed in kept.items():
            getattr(layer, name).data.copy_(packed)
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < _TOLERANCE:
            raise PatchFailed(NAME, f"an expert is off by {error:.1%} after a reload")
        return


def _one_expert(layer: Any, experts: CPUUnquantizedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the last expert's output for one token: by the kernel on re-packed weights, and by plain PyTorch."""
    generator = torch.Generator().manual_seed(1)
    for name in _WEIGHTS:
        weight = getattr(layer, name).data
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    gate_up, down = (getattr(layer, name).data[-1].clone() for name in _WEIGHTS)
    token = torch.randn(1, gate_up.shape[1], generator=generator).to(gate_up.dtype)
    gate, up = functional.linear(token, gate_up).chunk(2, dim=-1)
    expected = functional.linear(functional.silu(gate) * up, down)
    experts.process_weights_after_loading(layer)
    found = torch.zeros_like(expected)
    experts.apply(
        output=found,
        hidden_states=token,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=torch.ones(1, 1),
        topk_ids=torch.full((1, 1), layer.w13_weight.shape[0] - 1, dtype=torch.int32),
        activation=MoEActivation.SILU,
        global_num_experts=layer.w13_weight.shape[0],
        expert_map=None,
        a1q_scale=None,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    return found.float(), expected.float()


PATCH = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="on CPU vLLM packs experts once only, and reads reloaded ones as if they were packed",
    apply=nothing,
    verify=_verify,
    after_reload=_repack,
)
