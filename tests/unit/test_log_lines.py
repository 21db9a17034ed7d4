"""The log as JSON lines."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora.client import Trainer
from dora.system.log_lines import WARNING_MAX, WARNINGS_MAX, JsonLines, LastWarnings, about
from tests.service import configured, running, train


def lines_of(formatter: JsonLines, message: str, *arguments: object, **named: Any) -> dict[str, Any]:
    """The object of one line."""
    record = logging.getLogger("dora.service").makeRecord(
        "dora.service", logging.WARNING, __file__, 1, message, arguments, named.pop("exc_info", None), None, **named
    )
    text = formatter.format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_its_moment_and_what_it_is_about() -> None:
    formatter = JsonLines()
    line = lines_of(formatter, "%s is gone: %s", "w3", 'killed "hard"', extra=about(worker="w3"))
    assert line.pop("time").endswith("+00:00")
    said = 'w3 is gone: killed "hard"'
    assert line == {"level": "warning", "logger": "dora.service", "message": said, "worker": "w3"}
    formatter.position = lambda: {"step": 7, "version": 7}
    assert lines_of(formatter, "two\nlines")["step"] == 7
    assert lines_of(formatter, "version 3", extra=about(version=3))["version"] == 3, "of its own"


def test_the_last_warnings_are_kept_and_a_flood_is_one() -> None:
    log = logging.getLogger("dora.of_a_test")
    kept = LastWarnings()
    log.addHandler(kept)
    log.info("all is well")
    log.error("a disk\nis full %s", "x" * WARNING_MAX)
    for _ in range(9):
        log.getChild("a_child").warning("w%d is slow", 3)
    (_, level, text), (_, *second) = kept.lines
    assert level == "error" and text.startswith("a disk is full x") and len(text) == WARNING_MAX
    assert second == ["warning", "w3 is slow"]
    for number in range(2 * WARNINGS_MAX):
        log.warning("another one, %d", number)
    assert len(kept.lines) == WARNINGS_MAX and kept.lines[-1][2] == f"another one, {2 * WARNINGS_MAX - 1}"
    log.removeHandler(kept)


def test_an_exception_is_within_its_line() -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        line = lines_of(JsonLines(), "failed", exc_info=sys.exc_info())
    assert "ValueError: bad" in line["exception"]


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The lines of the service's log, as objects."""
    found: list[dict[str, Any]] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(self.format(record)))

    handler, logger = Kept(), logging.getLogger("dora.service")
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)


async def test_a_services_lines_name_worker_step_and_version(tiny_dense: Path, lines: list[dict[str, Any]]) -> None:
    config = configured(tiny_dense, workers__engine="fake", workers__count=1, service__log_format="json")
    async with running(config) as handle, Trainer(handle.address, token=handle.token) as trainer:
        await train(handle, trainer, steps=2, groups=2)
        assert handle.position() == {"step": 2, "version": 2}
    assert [line["worker"] for line in lines if "joined" in line["message"]] == ["w0"]
    trained = [(line["step"], line["version"]) for line in lines if "is trained" in line["message"]]
    assert trained == [(0, 1), (1, 2)]
