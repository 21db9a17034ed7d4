"""Reads JSON from outside within bounds, or refuses it with a reason.

Python's reader accepts more than JSON (NaN, numbers of any length), fails on some input with other errors
(RecursionError, ValueError), and may return values too deep to be written again.
"""

import json
from math import isfinite
from pathlib import Path
from typing import Any, Final, NoReturn

from dora.errors import InvalidValue

DEPTH_MAX: Final = 64  # nested objects and lists
DIGITS_MAX: Final = 308  # of an integer: as many as the largest float has


def read_json(text: str, field: str, bytes_most: int, depth_most: int = DEPTH_MAX) -> Any:
    """Returns the value of one JSON text of at most ``bytes_most`` bytes in UTF-8.

    Raises InvalidValue, naming ``field``, for anything else: a text that is too long, too deep or no JSON, NaN,
    Infinity and numbers beyond float64, a key that an object has twice, a whole number of more than 308 digits, half a
    surrogate pair, which no UTF-8 text can hold.
    """
    if len(text) > bytes_most:
        raise InvalidValue(f"{field}: characters", len(text), f"at most {bytes_most:,}")
    try:
        hooks: dict[str, Any] = {"parse_int": _whole, "parse_float": _finite, "parse_constant": _no_number}
        value = json.loads(text, **hooks, object_pairs_hook=_once)
    except RecursionError as error:
        raise InvalidValue(field, text[:80], _depth(depth_most)) from error
    except ValueError as error:
        raise InvalidValue(field, text[:80], f"JSON ({error})") from error
    _check(value, field, text, depth_most)
    return value


def json_object(file: Path, field: str) -> dict[str, Any]:
    """Returns the object in a JSON file of a folder that a user gave, such as a model's config.json.

    Raises InvalidValue, naming ``field`` and the file, if there is none.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(field, str(file), f"a readable file ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidValue(field, str(file), f"a file of JSON in UTF-8 ({error})") from error
    if not isinstance(found, dict):
        raise InvalidValue(field, str(file), "a file that holds a JSON object")
    return found


def _depth(most: int) -> str:
    return f"JSON of at most {most} objects and lists within each other"


def _check(value: Any, field: str, text: str, depth_most: int) -> None:
    """Checks level by level, so that no depth overflows the check itself."""
    level = [value]
    for _ in range(depth_most + 1):
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                for key in each:
                    check_text(key, field)
                below.extend(each.values())
            elif isinstance(each, list):
                below.extend(each)
            elif isinstance(each, str):
                check_text(each, field)
        if not below:
            return
        level = below
    raise InvalidValue(field, text[:80], _depth(depth_most))


def check_text(text: str, field: str) -> None:
    """Raises InvalidValue if UTF-8 cannot represent the text."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue(
                field, ascii(text[:80]), "a text in Unicode, without half of a surrogate pair"
            ) from error


def _whole(digits: str) -> int:
    if len(digits) > DIGITS_MAX:
        raise ValueError(f"a whole number has {len(digits):,} digits, and at most {DIGITS_MAX} are read")
    return int(digits)


def _finite(number: str) -> float:
    if not isfinite(found := float(number)):
        raise ValueError(f"the number {number[:80]} is beyond float64")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {ascii(twice)[:80]} stands there twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")
