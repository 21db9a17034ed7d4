"""The token ids that end a response of a model, from every file of its folder that names one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dora.data.strict_json import json_object
from dora.errors import InvalidValue
from dora.models.text_part import text_part

FIELD: Final = "eos_token_id"


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Returns every id that a file of the folder names as an end, sorted. Empty if none does."""
    return merged_ends(ends_by_file(folder))


def merged_ends(by_file: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({token_id for ids in by_file.values() for token_id in ids}))


def ends_by_file(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns each file's ends: generation_config.json, config.json (also its text part), tokenizer_config.json.

    A token that the tokenizer does not have has no id. Raises InvalidValue if a file names something that is no id.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            config = json_object(folder / name, "--model")
            found[name] = tuple(
                token_id for part in (config, text_part(config)) for token_id in _ids(part.get(FIELD), folder / name)
            )
    found["tokenizer_config.json"] = _of_tokenizer(folder)
    return {name: ids for name, ids in found.items() if ids}


def _ids(said: Any, file: Path) -> tuple[int, ...]:
    ids = said if isinstance(said, list) else [] if said is None else [said]
    if not all(type(token_id) is int for token_id in ids):
        raise InvalidValue(
            "--model", str(file.parent), f"a folder whose {file.name} has token ids as {FIELD}: {said!r}"
        )
    return tuple(token_id for token_id in ids if token_id >= 0)  # some models write -1 for none


def _of_tokenizer(folder: Path) -> tuple[int, ...]:
    file = folder / "tokenizer_config.json"
    said = json_object(file, "--model").get("eos_token") if file.is_file() else None
    text = said.get("content") if isinstance(said, dict) else said
    if not isinstance(text, str) or not (folder / "tokenizer.json").is_file():
        return ()
    token_id = token_ids(folder).get(text)
    return () if token_id is None else (token_id,)


def token_ids(folder: Path) -> Mapping[str, int]:
    """Returns the tokens of tokenizer.json, added ones included, and their ids."""
    from tokenizers import Tokenizer

    try:
        found: Mapping[str, int] = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises nothing narrower
        raise InvalidValue("--model", str(folder), f"a folder with a valid tokenizer.json ({error})") from error
    return found
