"""vLLM's KV cache groups, as far as they decide which layers and blocks of a request move, and their interior.

A group is the layers that share one list of block ids. A layer with a sliding window keeps only its window's blocks:
the others are freed during decoding, and their ids become the null block's. A layer that keeps a state (gated delta
nets, Mamba, short convolutions) has one block that each step overwrites.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout, is_conv_state_dim_first
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from dora.kvtransfer.layout import blocks_for, first_block
from dora.kvtransfer.snapshot import STATE, UNKNOWN, Interior

# Instruction sets of vLLM's CPU attention (csrc/cpu/cpu_attn_*.hpp) whose blocks hold, for each KV head, the keys as
# (head size, tokens), then the values as (tokens, head size). AMX packs tokens in pairs.
_PLAIN_ISA: Final = ("vec", "vec16")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same block ids. They read the last ``window_tokens`` tokens, all for 0, or keep a state
    (``STATE``).
    """

    layers: tuple[str, ...]
    block_tokens: int
    window_tokens: int

    def kept(self, block_ids: Sequence[int], kv_tokens: int, first: int = 0) -> Sequence[int]:
        """Returns the request's blocks of this group that hold readable KV of its first ``kv_tokens`` tokens.

        ``first`` is the first block to return. With a window all of its blocks are returned.
        """
        if self.window_tokens:
            first = first_block(kv_tokens, self.block_tokens, self.window_tokens)
        return block_ids[first : blocks_for(kv_tokens, self.block_tokens)]


def groups_of(kv_cache_config: Any) -> tuple[LayerGroup, ...]:
    """Returns the engine's groups in vLLM's order, which is that of a request's lists of block ids."""
    firsts = [next(iter(_specs(group.kv_cache_spec).values())) for group in kv_cache_config.kv_cache_groups]
    return tuple(
        LayerGroup(
            tuple(group.layer_names),
            spec.block_size,
            _window_of(spec),
        )
        for group, spec in zip(kv_cache_config.kv_cache_groups, firsts, strict=True)
    )


def _window_of(spec: KVCacheSpec) -> int:
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return -int(spec.attention_chunk_size)
    return int(spec.sliding_window) if isinstance(spec, SlidingWindowSpec) else STATE * isinstance(spec, MambaSpec)


def whole_group(kv_cache_config: Any) -> tuple[int, LayerGroup | None]:
    """Returns number and group of the first group that keeps the KV of all tokens, or None."""
    for number, group in enumerate(groups_of(kv_cache_config)):
        specs = _specs(kv_cache_config.kv_cache_groups[number].kv_cache_spec).values()
        if all(type(spec) in (FullAttentionSpec, MLAAttentionSpec) for spec in specs):
            return number, group
    return -1, None


def unmovable(kv_cache_config: Any, block_tokens: int, tensor_parallel: int, kv_heads: int) -> str:
    """Returns why no request of this engine can move with its KV, or an empty text if each can.

    A request's state must consist of its tokens and, for each group, the blocks of all or of the last tokens, or one
    block with a state.
    """
    if kv_cache_config.has_mixed_precision_kv_cache:
        return "kv_cache_config.has_mixed_precision_kv_cache: each step empties the blocks that are taken for it"
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in _specs(group.kv_cache_spec).values():
            if type(spec) is MambaSpec:
                if spec.num_speculative_blocks or spec.mamba_cache_mode != "none":
                    return f"kv_cache_groups[{number}] keeps several states of a request ({spec.mamba_cache_mode})"
                if spec.tp_replicated or tensor_parallel > max(1, kv_heads):  # named as shards of KV heads are
                    return f"kv_cache_groups[{number}]: ranks share its state otherwise than {kv_heads} KV heads"
                continue
            # By their exact type: others derive from these, and keep other state or other blocks.
            if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec):
                return f"kv_cache_groups[{number}] is of {type(spec).__name__}"
            if spec.block_size != block_tokens:
                return f"kv_cache_groups[{number}].block_size = {spec.block_size}, other groups have {block_tokens}"
            if getattr(spec, "sliding_window", None) == 1:
                return f"kv_cache_groups[{number}].sliding_window = 1: nothing is kept"
            if getattr(spec, "extra_retained_tokens", 0):
                return f"kv_cache_groups[{number}].extra_retained_tokens = {spec.extra_retained_tokens}"
            if spec.tokens_per_state != 1:
                return f"kv_cache_groups[{number}].tokens_per_state = {spec.tokens_per_state}"
    return ""


