"""The event log: exact round trips of every event, crashes, damage, and what it does not know."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.config import validated
from dora.core import events as on
from dora.errors import InvalidValue
from dora.journal import frames, records
from dora.orchestrator.recording.event_fields import EVENT_KINDS, event_from_fields, event_to_fields
from dora.orchestrator.recording.eventlog import EventLog
from tests.eventlogs import FolderWriter
from tests.refusals import data_words, refused

PROGRESS = event_to_fields(on.Progress("w", 1, 0))[1]
SCORED = event_to_fields(on.RequestScored("g0.0"))[1]
CONFIG = validated({"window": {"size": 3}, "service": {"token": "correct-horse"}})
EVENTS: tuple[on.Event, ...] = (
    on.WorkerJoined("w0", 1, 8, 4096),
    on.PromptsOffered((on.OfferedPrompt("p0", "sum", 7, 2, 64),), exhausted=True),
    on.Progress("w0", 1, 0, {"g0.0": 3, "g0.1": 5}, {"g0.1": "stop"}, 1, 99),
    on.Tick(),
)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, as events use them."""
    origin, parts = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: of(part) for name, part in get_type_hints(hint).items()})
    if origin is tuple:
        return st.lists(of(parts[0]), max_size=4).map(tuple)
    if origin is dict:
        return st.dictionaries(of(parts[0]), of(parts[1]), max_size=4)
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is np.ndarray:
        dtype = get_args(parts[1])[0]
        numbers = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        return st.lists(numbers, max_size=4).map(lambda column: np.array(column, dtype))
    if hint is int:
        return st.integers(-(1 << 63), (1 << 64) - 1)
    return st.floats(allow_nan=False) if hint is float else st.from_type(hint)


def kept(folder: Path, *events: on.Event) -> Path:
    """A state folder with these events, one a second from 100.5 s on."""
    with FolderWriter(folder, CONFIG, now_s=100.0) as writer:
        for number, event in enumerate(events):
            writer.append(event, 100.5 + number)
    return folder


def segment(folder: Path) -> Path:
    return folder / "log" / "00000001.seg"


# -------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("kind", EVENT_KINDS.values())
def test_every_event_comes_back_exactly(kind: type) -> None:
    @given(of(kind))
    def comes_back(event: on.Event) -> None:
        name, values = event_to_fields(event)
        read = event_from_fields(name, msgpack.unpackb(msgpack.packb(values)))
        assert read == event
        assert repr(read) == repr(event), "nor does a number change its type, or a dict its order"

    comes_back()


def test_the_dicts_of_an_event_may_be_filled_until_it_is_appended(tmp_path: Path) -> None:
    """The shell makes a report first and fills it then: what is logged is what the core gets."""
    with FolderWriter(tmp_path, CONFIG) as writer:
        report = on.Progress("w0", 1, 0)
        report.tokens["g0.0"] = 3
        writer.append(report, 1.0)
        report.tokens["g0.0"] = 4
    assert [record.event for record in EventLog(tmp_path)] == [on.Progress("w0", 1, 0, {"g0.0": 3})]


def test_a_reason_that_quotes_a_strange_file_name_can_be_logged(tmp_path: Path) -> None:
    lost = on.WorkerLost("w0", 1, b"no file \xff".decode(errors="surrogateescape"))
    assert [record.event for record in EventLog(kept(tmp_path, lost))] == [lost]


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("Teleported", {}, r"00000001.seg: byte \d+: kind = 'Teleported' is not valid: it must be one of Prompts"),
        ("Tick", {"colour": 1}, r"Tick = 'colour' is not valid: it must be fields \(none\)"),
        ("StepRequested", {"step": 1}, r"StepRequested = 'trainer_epoch'"),
        ("StepRequested", {"step": "1", "trainer_epoch": 1}, r"StepRequested.step"),
        ("RequestScored", SCORED | {"request_id": 1}, r"RequestScored.request_id"),
        ("PromptsOffered", {"prompts": [{"prompt_id": "p"}], "exhausted": True}, r"PromptsOffered.prompts\[0\]"),
        ("PromptsOffered", {"prompts": [], "exhausted": 1}, r"PromptsOffered.exhausted"),
        ("Progress", PROGRESS | {"finished": {"g": "bored"}}, r"'bored'"),
        ("Progress", PROGRESS | {"tokens": [1]}, r"Progress.tokens"),
    ],
)
def test_an_unknown_event_is_told(tmp_path: Path, kind: str, values: dict[str, Any], message: str) -> None:
    with FolderWriter(tmp_path, CONFIG) as writer:
        writer.write(records.Event(1.0, kind, values))
    with refused(InvalidValue, names=data_words(message)):
        list(EventLog(tmp_path))


