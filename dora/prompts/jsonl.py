"""The rows of a JSON Lines file: one object per line, in UTF-8.

Skips a byte-order mark and blank lines, and accepts Windows line ends. One line is in memory at a time.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dora.data.strict_json import read_json
from dora.errors import InvalidValue
from dora.prompts.row import RowLocation

LINE_BYTES_MAX: Final = 8 << 20


def jsonl_rows(path: Path) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """Yields the rows. Raises InvalidValue, with file and line, for the first line that is not a JSON object."""
    try:
        with path.open("rb") as file:
            number = 0
            # Only b"\n" ends a line: a JSON text may contain any other line separator.
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                place = RowLocation(path, number)
                if len(line) > LINE_BYTES_MAX:
                    raise place.invalid("line: bytes", f"over {LINE_BYTES_MAX:,}", f"at most {LINE_BYTES_MAX:,}")
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield place, _record(line, place)
    except OSError as error:
        raise InvalidValue("--prompts", str(path), f"a readable UTF-8 file ({error})") from error


def _record(line: bytes, place: RowLocation) -> dict[str, Any]:
    try:
        record = read_json(line.decode(), place.of("line"), LINE_BYTES_MAX)
    except UnicodeDecodeError as error:
        raise place.invalid("line", line[:80], f"one JSON object in UTF-8 ({error})") from error
    except InvalidValue as error:
        raise place.invalid("line", error.value, f"one JSON object: {error.allowed}") from error
    if not isinstance(record, dict):
        raise place.invalid("line", line[:80].decode(errors="replace"), "one JSON object")
    return record
