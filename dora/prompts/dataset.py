"""Finds the files of one split in a dataset's folder.

A folder is either the output of ``datasets.save_to_disk`` (a dataset, or a folder of them by split), or has .parquet or
.jsonl files like repositories of the Hugging Face hub: the split is part of a file's or folder's name, as in
``train-00000-of-00002.parquet`` and ``data/test.jsonl``.
"""

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dora.data.strict_json import json_object
from dora.errors import InvalidValue

SUFFIXES: Final = (".parquet", ".jsonl")
ENTRIES_MAX: Final = 100_000  # files and folders in a dataset's folder
# Source: datasets, data_files.py, ``SPLIT_KEYWORDS``.
_KEYWORDS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF: Final = {word: split for split, words in _KEYWORDS.items() for word in words}
_SHARD: Final = re.compile(r"(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}")


def dataset_files(folder: Path, split: str) -> list[Path]:
    """The files of ``split``, ordered by name. If ``split`` is empty, the folder must have a single split.

    Raises InvalidValue for a folder that is not a dataset, or that has several splits when none is given.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _listed(folder / "dataset_dict.json", "splits")
        return _saved(folder / _chosen(splits, split, folder))
    if (folder / "state.json").is_file():
        if split:
            raise InvalidValue("prompts.split", split, f"empty, because {folder} is a dataset with one split")
        return _saved(folder)
    return _found(folder, split)


def _saved(folder: Path) -> list[Path]:
    state = json_object(folder / "state.json", "--prompts")
    files = state.get("_data_files")
    listed = files if isinstance(files, list) else []
    names: list[Any] = [each.get("filename") if isinstance(each, dict) else None for each in listed]
    if not names or not all(map(_is_name, names)):
        raise InvalidValue("--prompts", str(folder), "a folder whose state.json has a list _data_files")
    return [folder / name for name in names]


def _found(folder: Path, split: str) -> list[Path]:
    entries = list(islice(folder.rglob("*"), ENTRIES_MAX + 1))
    if len(entries) > ENTRIES_MAX:
        raise InvalidValue("--prompts", str(folder), f"a dataset's folder, with at most {ENTRIES_MAX:,} files")
    found: dict[str, list[Path]] = {}
    for path in sorted(entries):
        if path.suffix in SUFFIXES and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            found.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    if not found:
        allowed = f"a dataset: a folder of {' or '.join(SUFFIXES)} files, or the output of datasets.save_to_disk"
        raise InvalidValue("--prompts", str(folder), allowed)
    files = found[_chosen(list(found), split, folder)]
    for kind, kinds in (("folder", {path.parent for path in files}), ("kind", {path.suffix for path in files})):
        if len(kinds) > 1:
            shown = ", ".join(sorted(str(each) for each in kinds)[:5])
            allowed = f"a folder whose files are of one {kind}; these are of {shown}"
            raise InvalidValue("--prompts", str(folder), allowed)
    return files


def _split_of(path: Path) -> str:
    shard = _SHARD.fullmatch(path.stem)
    if shard is not None:
        return _SPLIT_OF.get(shard["split"], shard["split"])
    for part in (path.stem, *reversed(path.parts[:-1])):
        words = [_SPLIT_OF[word] for word in re.split(r"[ ._-]", part.lower()) if word in _SPLIT_OF]
        if words:
            return words[0]
    return ""


def _chosen(splits: Sequence[str], split: str, folder: Path) -> str:
    known = ", ".join(sorted(each or "(no name)" for each in splits)[:20])
    if not split and len(splits) == 1:
        return splits[0]
    name = split if split in splits else _SPLIT_OF.get(split, split)
    if not split or name not in splits:
        raise InvalidValue("prompts.split", split, f"one of {known}, the splits of {folder}")
    return name


def _listed(file: Path, name: str) -> list[str]:
    values = json_object(file, "--prompts").get(name)
    if not isinstance(values, list) or not values or not all(map(_is_name, values)):
        raise InvalidValue("--prompts", str(file), f"a JSON object with a list of {name}")
    return values


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value
