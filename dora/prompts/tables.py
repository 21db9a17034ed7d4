"""The rows of Parquet and Arrow files. Reads them with pyarrow, an optional package that is loaded on use."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from dora.data.extras import install
from dora.data.strict_json import read_json
from dora.errors import InvalidValue
from dora.prompts.row import Columns, RowLocation, without_nulls

BATCH_ROWS: Final = 128  # rows decoded at once
CELL_BYTES_MAX: Final = 8 << 20  # size of a JSON text in a cell
INSTALL: Final = install("data")
_OBJECTS: Final = ("messages", "verifier", "sampling", "prompt_token_ids")  # fields that may be JSON texts in cells


def table_rows(path: Path, columns: Columns) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """Yields the rows of a .parquet or .arrow file (a stream, as written by Hugging Face's ``save_to_disk``), from 1.

    A null cell is a missing field, except for ``answer``. Raises InvalidValue, naming file and row, if pyarrow is not
    installed or cannot read the file.
    """
    first = True
    number = 0
    for names, batch in _batches(path, columns):
        if first:
            _check_names(names, path)
            used, first = columns.used(dict.fromkeys(names), RowLocation(path, 0)), False
        for row in batch:
            number += 1
            place = RowLocation(path, number, used)
            yield place, _cells(row, used, place)


def _batches(path: Path, columns: Columns) -> Iterator[tuple[Sequence[str], Iterable[dict[str, Any]]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidValue("--prompts", str(path), f"a .jsonl file; to read this one: {INSTALL}") from error
    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
                names = file.schema_arrow.names
                chosen = names
                if columns.others == "ignore":  # unused columns are not read
                    chosen = sorted(set(columns.used(dict.fromkeys(names), RowLocation(path, 0)).values()))
                yield names, ()
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=chosen):
                    batch.validate(full=True)
                    yield names, batch.to_pylist()
        else:
            with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                yield stream.schema.names, ()
                for batch in stream:
                    batch.validate(full=True)  # prevents reads outside the file by damaged offsets
                    for start in range(0, batch.num_rows, BATCH_ROWS):
                        yield stream.schema.names, batch.slice(start, BATCH_ROWS).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValue("--prompts", str(path), f"a file that pyarrow reads ({reason[:300]})") from error


def _check_names(names: Sequence[str], path: Path) -> None:
    """Raises InvalidValue for a duplicate column, of which a row would silently keep only one."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidValue("--prompts", str(path), f"a file with distinct column names; duplicate: {twice[0][:80]}")


def _cells(row: dict[str, Any], used: dict[str, str], place: RowLocation) -> dict[str, Any]:
    found = without_nulls(row, used)
    for name in _OBJECTS:
        column = used.get(name)
        if column not in found:
            continue
        if isinstance(found[column], str):
            found[column] = read_json(found[column], place.of(name), CELL_BYTES_MAX)
        found[column] = _without_nulls(found[column], keep="content")
    return found


def _without_nulls(value: Any, keep: str) -> Any:
    """Removes the nulls that Arrow adds to every object for the fields of the others."""
    if isinstance(value, dict):
        return {name: _without_nulls(part, keep) for name, part in value.items() if part is not None or name == keep}
    return [_without_nulls(part, keep) for part in value] if isinstance(value, list) else value
