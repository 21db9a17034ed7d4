"""Prompts from files and dataset folders: read, checked and tokenized once before the start, then served by epochs."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dora.config import PromptsConfig
from dora.data.limits import ID_CHARACTERS_MAX
from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.prompts.dataset import SUFFIXES, dataset_files
from dora.prompts.epochs import EPOCHS_MAX, SUFFIX, permuted
from dora.prompts.jsonl import jsonl_rows
from dora.prompts.row import Columns, RowLocation, prompt_of_row, without_nulls
from dora.prompts.source import PromptSource, check_length
from dora.prompts.store import PromptStore
from dora.prompts.tables import table_rows
from dora.prompts.tokenizer import ChatTokenizer
from dora.system.files import path_of

REWARD: Final = "dora.rewards.answer:score"
TOLD_ROWS: Final = 20_000  # rows between progress reports
_LATER_EPOCH: Final = re.compile(rf"{SUFFIX}\d+$")


def file_source(
    config: PromptsConfig,
    tokenizer: ChatTokenizer,
    limit_tokens: int | None = None,
    check: Callable[[Prompt], Prompt] = lambda prompt: prompt,
    progress: Callable[[str], None] = lambda line: None,
) -> PromptSource:
    """The prompts of ``config.source``, a file or a dataset's folder, over its epochs.

    Checks every row. Raises InvalidValue with the file, row and column of the first invalid value, Conflict for a
    duplicate id.
    """
    path, files = _files(config)
    columns, store = Columns.of(config.columns, config.other_columns), PromptStore()
    for file in files:
        for place, row in _rows(file, columns):
            number = len(store) + 1 if path.is_dir() else place.number
            prompt = prompt_of_row(row, place, config.other_columns, tokenizer, path.stem, number, config.verifier_kb)
            try:
                check_length(prompt, limit_tokens)
                prompt = check(prompt)
            except InvalidValue as error:
                raise error.within(f"{place.path}:{place.number}") from error
            if config.epochs != 1:
                _check_for_epochs(prompt.prompt_id, place)
            store.append(prompt, file, place.number)
            if len(store) % TOLD_ROWS == 0:
                progress(f"reading prompts: {len(store):,} rows of {path}")
    if not len(store):
        raise InvalidValue("--prompts", str(path), "a file with at least one prompt")
    store.check_ids()
    return PromptSource(path.stem, REWARD, _by_epochs(store, config), len(store))


def prompt_rows(config: PromptsConfig) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """Yields the rows of ``config.source`` in order, once and unchecked: columns with prompt fields, and others.

    Raises InvalidValue for a malformed row.
    """
    columns = Columns.of(config.columns, config.other_columns)
    for file in _files(config)[1]:
        yield from _rows(file, columns)


def prompt_files(config: PromptsConfig) -> list[Path]:
    """The files with the rows of ``config.source``, a file or a dataset's folder."""
    return _files(config)[1]


def is_file_source(source: str) -> bool:
    return source.endswith(SUFFIXES) or path_of(source, "--prompts").is_dir()


def _files(config: PromptsConfig) -> tuple[Path, list[Path]]:
    path = path_of(config.source, "--prompts")
    if config.split and not path.is_dir():
        raise InvalidValue("prompts.split", config.split, "empty, because a file has no splits")
    return path, dataset_files(path, config.split) if path.is_dir() else [path]


def _rows(file: Path, columns: Columns) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    if file.exists() and not file.is_file():  # reading a pipe could block forever
        raise InvalidValue("--prompts", str(file), "a regular file, because all rows are read before the start")
    if file.suffix != ".jsonl":
        yield from table_rows(file, columns)
        return
    for place, row in jsonl_rows(file):
        used = columns.used(row, place)
        yield replace(place, columns=used), without_nulls(row, used)


def _by_epochs(store: PromptStore, config: PromptsConfig) -> Callable[[int], Prompt | None]:
    count, epochs = len(store), config.epochs or EPOCHS_MAX

    def at(index: int) -> Prompt | None:
        epoch, row = divmod(index, count)
        if epoch >= epochs:
            return None
        if config.shuffle:
            row = permuted(row, count, config.shuffle_seed, epoch)
        prompt = store[row]
        return replace(prompt, prompt_id=f"{prompt.prompt_id}{SUFFIX}{epoch}") if epoch else prompt

    return at


def _check_for_epochs(prompt_id: str, place: RowLocation) -> None:
    most = ID_CHARACTERS_MAX - len(f"{SUFFIX}{EPOCHS_MAX}")
    if len(prompt_id) > most or _LATER_EPOCH.search(prompt_id):
        allowed = f"at most {most} characters long, without {SUFFIX} and a number at its end, which later epochs add"
        raise place.invalid("prompt_id", prompt_id, allowed)