def kind_of(attention: Any) -> tuple[str, str]:
    """Returns attention backend and instruction set, which determine the interior of a block. A layer with a state has
    the types and the order of its numbers instead of the instruction set.
    """
    if isinstance(attention, MambaBase):
        numbers = "-".join(str(dtype).removeprefix("torch.") for dtype in attention.get_state_dtype())
        return attention.get_attn_backend().get_name(), f"{get_conv_state_layout()}-{numbers}"
    return attention.attn_backend.get_name(), getattr(attention, "isa", "any")


def interior_of_state(attention: Any) -> Interior:
    """Returns the interior of a layer's state: its convolution's window, then the recurrent state, if there is one.

    A rank has some of the layer's heads. The window's channels consist of parts, such as queries, keys and values, each
    with the channels of those heads.
    """
    (window, *recurrent), dtypes = attention.get_state_shape(), attention.get_state_dtype()
    tokens, width = reversed(window) if is_conv_state_dim_first() else window
    kind, parts, heads = attention.mamba_type.name, [width], width  # each channel is a head
    if kind == "GDN_ATTN":
        parts, heads = [attention.key_dim, attention.key_dim, attention.value_dim], attention.num_k_heads
    elif kind == "MAMBA2":
        grouped = attention.groups_ssm_state_size
        parts, heads = [attention.intermediate_size, grouped, grouped], attention.n_groups
    if kind in ("GDN_ATTN", "MAMBA2"):
        parts, heads = [part // attention.tp_size for part in parts], heads // attention.tp_size
    if kind not in ("GDN_ATTN", "MAMBA2", "MAMBA1", "SHORT_CONV") or sum(parts) != width or len(recurrent) > 1:
        return UNKNOWN
    each = [part * dtypes[0].itemsize // heads for part in parts]
    by_channel = is_conv_state_dim_first()
    strips = [(1, size * tokens) for size in each] if by_channel else [(1, size) for size in each] * tokens
    strips += [(1, math.prod(shape) * dtypes[1].itemsize // heads) for shape in recurrent]
    return heads, tuple(strips)


def interior_of(spec: KVCacheSpec, attention: Any, tensor: Any) -> Interior:
    if isinstance(spec, MambaSpec):
        return interior_of_state(attention)
    return interior_in_memory(spec, *kind_of(attention)) if tensor.is_cpu else interior_on_device(spec, tensor)


def interior_in_memory(spec: KVCacheSpec, backend: str, isa: str) -> Interior:
    if type(spec) is MLAAttentionSpec and backend == "CPU_MLA" and spec.page_size_padded is None:
        return 1, ((1, spec.page_size_bytes // spec.block_size),)
    if (
        type(spec) in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec) and backend == "CPU_ATTN"
    ):  # heads lie in a row
        number_bytes = spec.dtype.itemsize
        strips = ((spec.head_size, number_bytes), (1, spec.head_size_v * number_bytes))
        return spec.num_kv_heads, strips if isa in _PLAIN_ISA else ()
    return UNKNOWN


def interior_on_device(spec: KVCacheSpec, tensor: Any) -> Interior:
    """Returns the known interior of a layer's block on a device. vLLM shows the layer as (blocks, heads, tokens,
    content of one): heads lie in a row if they are the outermost of a block's axes.
    """
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec) or tensor.dim() != 4:
        return UNKNOWN
    _, heads, tokens, content = tensor.shape
    _, of_head, of_token, of_number = tensor.stride()
    is_row = of_head >= tokens * of_token and of_token >= content * of_number
    return (heads, ()) if heads == spec.num_kv_heads and (is_row or heads == 1) else UNKNOWN


def layer_specs(kv_cache_config: Any) -> dict[str, KVCacheSpec]:
    """Returns the spec of each layer that has KV of its own."""
    found: dict[str, KVCacheSpec] = {}
    for group in kv_cache_config.kv_cache_groups:
        specs = _specs(group.kv_cache_spec)
        found.update({name: specs.get(name) or specs[""] for name in group.layer_names})
    return found


def _specs(spec: KVCacheSpec) -> Mapping[str, KVCacheSpec]:
    """Returns specs by layer; by "" if all layers have the same."""
    return spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {"": spec}
