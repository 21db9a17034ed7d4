"""Computes gated delta nets in single precision on a CPU, where vLLM's kernels take bfloat16 alone.

The arithmetic is transformers' own, in PyTorch. Each request is computed by itself, so its result does not depend on
the other requests of a batch.
"""

from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.nn.functional import softplus
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType

from dora.engine_patches.cpu.elementwise import evenly
from dora.engine_patches.patch import Patch, PatchFailed, nothing

NAME: Final = "delta_net"

_kernels: Final = gdn_attention.ops
_core: Final = gdn_attention.cpu_gdn_attention_core
_window: Final = gdn_attention._causal_conv1d_fwd_cpu
_next_window: Final = gdn_attention._causal_conv1d_update_cpu


def _attention(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    context, name = get_forward_context(), gdn_attention._resolve_layer_name(layer_name)
    if mixed_qkv.dtype != torch.float32 or context.attn_metadata is None:
        _core(mixed_qkv, b, a, core_attn_out, layer_name)
        return
    layer, metadata = context.no_compile_layers[name], context.attn_metadata[name]
    if metadata.num_actual_tokens:
        gdn_attention._cpu_gdn_attention_nonspec(layer, metadata, mixed_qkv, b, a, core_attn_out)


def _convolve(**given: Any) -> Any:
    """The convolution of a prefill. On CPUs with bfloat16 instructions vLLM calls a kernel that has no other type."""
    if given["x"].dtype != torch.float32:
        return _window(**given)
    return gdn_attention.causal_conv1d_torch(**_in_torch(given))


def _convolve_next(**given: Any) -> Any:
    if given["x"].dtype != torch.float32:
        return _next_window(**given)
    named = _in_torch(given)
    return gdn_attention.causal_conv1d_update_cpu(conv_state=named.pop("conv_states"), **named)


def _in_torch(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's implementation in PyTorch. Weights of single precision are not packed."""
    named = {name: value for name, value in given.items() if name not in ("silu_activation", "is_weight_packed")}
    named["weight"] = named["weight"].flatten(1)
    return {**named, "activation": "silu" if given["silu_activation"] else None}


def _gates(A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> Any:
    if a.dtype != torch.float32:
        return _kernels.fused_gdn_gating_cpu(A_log=A_log, a=a, b=b, dt_bias=dt_bias)
    grown = evenly(softplus, a + dt_bias)
    return (-A_log.float().exp() * grown).unsqueeze(0), evenly(torch.sigmoid, b).unsqueeze(0)


def _prefill(**given: Any) -> Any:
    if given["query"].dtype != torch.float32:
        return _kernels.chunk_gated_delta_rule_cpu(**given)
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    parts, states, ends = [], given["initial_state"], given["cu_seqlens"].tolist()
    for at, slot in enumerate(given["initial_state_indices"].tolist()):
        part = slice(ends[at], ends[at + 1])
        parts.append(_rule(torch_chunk_gated_delta_rule, given, part, states, slot))
    return torch.cat(parts, dim=1), None


def _decode(**given: Any) -> Any:
    if given["q"].dtype != torch.float32:
        return _kernels.fused_sigmoid_gating_delta_rule_update_cpu(**given)
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    g, beta = _gates(given["A_log"], given["a"], given["b"], given["dt_bias"])
    named = {"query": given["q"], "key": given["k"], "value": given["v"], "g": g, "beta": beta}
    parts = [
        _rule(torch_recurrent_gated_delta_rule, named, slice(at, at + 1), given["initial_state_source"], slot)
        for at, slot in enumerate(given["initial_state_indices"].tolist())
    ]
    return torch.cat(parts, dim=1).transpose(0, 1)


def _rule(rule: Any, given: Any, part: slice, states: torch.Tensor, slot: int) -> torch.Tensor:
    """Computes tokens of one request, and replaces its state."""
    times = given["value"].shape[2] // given["query"].shape[2]
    query, key = (given[name][:, part].repeat_interleave(times, dim=2) for name in ("query", "key"))
    value, g, beta = (given[name][:, part] for name in ("value", "g", "beta"))
    state = states[slot : slot + 1]
    found, after = rule(
        query, key, value, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    state.copy_(after)
    return found


def _apply() -> None:
    gdn_attention.cpu_gdn_attention_core = _attention
    gdn_attention._causal_conv1d_fwd_cpu = _convolve
    gdn_attention._causal_conv1d_update_cpu = _convolve_next
    own = {
        "fused_gdn_gating_cpu": _gates,
        "chunk_gated_delta_rule_cpu": _prefill,
        "fused_sigmoid_gating_delta_rule_update_cpu": _decode,
    }
    gdn_attention.ops = SimpleNamespace(**{**vars(_kernels), **own})


def _verify(_runner: Any) -> None:
    if gdn_attention.cpu_gdn_attention_core is not _attention or gdn_attention.ops.chunk_gated_delta_rule_cpu is not (
        _prefill
    ):
        raise PatchFailed(NAME, "vLLM's kernel for bfloat16 is in place")


PATCH = Patch(
    name=NAME,
    vllm_range=">=0.32,<0.33",
    reason="on CPU vLLM's gated delta nets take bfloat16 alone",
    apply=_apply,
    verify=_verify,
    after_reload=nothing,
)
