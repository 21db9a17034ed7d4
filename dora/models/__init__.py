"""Models by name: ``smollm2``, ``tiny``, ``tiny-moe``, ``tiny-hybrid``, or any Hugging Face folder."""

import os
import tempfile
from pathlib import Path
from typing import Any

from dora.data.strict_json import json_object
from dora.data.types import RoutingShape
from dora.errors import InvalidValue, one_of
from dora.models import tiny
from dora.models.experts import experts_of, routing_of
from dora.models.smollm2 import gguf_file, prepare_smollm2, smollm2_folder
from dora.models.text_part import text_part
from dora.system.files import path_of

__all__ = [
    *("check_parallel", "context_tokens", "default_cache", "experts"),
    *("kv_token_bytes", "layer_count", "made_model", "resolve_model", "routing", "unwritable_cache"),
]

# Fields of config.json for the maximum context length; the smallest applies. Source: vLLM,
# transformers_utils/model_arch_config_convertor.py, ``derive_max_model_len_and_key``.
CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
_TINY_KINDS: dict[str, tiny.TinyKind] = {"tiny": "dense", "tiny-moe": "moe", "tiny-hybrid": "hybrid"}
NAMES = ("smollm2", *_TINY_KINDS)  # models that can be made from installed packages


def default_cache() -> Path:
    """Returns the folder of prepared models: ``$XDG_CACHE_HOME/dora``, by default ``~/.cache/dora``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "dora"
    except RuntimeError:  # the user has no home folder
        return Path(tempfile.gettempdir()) / f"dora-{os.getuid()}"


def resolve_model(name: str, cache: Path | None = None) -> Path:
    """Returns the Hugging Face folder of a model. A model in ``NAMES`` is prepared under ``cache``.

    torch is loaded only to prepare the folder. ``cache`` is by default ``default_cache()``.

    Raises InvalidValue if ``name`` is neither in ``NAMES`` nor a folder that an engine can load.
    """
    cache = default_cache() if cache is None else cache
    if name == "smollm2":
        return prepare_smollm2(cache)
    if name in _TINY_KINDS:
        return tiny.make_tiny(_TINY_KINDS[name], _made_folder(name, cache))
    folder = path_of(name, "--model")
    if (folder / "adapter_config.json").exists():
        why = "is a LoRA adapter, which is not offered"
        raise InvalidValue(
            "--model", name, "a complete model: merge the adapter into its base (PEFT: merge_and_unload)", why
        )
    if not (folder / "config.json").is_file():
        raise InvalidValue("--model", name, f"{one_of(name, NAMES)}, or a folder with config.json")
    for what, pattern in (("weights", "*.safetensors"), ("a tokenizer", "tokenizer.json")):
        if not any(folder.glob(pattern)):
            raise InvalidValue("--model", name, f"a folder with {what} ({pattern})")
    _check_config(folder, name)
    return folder


def made_model(name: str, cache: Path | None = None) -> Path | None:
    """Does as ``resolve_model`` without preparation. Returns None for a model in ``NAMES`` that is not prepared yet.

    Raises NotFound if the package that it is made from is missing.
    """
    cache = default_cache() if cache is None else cache
    if name in NAMES and not _made_folder(name, cache).exists():
        if name == "smollm2":
            gguf_file()
        return None
    return resolve_model(name, cache)


def unwritable_cache(error: OSError) -> str:
    """Returns the ``allowed`` text of an error about a cache folder that cannot be written."""
    return f"a writable cache folder, set with --set cache=FOLDER ({error})"


def _made_folder(name: str, cache: Path) -> Path:
    return smollm2_folder(cache) if name == "smollm2" else cache / f"{name}-r{tiny.RECIPE}"


def _check_config(folder: Path, name: str) -> None:
    """Raises InvalidValue if no engine could identify the model, instead of half a minute later in the engine."""
    config = json_object(folder / "config.json", "--model")
    architectures, kind = config.get("architectures"), config.get("model_type")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        allowed = 'a folder whose config.json names its "architectures", e.g. ["Qwen3ForCausalLM"]'
        raise InvalidValue("--model", name, f"{allowed}; it has {architectures!r}")
    if not isinstance(kind, str) or not kind:
        raise InvalidValue("--model", name, f'a folder whose config.json names its "model_type", not {kind!r}')
    for field in ("vocab_size", "max_position_embeddings"):
        tokens = config.get(field, 1)
        if type(tokens) is not int or tokens < 1:
            raise InvalidValue("--model", name, f'a folder whose config.json has a "{field}" above 0, not {tokens!r}')


def context_tokens(folder: Path) -> int | None:
    """Returns the maximum context length of the model in a Hugging Face folder, or None if it does not say."""
    said = _text_config(folder)
    found = [tokens for key in CONTEXT_KEYS if type(tokens := said.get(key)) is int and tokens > 0]
    return min(found, default=None)


def layer_count(folder: Path) -> int:
    """Returns the number of decoder layers of the model in a Hugging Face folder, or 0 if it does not say."""
    found = _text_config(folder).get("num_hidden_layers")
    return found if type(found) is int else 0


def kv_token_bytes(folder: Path) -> int:
    """Returns a token's bytes in a KV-cache of two-byte values with full attention; 0 if the model does not say.

    Layers that keep a state instead have none.
    """
    said = _text_config(folder)
    kinds = said.get("layer_types") or []
    layers = sum("attention" in kind and kind != "linear_attention" for kind in kinds) or layer_count(folder)
    heads = said.get("num_attention_heads")
    if not heads or not said.get("hidden_size"):
        return 0
    if latent := said.get("kv_lora_rank"):
        return 2 * layers * int(latent + said.get("qk_rope_head_dim", 0))
    size = said.get("head_dim") or said["hidden_size"] // heads
    return 2 * layers * 2 * int(said.get("num_key_value_heads") or heads) * int(size)


def check_parallel(folder: Path, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises InvalidValue if a model cannot be divided among this many ranks, by heads and by layers.

    With more ranks than KV heads, several ranks hold the same head. Source: vLLM, vllm/config/model.py,
    ``verify_with_parallel_config``, and vllm/model_executor/layers/linear.py, ``QKVParallelLinear``.
    """
    said = _text_config(folder)
    heads, layers = said.get("num_attention_heads"), said.get("num_hidden_layers")
    kv_heads = said.get("num_key_value_heads", heads)
    if type(heads) is int and heads % tensor_parallel:
        raise InvalidValue("workers.tensor_parallel", tensor_parallel, f"a divisor of the model's {heads} heads")
    if type(kv_heads) is int and kv_heads > 0 and kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        allowed = f"a divisor or a multiple of the model's {kv_heads} KV heads"
        raise InvalidValue("workers.tensor_parallel", tensor_parallel, allowed)
    if type(layers) is int and layers < pipeline_parallel:
        raise InvalidValue("workers.pipeline_parallel", pipeline_parallel, f"at most the model's {layers} layers")


def _text_config(folder: Path) -> dict[str, Any]:
    config = json_object(folder / "config.json", "--model")
    return {**config, **text_part(config)}


def experts(folder: Path) -> tuple[int, int] | None:
    return experts_of(json_object(folder / "config.json", "--model"), str(folder / "config.json"))


def routing(folder: Path) -> RoutingShape:
    """Returns ``routing_of`` a Hugging Face folder's config.json. Raises InvalidValue for one without experts too."""
    found = routing_of(json_object(folder / "config.json", "--model"), str(folder / "config.json"))
    if found is None or not found.layers:
        allowed = f"false, as {folder} is no mixture of experts: it routes nothing"
        raise InvalidValue("workers.router_replay", True, allowed)
    return found
