"""Reads lengths from a histogram (JSON) or a request trace (JSON Lines). An invalid file is refused as a whole."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dora.data.limits import TOKENS_MAX
from dora.errors import InvalidValue

DIGITS_MAX = 18  # digits of an integer that fits into 64 bits
LENGTHS_FILE = "workload.lengths.file"  # the field that names a file

IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]


def normal_scores(shares: FloatColumn) -> FloatColumn:
    """The standard normal score below which each share of the distribution lies."""
    score = NormalDist().inv_cdf
    # A share that rounds to 0 or 1 belongs to a length too rare to be drawn.
    return np.array([score(min(max(share, 1e-300), 1.0 - 1e-16)) for share in shares.tolist()], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class LengthTable:
    """An empirical distribution, by normal scores.

    ``tokens`` has the lengths, ascending. ``bounds`` has one entry less: the standard normal scores between one length
    and the next.
    """

    tokens: IntColumn
    bounds: FloatColumn

    @classmethod
    def weighted(cls, weights: Mapping[int, float]) -> "LengthTable":
        """The distribution for the weight (>= 0, not all 0) of each length."""
        tokens = sorted(length for length, weight in weights.items() if weight > 0.0)
        cumulative = np.cumsum([weights[length] for length in tokens])
        return cls(np.array(tokens, dtype=np.int64), normal_scores(cumulative[:-1] / cumulative[-1]))

    def at(self, scores: FloatColumn) -> IntColumn:
        """The length at each standard normal score, of the same shape."""
        return self.tokens[np.searchsorted(self.bounds, scores, side="right")]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of a running service in order of the file. Every column has one entry per request."""

    arrival_s: FloatColumn
    input_tokens: IntColumn
    output_tokens: IntColumn

    def lengths(self) -> LengthTable:
        tokens, counts = np.unique(self.output_tokens, return_counts=True)
        return LengthTable.weighted(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))


def load_histogram(path: Path | str, field: str = LENGTHS_FILE) -> LengthTable:
    """Reads ``{"hist": {tokens: weight, ...}}`` and ignores other keys. ``field`` is the setting that names the file.

    Raises InvalidValue if the file is missing, and with file, line and reason if it is malformed.
    """
    text = _text(path, field)
    document = _parsed(text, f"{path}", 1)
    if not isinstance(document, dict) or not isinstance(hist := document.get("hist"), dict):
        raise InvalidValue(f"{path}:1: hist", document, 'an object {"hist": {tokens: weight, ...}}')
    weights: dict[int, float] = {}
    for key, weight in hist.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= DIGITS_MAX and int(key) >= 1):
            allowed = f"a whole number of at least 1, of {DIGITS_MAX} digits at most"
            raise InvalidValue(f"{path}:{_line(text, key)}: tokens", key, allowed)
        if not _is_number(weight) or weight < 0.0:
            raise InvalidValue(f"{path}:{_line(text, key)}: weight of {key} tokens", weight, "a number of at least 0")
        weights[int(key)] = weights.get(int(key), 0.0) + float(weight)
    if not 0.0 < sum(weights.values()) < math.inf:
        allowed = "at least one positive weight, and a finite sum of all"
        raise InvalidValue(f"{path}:{_line(text, 'hist')}: hist", hist, allowed)
    return LengthTable.weighted(weights)


def load_trace(path: Path | str, field: str = LENGTHS_FILE, *, prompts: bool = False) -> Trace:
    """Reads one request per line: ``output_length`` in tokens (>= 1), ``input_length`` in tokens and ``timestamp`` in
    milliseconds; the latter two default to 0. Other keys (``hash_ids``) and blank lines are ignored. ``field`` is the
    setting that names the file. With ``prompts``, every line must have a prompt of 1 to TOKENS_MAX tokens.

    Raises InvalidValue if the file is missing, and with file, line and reason if it is malformed.
    """
    columns: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number, line in enumerate(_text(path, field).split("\n"), 1):
        if not line.strip():
            continue
        request = _parsed(line, f"{path}", number)
        if not isinstance(request, dict):
            raise InvalidValue(f"{path}:{number}", request, "an object with output_length")
        columns[0].append(_field(request, "timestamp", 0, f"{path}:{number}", whole=False))
        columns[1].append(_field(request, "input_length", 0, f"{path}:{number}", whole=True))
        if prompts and not 1 <= columns[1][-1] <= TOKENS_MAX:
            allowed = f"a whole number from 1 to {TOKENS_MAX}, as workload.prompt_lengths is trace"
            raise InvalidValue(f"{path}:{number}: input_length", request.get("input_length"), allowed)
        columns[2].append(_field(request, "output_length", 1, f"{path}:{number}", whole=True))
    if not columns[2]:
        raise InvalidValue(f"{path}:1", "", "at least one request")
    arrival_ms, inputs, outputs = columns
    return Trace(np.array(arrival_ms) / 1e3, np.array(inputs, dtype=np.int64), np.array(outputs, dtype=np.int64))


def _field(request: Mapping[str, Any], name: str, least: int, place: str, *, whole: bool) -> float:
    value = request.get(name, 0)  # a missing output_length becomes 0 and is refused
    if not _is_number(value) or value < least or (whole and not isinstance(value, int)):
        kind = "whole number" if whole else "number"
        raise InvalidValue(f"{place}: {name}", request.get(name), f"a {kind} of at least {least}")
    return value


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**DIGITS_MAX


def _text(path: Path | str, field: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValue(field, str(path), f"a readable file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InvalidValue(f"{path}:{line}", error.object[error.start : error.end], "UTF-8 text") from error
    except ValueError as error:  # a name that is not valid for a file
        raise InvalidValue(field, str(path), f"a readable file ({error})") from error


def _parsed(text: str, path: str, first_line: int) -> Any:
    """Parses the JSON document ``text``, which begins at ``first_line`` of the file. Refuses NaN and Infinity."""

    def refused(constant: str) -> NoReturn:
        raise InvalidValue(f"{path}:{first_line + _line(text, constant, quoted=False) - 1}", constant, "finite numbers")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(members := dict(pairs)) < len(pairs):
            raise InvalidValue(f"{path}:{first_line}", text[:20], "objects without a key twice")
        return members

    try:
        return json.loads(text, parse_constant=refused, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        shown = error.doc[error.pos : error.pos + 20]
        raise InvalidValue(f"{path}:{first_line + error.lineno - 1}", shown, f"JSON ({error.msg})") from error
    except ValueError as error:  # Python refuses integers of thousands of digits
        raise InvalidValue(f"{path}:{first_line}", text[:20], f"JSON ({error})") from error
    except RecursionError as error:
        raise InvalidValue(f"{path}:{first_line}", text[:20], "JSON that is not nested this deeply") from error


def _line(text: str, mark: str, *, quoted: bool = True) -> int:
    return text.count("\n", 0, max(text.find(f'"{mark}"' if quoted else mark), 0)) + 1
