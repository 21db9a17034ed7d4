"""The event log: every event of a service's core, in order, with its time, for replays.

It is part of the log in the state folder (dora/journal) if ``service.keep_events`` is set. Each incarnation begins
there with its configuration, and all but the first with the event ``Restored``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.config import Config, validated
from dora.core import events as on
from dora.errors import InvalidValue
from dora.journal import frames, records
from dora.journal.log import LOG_FOLDER
from dora.orchestrator.recording.event_fields import event_from_fields

KEPT: Final = "a state folder of a service with service.keep_events"


@dataclass(frozen=True, slots=True)
class Record:
    """Holds an event of a log, its ``number`` from 1, and ``now_s`` on the service's clock.

    ``config`` is its incarnation's, or None if the log has a single one.
    """

    number: int
    now_s: float
    event: on.Event
    config: Config | None = None


class EventLog:
    """Reads the events in a state folder's log. It may be read while the service writes.

    Iteration yields its Records in order, one at a time in memory, as often as needed. It raises InvalidValue, with the
    file, the byte offset and the reason, for a record that is damaged or unknown. A torn end, as after a crash, is
    skipped; ``torn_bytes`` has its size after the iteration. The first incarnation began at ``started_at`` seconds
    since the Unix epoch, which its clock shows as ``now_s``.
    """

    def __init__(self, path: Path) -> None:
        """Raises InvalidValue for a folder without events, or of another release."""
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
        """Yields the first incarnation whose events are complete."""
        begun: records.Begun | None = None
        for _, record in self._logged():
            if record is None or isinstance(record, records.Begun):
                begun = record
            elif begun is not None:
                yield begun

    def _logged(self) -> Iterator[tuple[str, records.Begun | records.Event | None]]:
        """Yields begins of incarnations and events, each with a description of its position, or None for removed
        records, which an incarnation without ``keep_events`` did not need.
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
            for offset, code, body in frames.records(segment, following.base if following is not None else None):
                if segment.holes:
                    break
                if records.KINDS[code] in (records.Begun, records.Event):
                    record = records.decoded(code, body)
                    assert isinstance(record, records.Begun | records.Event)
                    yield f"{segment.path}: byte {offset}", record
            for hole in segment.holes[:1]:
                if following is not None or hole.offset < segment.last_write:
                    raise InvalidValue(str(hole.path), f"byte {hole.offset}", "whole: the file was damaged")
                self.torn_bytes = segment.size_bytes - hole.offset
            end = segment.end

    def _config(self, begun: records.Begun) -> Config:
        try:
            return validated(json.loads(begun.config))
        except InvalidValue as error:
            raise error.within(str(self.path)) from error
