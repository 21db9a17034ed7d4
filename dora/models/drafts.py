"""Checks the folder of a draft model (``workers.speculation = model:DIR``) before an engine starts."""

import json
from pathlib import Path
from typing import Any, Final

from dora.data.limits import DRAFT_TOKENS_MAX
from dora.data.strict_json import json_object
from dora.errors import InvalidValue, LimitExceeded
from dora.models import context_tokens, kv_token_bytes
from dora.models.text_part import text_part
from dora.system.memory import memory_bytes

FIELD: Final = "workers.speculation"
PREFIX: Final = "model:"
DRAFT_CONTEXT_MIN: Final = 4 * DRAFT_TOKENS_MAX


def draft_folder(speculation: str) -> Path | None:
    """Returns the folder of the draft model that a value of ``workers.speculation`` names, if it names one."""
    return Path(speculation.removeprefix(PREFIX)) if speculation.startswith(PREFIX) else None


def weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def check_draft(folder: Path, model: Path, workers: int = 1) -> None:
    """Raises InvalidValue unless ``folder`` has a causal language model with a KV-cache and the vocabulary of
    ``model``, and LimitExceeded if this machine's memory cannot hold its weights once for each of ``workers`` on CPUs.
    """
    given = f"{PREFIX}{folder}"
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise InvalidValue(FIELD, given, "model:DIR, where DIR has config.json and weights (*.safetensors)")
    config, target = _config(folder), _config(model)
    names = config.get("architectures") or []
    if not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        allowed = f"the folder of a causal language model: {', '.join(map(str, names)) or 'this one'} is none"
        raise InvalidValue(FIELD, given, allowed)
    if (context_tokens(folder) or DRAFT_CONTEXT_MIN) < DRAFT_CONTEXT_MIN:
        raise InvalidValue(FIELD, given, f"a draft model with a context of at least {DRAFT_CONTEXT_MIN} tokens")
    kinds = {str(kind) for kind in config.get("layer_types") or ()}
    if not kv_token_bytes(folder) or any("attention" not in kind or kind == "linear_attention" for kind in kinds):
        allowed = "a draft model whose layers all have a KV-cache: after a refused draft, no state can go back"
        raise InvalidValue(FIELD, given, allowed)
    sizes = config.get("vocab_size"), target.get("vocab_size")
    if sizes[0] != sizes[1] or not _tokenise_alike(folder, model):
        said = f"it has {sizes[0]} tokens of {sizes[1]}" if sizes[0] != sizes[1] else "its tokenizer.json is another"
        raise InvalidValue(FIELD, given, f"a draft model of the model's own vocabulary: {said}")
    needed_bytes = workers * weights_bytes(folder)
    if needed_bytes > memory_bytes():
        allowed = f"a smaller draft model or fewer workers: {workers} take {needed_bytes:,} bytes of host memory"
        raise LimitExceeded(FIELD, given, allowed)


def _config(folder: Path) -> dict[str, Any]:
    config = json_object(folder / "config.json", FIELD)
    return {**config, **text_part(config), "architectures": config.get("architectures")}


def _tokenise_alike(*folders: Path) -> bool:
    """Returns whether those of the folders that have a tokenizer have the same one."""
    files = [folder / "tokenizer.json" for folder in folders]
    vocabularies = [json.loads(file.read_bytes())["model"]["vocab"] for file in files if file.is_file()]
    return all(each == vocabularies[0] for each in vocabularies)