def test_a_configuration_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path, CONFIG)
    writer.write(records.Begun(1, 1.8e9, 50.0, '{"window": {"sise": 3}}'))
    writer.append(on.Tick(), 1.0)
    with refused(InvalidValue, names=("window.sise", "size")):
        list(EventLog(tmp_path))


@pytest.mark.parametrize("content", [b"", b'{"trajectory_id": "g0.0"}\n', b"PK\x03\x04 something else"])
def test_other_files_are_no_logs(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with refused(InvalidValue, field="LOG"):
        EventLog(tmp_path / "file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(InvalidValue, field="LOG"):
        EventLog(tmp_path / "nothing")


def test_a_state_folder_is_a_log(tmp_path: Path) -> None:
    log = EventLog(kept(tmp_path, *EVENTS))
    assert log.config == validated({"window": {"size": 3}}), "the token stays out"
    assert log.now_s == 100.0 and log.started_at == 1.8e9
    for _ in range(2):  # it may be read again
        assert [record.event for record in log] == list(EVENTS)
        assert [(record.number, record.now_s) for record in log] == [(1, 100.5), (2, 101.5), (3, 102.5), (4, 103.5)]
    assert log.torn_bytes == 0


def test_a_state_folder_without_events_is_none(tmp_path: Path) -> None:
    with refused(InvalidValue, field="LOG", names=("service.keep_events",)):
        EventLog(kept(tmp_path))
    with refused(InvalidValue, field="LOG"):
        EventLog(tmp_path / "log")


def test_each_life_begins_with_its_configuration(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path, CONFIG)
    writer.append(on.Tick(), 1.0)
    writer.write(records.Begun(1, 1.8e9, 50.0, '{"window": {"size": 4}}'))
    writer.append(on.Tick(), 51.0)
    log = EventLog(tmp_path)
    assert log.config.window.size == 3
    assert [record.config.window.size for record in log if record.config is not None] == [3, 4]


def test_events_of_a_life_whose_beginning_is_gone_are_passed_over(tmp_path: Path) -> None:
    """A later life that kept less has let its segment go."""
    kept(tmp_path, *EVENTS)
    end = segment(tmp_path).stat().st_size
    body = records.encoded(records.Event(1.0, *event_to_fields(on.Tick())))
    following = segment(tmp_path).with_name("00000003.seg")
    following.write_bytes(frames.header(3, end + 1000) + frames.head(records.CODE[records.Event], body, 0) + body)
    assert [record.event for record in EventLog(tmp_path)] == list(EVENTS)


def test_a_state_folder_cut_short_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    path = segment(kept(tmp_path, *EVENTS))
    whole, begins = path.read_bytes(), segment(kept(tmp_path / "one", EVENTS[0])).stat().st_size
    for size in range(begins, len(whole)):
        path.write_bytes(whole[:size])
        log = EventLog(tmp_path)
        events = [record.event for record in log]
        assert events == list(EVENTS[: len(events)]) and len(events) < len(EVENTS)
        assert log.torn_bytes == size - segment(kept(tmp_path / f"kept{size}", *events)).stat().st_size


def test_damage_of_a_state_folder_is_told_with_its_place(tmp_path: Path) -> None:
    path = segment(kept(tmp_path, *EVENTS))
    whole = path.read_bytes()
    begins, last = (segment(kept(tmp_path / f"{n}", *EVENTS[:n])).stat().st_size for n in (1, len(EVENTS) - 1))
    for at in range(begins, last):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with refused(InvalidValue, field="00000001.seg", names=("byte",)):
            list(EventLog(tmp_path))
