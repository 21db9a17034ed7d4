"""The event log: every event of a service's core, in order, with its time, for replays.

It is part of the journal in the state folder (dora/journal) if ``service.keep_events`` is set. Each incarnation begins
there with its configuration, and all but the first with the event ``Restored``. The older file format is still read:

    b"DORA-LOG", version (u16)
    record 0      header: msgpack {"config": the Config as JSON without its token, "started_at", "now_s"}
    record 1..n   one event each: msgpack [now_s, kind, {field: value}]

    record:  body_bytes (u32), CRC-32 of the body (u32), CRC-32 of these eight bytes (u32), body

All little-endian. The head has its own checksum: without it, a damaged length in the middle of a log would look like
the torn end that a crash leaves. Such logs may have tokens by request id (``Progress``) instead of by row
(``TokensReported``); the core accepts both.
"""

import json
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Final
from zlib import crc32

import msgpack

from dora.config import Config, upgraded, validated
from dora.core import events as on
from dora.errors import InvalidValue
from dora.journal import frames, records
from dora.journal.log import LOG_FOLDER
from dora.orchestrator.recording.event_fields import event_from_fields, typed

FORMAT_VERSION: Final = 1
KEPT: Final = "a state folder of a service with service.keep_events, or an event log in the older format"

_MAGIC: Final = b"DORA-LOG"
_PREAMBLE: Final = struct.Struct("<8sH")
_HEAD: Final = struct.Struct("<III")
_CHECKED_BYTES: Final = 8  # part of the head that its checksum covers
_TEXT_ERRORS: Final = "surrogatepass"  # a reason may quote a file name that is no UTF-8


@dataclass(frozen=True, slots=True)
class Record:
    """One event of a log. ``number`` counts from 1; ``now_s``: on the service's clock.

    ``config``: of its incarnation; None: the log has a single one.
    """

    number: int
    now_s: float
    event: on.Event
    config: Config | None = None


class EventLog(ABC):
    """A readable log: iteration yields its Records in order, one at a time in memory, as often as needed.

    It raises InvalidValue, with the file, the record, its byte offset and the reason, for a record that is damaged or
    unknown to this DORA. A torn end, as after a crash, is skipped; ``torn_bytes`` has its size after the iteration.
    """

    path: Path
    torn_bytes: int
    started_at: float  # of the first incarnation; seconds since the Unix epoch
    now_s: float  # on its clock at that time
    config: Config

    @abstractmethod
    def __iter__(self) -> Iterator[Record]: ...


class FileLog(EventLog):
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
        """Yields each whole record's body, the header first, with a description of its position."""
        with _opened(self.path) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            for number in count():
                offset = stream.tell()
                where = f"{self.path}: record {number} at byte {offset}"
                body = _body(stream, size_bytes - offset, where)
                if body is None:
                    self.torn_bytes = max(0, size_bytes - offset)  # below 0 if the service writes at the same time
                    return
                yield where, body


class FolderLog(EventLog):
    """The log in the journal of a state folder. It may be read while the service writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0
        begun = next(self._begun(), None)
        if begun is None:
            raise InvalidValue("LOG", str(path), KEPT)
        self.started_at, self.now_s, self.config = begun.started_at, begun.now_s, self._config(begun)

    def __iter__(self) -> Iterator[Record]:
        config: Config | None = None
        number = 0
        for where, record in self._logged():
            if record is None:
                config = None
            elif isinstance(record, records.Begun):
                config = self._config(record)
            elif isinstance(record, records.Event) and config is not None:
                number += 1
                try:
                    event = event_from_fields(record.kind, record.values)
                except InvalidValue as error:
                    raise error.within(where) from error
                yield Record(number, record.now_s, event, config)

    def _begun(self) -> Iterator[records.Begun]:
        """The first incarnation whose events are complete."""
        begun: records.Begun | None = None
        for _, record in self._logged():
            if record is None or isinstance(record, records.Begun):
                begun = record
            elif begun is not None:
                yield begun

    def _logged(self) -> Iterator[tuple[str, records.Begun | records.Event | None]]:
        """Yields begins of incarnations and events, each with a description of its position. None marks removed
        records, which an incarnation without ``keep_events`` had no need of.
        """
        try:
            found = [frames.opened(path) for path in sorted((self.path / LOG_FOLDER).glob(f"[0-9]*{frames.SUFFIX}"))]
        except OSError as error:
            raise InvalidValue("LOG", str(self.path), f"a log that can be read ({error.strerror})") from error
        segments = [segment for segment in found if segment is not None]
        end = 0
        for index, segment in enumerate(segments):
            following = segments[index + 1] if index + 1 < len(segments) else None
            if segment.base > end:
                yield f"{segment.path}", None
            for offset, body in frames.records(segment, following.base if following is not None else None):
                if segment.holes:
                    break
                if records.kind_of(body) in (records.Begun, records.Event):
                    record = records.decoded(body, segment.schema)
                    assert isinstance(record, records.Begun | records.Event)
                    yield f"{segment.path}: byte {offset}", record
            for hole in segment.holes[:1]:
                if following is not None or hole.offset < segment.last_write:
                    raise InvalidValue(str(hole.path), f"byte {hole.offset}", "whole: the file was damaged")
                self.torn_bytes = segment.size_bytes - hole.offset
            end = segment.end

    def _config(self, begun: records.Begun) -> Config:
        try:
            return validated(upgraded(json.loads(begun.config)))
        except InvalidValue as error:
            raise error.within(str(self.path)) from error


def read_log(path: Path) -> EventLog:
    """Opens a log: a state folder, or a file in the older format. Raises InvalidValue if it is neither, or newer, or
    its header cannot be read.
    """
    return FolderLog(path) if path.is_dir() else FileLog(path)


def _opened(path: Path) -> BufferedReader:
    try:
        stream = path.open("rb")
        preamble = stream.read(_PREAMBLE.size)
    except OSError as error:
        raise InvalidValue("LOG", str(path), f"an event log that can be read ({error.strerror})") from error
    magic, version = _PREAMBLE.unpack(preamble.ljust(_PREAMBLE.size, b"\0"))
    if magic != _MAGIC:
        stream.close()
        raise InvalidValue("LOG", str(path), KEPT)
    if version != FORMAT_VERSION:
        stream.close()
        raise InvalidValue(f"{path}: format version", version, f"{FORMAT_VERSION}; a newer DORA may read it")
    return stream


def _body(stream: BufferedReader, left_bytes: int, where: str) -> bytes | None:
    """The next record's body; None at the end of the log, torn or not. ``left_bytes``: from here to the file's end."""
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
        return Record(number, typed(float, now_s, "now_s"), event_from_fields(kind, values))
    except InvalidValue as error:
        raise error.within(where) from error
    except (ValueError, TypeError) as error:
        raise InvalidValue(where, repr(error), "[now_s, kind, fields] in msgpack") from error
