"""Random models of a few hundred thousand parameters, for tests and for ``make demo MODEL=tiny``.

They have the architectures of real families at the smallest size that the CPU engine supports: heads of 64, fp32.
``dense`` is Qwen3, ``moe`` Qwen3-MoE, and ``mla`` DeepSeek-V2 (latent attention; on CPU only with 512 latent values and
64 rotary ones). ``window`` is Gemma 3 (two layers that read the last 64 tokens, and one that reads all), and ``chunk``
Llama 4 (the two read a token's chunk of 64). In three kinds one layer reads all tokens and the others keep a state:
``hybrid`` is Qwen3-Next (gated delta nets, and experts), ``mamba`` Granite 4 (Mamba-2), and ``conv`` LFM2 (short
convolutions).
"""

import copy
from pathlib import Path
from typing import Any, Literal, get_args

from dora.errors import InvalidValue
from dora.models.prepared import prepare_once
from dora.models.tiny_vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, write_tokenizer

TinyKind = Literal["dense", "moe", "mla", "window", "chunk", "hybrid", "mamba", "conv"]
WINDOW_TOKENS = 64
RECIPE = 1  # increase it with any change of the written files
CONTEXT_TOKENS = 512

_COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "initializer_range": 0.1,  # ten times the usual: the distribution is far from flat, so errors are visible
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "dtype": "float32",
}
_DENSE = {**_COMMON, "tie_word_embeddings": True}
_MOE = {
    **_COMMON,
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

_MLA = {
    **_COMMON,
    "tie_word_embeddings": False,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}
_EXPERTS: dict[TinyKind, str] = {"moe": "num_experts", "mla": "n_routed_experts", "hybrid": "num_experts"}
_ANY_LAYERS = {name: value for name, value in _COMMON.items() if name != "use_sliding_window"}
_WINDOW = {
    **_ANY_LAYERS,
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW_TOKENS,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
    },
}
_CHUNK = {
    **_ANY_LAYERS,
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
    "no_rope_layers": [1, 1, 0],
    "attention_chunk_size": WINDOW_TOKENS,
    "interleave_moe_layer_step": 4,  # no layer has experts
    "intermediate_size_mlp": 256,
    "attn_temperature_tuning": False,
}
_HYBRID = {
    **{name: value for name, value in _MOE.items() if name != "use_sliding_window"},
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 64,
}
_MAMBA = {
    **_ANY_LAYERS,
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 256,
    "attention_multiplier": 0.125,
    "position_embedding_type": "rope",
    "mamba_expand": 1,
    "mamba_n_heads": 2,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_head": 64,
}
_CONV = {
    **_ANY_LAYERS,
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "conv_dim": 128,
    "block_dim": 128,
    "norm_eps": 1e-6,
}


def make_tiny(
    kind: TinyKind,
    folder: Path,
    seed: int = 0,
    kv_heads: int = 1,
    experts: tuple[int, int] | None = None,
    tied: bool | None = None,
) -> Path:
    """Writes a random model with its tokenizer to ``folder`` and returns it; a folder of the same recipe is reused.

    The folder contains config.json, generation_config.json, model.safetensors (fp32, checkpoint names), tokenizer.json
    and tokenizer_config.json. Each KV head has two attention heads; latent attention has no KV heads. ``experts`` are
    those of a mixture, per layer and per token. ``tied`` says whether the head is the embedding, by default as the kind
    does. The same seed gives the same bytes. torch's global random state is left untouched.

    Raises InvalidValue for an unknown kind, and for experts of a model without them; Conflict if ``folder`` has other
    contents.
    """
    if kind not in get_args(TinyKind):
        raise InvalidValue("kind", kind, " or ".join(get_args(TinyKind)))
    if experts is not None and kind not in _EXPERTS:
        raise InvalidValue("experts", experts, f"None for {kind}, which is no mixture")
    recipe: dict[str, str | int] = {"model": f"tiny-{kind}", "recipe": RECIPE, "seed": seed}
    if kv_heads > 1:
        recipe["kv_heads"] = kv_heads
    if experts is not None:
        recipe["experts"], recipe["experts_per_token"] = experts
    changed: dict[str, Any] = {}
    if experts is not None:
        changed = dict(zip((_EXPERTS[kind], "num_experts_per_tok"), experts, strict=True))
    if tied is not None:
        changed["tie_word_embeddings"], recipe["tied"] = tied, int(tied)
    return prepare_once(folder, recipe, lambda made: _write(kind, made, seed, kv_heads, changed))


def _write(kind: TinyKind, folder: Path, seed: int, kv_heads: int, changed: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import (
        AutoModelForCausalLM,
        DeepseekV2Config,
        Gemma3TextConfig,
        GenerationConfig,
        GraniteMoeHybridConfig,
        Lfm2Config,
        Llama4TextConfig,
        Qwen3Config,
        Qwen3MoeConfig,
        Qwen3NextConfig,
    )

    from dora.models.checkpoint_names import to_checkpoint

    made: dict[TinyKind, tuple[Any, dict[str, Any]]] = {
        "dense": (Qwen3Config, _DENSE),
        "moe": (Qwen3MoeConfig, _MOE),
        "mla": (DeepseekV2Config, _MLA),
        "window": (Gemma3TextConfig, _WINDOW),
        "chunk": (Llama4TextConfig, _CHUNK),
        "hybrid": (Qwen3NextConfig, _HYBRID),
        "mamba": (GraniteMoeHybridConfig, _MAMBA),
        "conv": (Lfm2Config, _CONV),
    }
    config_class, values = made[kind]
    heads = {"num_attention_heads": 2 * kv_heads, "num_key_value_heads": kv_heads}
    config = config_class(
        **copy.deepcopy({**heads, **values, **changed})
    )  # a config completes the maps that it is given
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=True).save_pretrained(
        folder
    )
    checkpoint = to_checkpoint(model.state_dict(), config.to_dict())
    save_file(checkpoint, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
