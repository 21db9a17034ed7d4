"""Models by name: ``smollm2``, ``tiny``, ``tiny-moe``, or any Hugging Face folder."""

import json
import os
from pathlib import Path

from dora.errors import InvalidValue, one_of
from dora.models import tiny
from dora.models.experts import experts_of
from dora.models.smollm2 import prepare_smollm2

__all__ = ["context_tokens", "default_cache", "experts", "resolve_model"]

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
    """``experts_of`` the config.json of a Hugging Face folder."""
    file = folder / "config.json"
    return experts_of(json.loads(file.read_text()), str(file))
