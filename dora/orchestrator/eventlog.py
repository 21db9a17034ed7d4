"""The event log: every event that a service gave its core, in order, with its time, so that a run can be replayed.

    b"DORA-LOG", version (u16)
    record 0      header: msgpack {"config": the Config as JSON without its token, "started_at", "now_s"}
    record 1..n   one event each: msgpack [now_s, kind, {field: value}]

    record:  body_bytes (u32), CRC-32 of the body (u32), CRC-32 of these eight bytes (u32), body

All little-endian. The head has a checksum of its own: without it a damaged length in the middle of a log would look
like the torn end that a crash leaves. Fields go by name, so that old logs can be read when events have grown: a field
that a log does not have takes its default. One that this DORA does not know is an error: the replay would differ.
"""

import json
import logging
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from io import BufferedReader, FileIO
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args, get_origin, get_type_hints
from zlib import crc32

import msgpack

from dora.config import Config, upgraded, validated
from dora.errors import MISSING, InvalidValue
from dora.orchestrator.core import events as on

log = logging.getLogger("dora.service")

SETTING: Final = "service.event_log"
FORMAT_VERSION: Final = 1
FLUSH_RECORDS: Final = 64
FLUSH_S: Final = 1.0
WAITING_BYTES_MOST: Final = 64 << 20
EVENT_KINDS: Final[dict[str, type]] = {kind.__name__: kind for kind in get_args(on.Event)}

_MAGIC: Final = b"DORA-LOG"
_PREAMBLE: Final = struct.Struct("<8sH")
_HEAD: Final = struct.Struct("<III")
_CHECKED_BYTES: Final = 8  # of the head, by its own checksum
_TEXT_ERRORS: Final = "surrogatepass"  # a reason may quote a file name that is no UTF-8


@dataclass(frozen=True, slots=True)
class Record:
    """One event of a log. ``number`` counts from 1; ``now_s`` is the service's own clock, as its core was told it."""

    number: int
    now_s: float
    event: on.Event


# -------------------------------------------------------------------------------------------------------------- codec


def event_to_fields(event: on.Event) -> tuple[str, dict[str, Any]]:
    """An event as its kind and its fields, which msgpack takes as they are."""
    return type(event).__name__, {field.name: _plain(getattr(event, field.name)) for field in fields(event)}


def event_from_fields(kind: str, values: dict[str, Any]) -> on.Event:
    """The event that was written so. Raises InvalidValue for a kind, field or type that this DORA does not know."""
    if kind not in EVENT_KINDS:
        raise InvalidValue("kind", kind, f"one of {', '.join(EVENT_KINDS)}; a newer DORA may have written it")
    event: on.Event = _typed(EVENT_KINDS[kind], values, kind)
    return event


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value


def _typed(hint: Any, value: Any, where: str) -> Any:
    """``value``, as msgpack gave it, as what the annotation says. Raises InvalidValue, naming ``where``, if it is not.

    Annotations are what plain data needs: bool, int, float, str, Literal, dict, ``tuple[X, ...]`` and dataclasses.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return _dataclass(hint, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(parts[0], part, f"{where}[{index}]") for index, part in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {_typed(parts[0], key, where): _typed(parts[1], part, f"{where}[{key}]") for key, part in value.items()}
    if origin is Literal and value in parts:
        return value
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
    return kind(**{name: _typed(hints[name], value, f"{where}.{name}") for name, value in values.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _required(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.default is NO_DEFAULT and f.default_factory is NO_DEFAULT)


# ------------------------------------------------------------------------------------------------------------ writing


def new_log(path: Path) -> FileIO:
    """A new file for a log. Raises InvalidValue where none can be made there."""
    try:
        return path.open("xb", buffering=0)
    except FileExistsError as error:  # it may be of the service that has just crashed; ids begin anew with each
        raise InvalidValue(SETTING, str(path), "a file that does not exist yet") from error
    except OSError as error:
        raise InvalidValue(SETTING, str(path), f"a file that can be made ({error.strerror})") from error


class EventLogWriter:
    """Appends events to a new log. What cannot be written, as on a full disk, waits until it can.

    An append packs some hundred bytes; every ``FLUSH_RECORDS`` events or ``FLUSH_S`` seconds one ``write`` hands a few
    kilobytes to the page cache, without a sync. That is tens of microseconds, so it may be called in the event loop.
    A killed process loses what came after the last of these writes; a service that ends by a bug closes its log. Where
    more than ``WAITING_BYTES_MOST`` wait the log ends with what was written, and the service goes on.
    """

    def __init__(self, path: Path, config: Config, *, now_s: float) -> None:
        """``now_s`` is what the events' clock shows now. Raises InvalidValue where no new file can be made there."""
        self._file = new_log(path)
        tree = config.model_dump_json(exclude={"service": {"token"}})
        header = {"config": tree, "started_at": time.time(), "now_s": now_s}
        self._path = path
        self._flushed_s = now_s
        self._unwritten = [_PREAMBLE.pack(_MAGIC, FORMAT_VERSION), framed(msgpack.packb(header))]
        self._waiting_bytes = 0  # of the last write, what did not get through
        self._error = self._flush()
        if self._error is not None:
            self._file.close()
            path.unlink(missing_ok=True)
            raise InvalidValue(SETTING, str(path), f"a file that can be written ({self._error.strerror})")

    def append(self, event: on.Event, now_s: float) -> None:
        """Logs an event that is about to be handled at ``now_s``."""
        if self._file.closed:
            return
        body = msgpack.packb((now_s, *event_to_fields(event)), unicode_errors=_TEXT_ERRORS)
        self._unwritten.append(framed(body))
        if self._error is not None:
            self._waiting_bytes += len(body)
            if self._waiting_bytes > WAITING_BYTES_MOST:
                log.error("the event log %s ends here, of what waits: %s", self._path, self._error.strerror)
                self._unwritten.clear()
                self._file.close()
        elif len(self._unwritten) >= FLUSH_RECORDS or now_s - self._flushed_s >= FLUSH_S:
            self._error = self._flush()
            self._flushed_s = now_s

    def write_again(self) -> OSError | None:
        """Tries once more where the last write has failed. Returns why the log cannot be written now, if it cannot."""
        if self._error is not None:
            self._error = None if self._file.closed else self._flush()
        return self._error

    def close(self) -> None:
        """Writes what is left. May be called again."""
        if not self._file.closed:
            error = self._flush()
            if error is not None:
                log.error("the event log %s ends early: %s", self._path, error.strerror)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _flush(self) -> OSError | None:
        """Writes what is there; what does not get through stays. Returns why it does not."""
        block = b"".join(self._unwritten)
        try:
            while block:
                block = block[self._file.write(block) :]
        except OSError as error:
            return error
        finally:
            self._unwritten[:] = [block] if block else []
            self._waiting_bytes = len(block)
        return None


