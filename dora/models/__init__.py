"""Models by name: ``smollm2``, ``tiny``, ``tiny-moe``, or any Hugging Face folder."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from dora.errors import InvalidValue, one_of
from dora.models import tiny
from dora.models.smollm2 import prepare_smollm2

__all__ = ["context_tokens", "default_cache", "experts", "resolve_model"]

# config.json of one family or another: experts of a layer, and how many of them one token is sent to.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOKEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")

_TINY_KINDS: dict[str, tiny.TinyKind] = {"tiny": "dense", "tiny-moe": "moe"}


def default_cache() -> Path:
    """Where prepared models are kept: ``$XDG_CACHE_HOME/dora``, by default ``~/.cache/dora``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "dora"


def resolve_model(name: str, cache: Path | None = None) -> Path:
    """The Hugging Face folder of a model, prepared under ``cache`` where it has a name of its own.

    torch is loaded only where the folder has yet to be made. ``cache`` None: ``default_cache()``.

    Raises InvalidValue where ``name`` is neither such a name nor a folder that an engine can load.
    """
    cache = default_cache() if cache is None else cache
    if name == "smollm2":
        return prepare_smollm2(cache)
    if name in _TINY_KINDS:
        return tiny.make_tiny(_TINY_KINDS[name], cache / f"{name}-r{tiny.RECIPE}")
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise InvalidValue("--model", name, f"{one_of(name, ('smollm2', *_TINY_KINDS))}, or a folder with config.json")
    for what, pattern in (("weights", "*.safetensors"), ("a tokenizer", "tokenizer.json")):
        if not any(folder.glob(pattern)):
            raise InvalidValue("--model", name, f"a folder with {what} ({pattern})")
    return folder


def context_tokens(folder: Path) -> int | None:
    """The longest context that the model in a Hugging Face folder was made for; None where it does not say."""
    tokens = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    return tokens if isinstance(tokens, int) else None


def experts(folder: Path) -> tuple[int, int] | None:
    """Of a mixture of experts how many there are in a layer, and how many one token is sent to; None for other models.

    As config.json says, or its ``text_config``. Raises InvalidValue where it says the one and not the other.
    """
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("text_config") or {}
    total, chosen = (_first_number(config, names) for names in (_EXPERTS, _TOKEN_EXPERTS))
    if total < 2:
        return None
    if not 1 <= chosen <= total:
        raise InvalidValue(f"{folder / 'config.json'}: {_TOKEN_EXPERTS[0]}", chosen, f"1 to the {total} experts there")
    return total, chosen


def _first_number(config: dict[str, object], names: Sequence[str]) -> int:
    """Of the first of these fields that has one; else 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
