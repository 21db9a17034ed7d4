"""The log as JSON lines: one object a line, for a log store that searches by field.

Beside time, level, logger and message a line has the step and version of its moment, and the worker, host, session or
request that it is about (``about``).
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
JSON: Final = "json"
_ABOUT: Final = "dora_about"
WARNING_MAX: Final = 300  # characters of one that is kept
WARNINGS_MAX: Final = 8

Position = Callable[[], Mapping[str, int]]


def about(**fields: str | int) -> dict[str, Any]:
    """Returns the argument ``extra`` of a log call: the step, version, worker, host, session or request of its line."""
    return {_ABOUT: fields}


class JsonLines(logging.Formatter):
    """Formats each line as a JSON object. ``position`` gives the present step and version once they are known."""

    def __init__(self) -> None:
        super().__init__()
        self.position: Position = dict

    def format(self, record: logging.LogRecord) -> str:
        tree: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.position(),
            **getattr(record, _ABOUT, {}),
        }
        if record.exc_info:
            tree["exception"] = self.formatException(record.exc_info)
        return json.dumps(tree, ensure_ascii=False)


class LastWarnings(logging.Handler):
    """Keeps time, level and text of a logger's last warnings, the newest last; of a repeated one, the last time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=WARNINGS_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())[:WARNING_MAX]
        if self.lines and self.lines[-1][2] == text:
            self.lines.pop()
        self.lines.append((record.created, record.levelname.lower(), text))


def formatter_of(log_format: str) -> logging.Formatter:
    return JsonLines() if log_format == JSON else logging.Formatter(TEXT)
