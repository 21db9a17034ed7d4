"""Refuses a model that vLLM would not load, from its folder, before an engine starts."""

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from dora.data.strict_json import json_object
from dora.errors import InvalidValue
from dora.models.text_part import text_part

# Head sizes of vLLM's attention on CPUs. Source: vLLM, v1/attention/backends/cpu_attn.py, ``get_supported_head_sizes``.
CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Files that list the architectures that vLLM loads itself, or by way of transformers.
_LISTS: Final = (("vllm", "model_executor/models/registry.py"), ("transformers", "models/auto/modeling_auto.py"))
_LATENT: Final = "kv_lora_rank"  # multi-head latent attention has other head sizes


def check_loadable(folder: Path, device: str) -> None:
    """Raises InvalidValue if vLLM on this kind of device (cpu, cuda) does not load the model in ``folder``."""
    config = json_object(folder / "config.json", "--model")
    config = {**config, **text_part(config), "architectures": config.get("architectures")}
    _check_quantisation(folder, config)
    _check_architecture(folder, config)
    if device == "cpu":
        _check_head_size(folder, config)


def _check_quantisation(folder: Path, config: dict[str, Any]) -> None:
    said = config.get("quantization_config") or config.get("compression_config")
    if said:
        method = said.get("quant_method", "unknown") if isinstance(said, dict) else said
        allowed = f"a folder of unquantised weights, not {method}: save the model without its quantization_config"
        raise InvalidValue("--model", str(folder), f"{allowed}; workers.quantisation quantises in the engine")


def _check_architecture(folder: Path, config: dict[str, Any]) -> None:
    """Checks the architecture. It is known if one of the lists has it, and plugins of vLLM may add any."""
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    if any(not plugin.value.startswith("vllm.") for plugin in entry_points(group="vllm.general_plugins")):
        return
    lists = []
    for package, file in _LISTS:
        spec = find_spec(package)
        places = spec.submodule_search_locations if spec is not None else None
        if not places or not (Path(places[0]) / file).is_file():
            return
        lists.append((Path(places[0]) / file).read_text(encoding="utf-8"))
    if names and not any(f'"{name}"' in text for name in names for text in lists):
        allowed = f"a model of an architecture that the installed vLLM or transformers has, not {', '.join(names)}"
        raise InvalidValue("--model", str(folder), allowed)


def _check_head_size(folder: Path, config: dict[str, Any]) -> None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim")
    if size is None and type(heads) is int and type(hidden) is int and heads > 0:
        size = hidden // heads
    if type(size) is int and not config.get(_LATENT) and size not in CPU_HEAD_SIZES:
        allowed = f"a model whose attention heads have a size that vLLM supports on CPUs ({_listed()}), not {size}"
        raise InvalidValue("--model", str(folder), allowed)


def _listed() -> str:
    return ", ".join(map(str, CPU_HEAD_SIZES))
