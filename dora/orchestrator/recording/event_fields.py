"""Converts events to plain values for msgpack, and back.

Fields go by name: a missing field takes its default. An unknown field is an error, because a replay would differ.
"""

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import numpy as np

from dora.core import events as on
from dora.errors import MISSING, InvalidValue

EVENT_KINDS: Final[dict[str, type]] = {kind.__name__: kind for kind in get_args(on.Event)}


def event_to_fields(event: on.Event) -> tuple[str, dict[str, Any]]:
    return type(event).__name__, {field.name: _plain(getattr(event, field.name)) for field in fields(event)}


def event_from_fields(kind: str, values: dict[str, Any]) -> on.Event:
    """Returns the event. Raises InvalidValue for a kind, field or type that this DORA does not know."""
    if kind not in EVENT_KINDS:
        raise InvalidValue("kind", kind, f"one of {', '.join(EVENT_KINDS)}; a newer DORA may have written it")
    event: on.Event = typed(EVENT_KINDS[kind], values, kind)
    return event


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    return value


def typed(hint: Any, value: Any, where: str) -> Any:
    """Converts ``value``, from msgpack, to the annotated type. Raises InvalidValue, naming ``where``, if it does not
    fit.

    Supports the annotations of plain data: bool, int, float, str, Literal, dict, ``tuple[X, ...]``, dataclasses, and
    columns (``NDArray[X]``), which are raw little-endian bytes in a log.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return _dataclass(hint, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(typed(parts[0], part, f"{where}[{index}]") for index, part in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {typed(parts[0], key, where): typed(parts[1], part, f"{where}[{key}]") for key, part in value.items()}
    if origin is Literal and value in parts:
        return value
    if origin is np.ndarray and isinstance(value, bytes):
        dtype = np.dtype(get_args(parts[1])[0]).newbyteorder("<")
        if len(value) % dtype.itemsize == 0:
            return np.frombuffer(value, dtype)
    if type(value) is hint or (hint is float and type(value) is int):
        return value
    raise InvalidValue(where, value, f"a value of type {hint if origin is not None else hint.__name__}")


def _dataclass(kind: type, values: dict[str, Any], where: str) -> Any:
    hints = _hints(kind)
    unknown = sorted(values.keys() - hints.keys())
    if unknown:
        allowed = f"fields {', '.join(hints) or '(none)'}; a newer DORA may have written it"
        raise InvalidValue(where, unknown[0], allowed)
    missing = [name for name in _required(kind) if name not in values]
    if missing:
        raise InvalidValue(f"{where}.{missing[0]}", MISSING, "given: the field has no default")
    return kind(**{name: typed(hints[name], value, f"{where}.{name}") for name, value in values.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _required(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.default is NO_DEFAULT and f.default_factory is NO_DEFAULT)
