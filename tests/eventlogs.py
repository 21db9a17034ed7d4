"""Event logs for tests, in a state folder."""

from pathlib import Path
from typing import Self

from dora.config import Config
from dora.core import events as on
from dora.journal import frames, records
from dora.journal.log import LOG_FOLDER
from dora.orchestrator.recording.event_fields import event_to_fields


class FolderWriter:
    """A state folder with the events of one life."""

    def __init__(self, folder: Path, config: Config, *, now_s: float = 0.0) -> None:
        self._path = frames.path_of(folder / LOG_FOLDER, 1)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(frames.header(1, 0))
        tree = config.model_dump_json(exclude={"service": {"token"}})
        self.write(records.Begun(0, 1.8e9, now_s, tree))

    def write(self, record: records.LogRecord) -> None:
        body = records.encoded(record)
        with self._path.open("ab") as stream:
            stream.write(frames.head(records.CODE[type(record)], body, 0) + body)

    def append(self, event: on.Event, now_s: float) -> None:
        self.write(records.Event(now_s, *event_to_fields(event)))

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...