def framed(body: bytes) -> bytes:
    """A record: its body behind the head that lets a reader check it."""
    checked = struct.pack("<II", len(body), crc32(body))
    return checked + struct.pack("<I", crc32(checked)) + body


# ------------------------------------------------------------------------------------------------------------ reading


class EventLog:
    """A log to read, once or again: iteration yields its Records in order, one at a time in memory.

    It raises InvalidValue, with the file, the record, its byte offset and the reason, for a record that was damaged or
    that this DORA cannot read. What a crash cut short at the end is passed over; ``torn_bytes`` says how much that is,
    once the end was reached.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0
        header = next(self._bodies(), None)
        if header is None:
            raise InvalidValue(str(path), "no whole header", "an event log whose header was written")
        where, body = header
        try:
            tree = msgpack.unpackb(body)
            self.started_at, self.now_s = float(tree["started_at"]), float(tree["now_s"])
            self.config = validated(upgraded(json.loads(tree["config"])))
        except InvalidValue as error:
            raise error.within(str(path)) from error
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidValue(where, repr(error), "a header with config, started_at and now_s") from error

    def __iter__(self) -> Iterator[Record]:
        bodies = self._bodies()
        next(bodies, None)  # the header
        for number, (where, body) in enumerate(bodies, start=1):
            yield _record(number, body, where)

    def _bodies(self) -> Iterator[tuple[str, bytes]]:
        """Each whole record's body, the header's first, behind words for where it stands."""
        with _opened(self.path) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            for number in count():
                offset = stream.tell()
                where = f"{self.path}: record {number} at byte {offset}"
                body = _body(stream, size_bytes - offset, where)
                if body is None:
                    self.torn_bytes = max(0, size_bytes - offset)  # below 0: the service writes while we read
                    return
                yield where, body


def read_log(path: Path) -> EventLog:
    """Opens a log. Raises InvalidValue where it is none, of a newer format, or its header cannot be read."""
    return EventLog(path)


def _opened(path: Path) -> BufferedReader:
    """The file behind its preamble."""
    try:
        stream = path.open("rb")
        preamble = stream.read(_PREAMBLE.size)
    except OSError as error:
        raise InvalidValue("LOG", str(path), f"an event log that can be read ({error.strerror})") from error
    magic, version = _PREAMBLE.unpack(preamble.ljust(_PREAMBLE.size, b"\0"))
    if magic != _MAGIC:
        stream.close()
        raise InvalidValue("LOG", str(path), "an event log, as service.event_log makes one")
    if version != FORMAT_VERSION:
        stream.close()
        raise InvalidValue(f"{path}: format version", version, f"{FORMAT_VERSION}; a newer DORA may read it")
    return stream


def _body(stream: BufferedReader, left_bytes: int, where: str) -> bytes | None:
    """The next record's body; None where the log ends, torn or not. ``left_bytes`` are from here to the file's end."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    body_bytes, body_crc, head_crc = _HEAD.unpack(head)
    if crc32(head[:_CHECKED_BYTES]) != head_crc:
        raise InvalidValue(where, head.hex(), "a record's head with a checksum that fits: the file was damaged")
    behind_bytes = left_bytes - _HEAD.size - body_bytes
    if behind_bytes >= 0:
        body = stream.read(body_bytes)
        if crc32(body) == body_crc:
            return body
        if behind_bytes:
            raise InvalidValue(where, f"{crc32(body):08x}", f"checksum {body_crc:08x}: the file was damaged")
    return None


def _record(number: int, body: bytes, where: str) -> Record:
    try:
        now_s, kind, values = msgpack.unpackb(body, strict_map_key=False, unicode_errors=_TEXT_ERRORS)
        return Record(number, _typed(float, now_s, "now_s"), event_from_fields(kind, values))
    except InvalidValue as error:
        raise error.within(where) from error
    except (ValueError, TypeError) as error:
        raise InvalidValue(where, repr(error), "[now_s, kind, fields] in msgpack") from error
