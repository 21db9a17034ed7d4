"""Tensors of a checkpoint that change no logprob: the configuration determines them, or every loader skips them.

A version may have them or not, whatever the model folder has. Sources: vLLM, model_executor/models/utils.py,
``REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER``, and the mappers in gpt2.py, gpt_j.py, qwen3_next.py and qwen3_5.py.
"""

from collections.abc import Callable, Mapping
from typing import Final

# Ends of names, and whether a tensor of these dimensions is the buffer. A trained tensor with such a name has others.
_BUFFERS: Final[tuple[tuple[str, Callable[[tuple[int, ...]], bool]], ...]] = (
    (".rotary_emb.inv_freq", lambda shape: len(shape) == 1),
    (".rotary_pos_emb.inv_freq", lambda shape: len(shape) == 1),
    (".rotary_emb.cos_cached", lambda shape: len(shape) in (2, 4)),
    (".rotary_emb.sin_cached", lambda shape: len(shape) in (2, 4)),
    (".attn.bias", lambda shape: len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]),  # a causal mask
    (".attention.bias", lambda shape: len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]),
    (".attn.masked_bias", lambda shape: shape in ((), (1,))),
    (".attention.masked_bias", lambda shape: shape in ((), (1,))),
)
_PREDICTS_AHEAD: Final = ("qwen3_next", "qwen3_5")  # kinds of models whose loaders skip the tensors under mtp.


def is_derived(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the configuration determines the tensor."""
    return any(f".{name}".endswith(end) and fits(shape) for end, fits in _BUFFERS)


def is_skipped(name: str, config: Mapping[str, object]) -> bool:
    """Whether the model's loaders skip the tensor: a layer that only speculative decoding uses."""
    return name.startswith("mtp.") and str(config.get("model_type", "")).startswith(_PREDICTS_AHEAD)
