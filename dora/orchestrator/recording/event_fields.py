"""Converts events to plain values for msgpack, and back: by field name, columns as raw little-endian bytes.

The event log has a schema (frames.SCHEMA_VERSION), so that each field is there in the release that reads it.
"""

from dataclasses import fields
from typing import Any, Final, get_args

import msgspec
import numpy as np

from dora.core import events as on
from dora.errors import InvalidValue

EVENT_KINDS: Final[dict[str, type]] = {kind.__name__: kind for kind in get_args(on.Event)}


def event_to_fields(event: on.Event) -> tuple[str, dict[str, Any]]:
    return type(event).__name__, msgspec.to_builtins(event, builtin_types=(bytes,), enc_hook=_bytes_of)


def event_from_fields(kind: str, values: dict[str, Any]) -> on.Event:
    """Returns the event. Raises InvalidValue for an unknown kind, other fields, or a value of another type."""
    if kind not in EVENT_KINDS:
        raise InvalidValue("kind", kind, f"one of {', '.join(EVENT_KINDS)}; a newer DORA may have written it")
    if values.keys() != (allowed := {each.name for each in fields(EVENT_KINDS[kind])}):
        differing = ", ".join(sorted(values.keys() ^ allowed))
        raise InvalidValue(kind, differing, f"fields {', '.join(sorted(allowed)) or '(none)'}, all of them")
    try:
        event: on.Event = msgspec.convert(values, EVENT_KINDS[kind], dec_hook=_column_of)
    except msgspec.ValidationError as error:
        raise InvalidValue(kind, str(error).replace("$", kind), "an event that this DORA writes") from error
    return event


def _bytes_of(value: Any) -> bytes:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a field of type {type(value).__name__}")
    return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def _column_of(kind: Any, value: Any) -> Any:
    dtype = np.dtype(get_args(get_args(kind)[1])[0]).newbyteorder("<")
    if not isinstance(value, bytes) or len(value) % dtype.itemsize:
        raise ValueError(f"a column of {dtype} has whole values, as bytes")
    return np.frombuffer(value, dtype)
