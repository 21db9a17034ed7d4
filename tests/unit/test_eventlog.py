"""The event log's file: exact round trips of every event, crashes, damage, and logs of other versions."""

import dataclasses
import struct
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.config import upgraded, validated
from dora.core import events as on
from dora.errors import InvalidValue
from dora.journal import frames, records
from dora.orchestrator.recording.event_fields import EVENT_KINDS, event_from_fields, event_to_fields
from dora.orchestrator.recording.eventlog import read_log
from tests.eventlogs import FileWriter, FolderWriter, framed
from tests.refusals import data_words, refused

PREAMBLE_BYTES = 10
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


def write(path: Path, *events: on.Event) -> Path:
    """A log of these events, one a second from 100.5 s on."""
    with FileWriter(path, CONFIG, now_s=100.0) as writer:
        for number, event in enumerate(events):
            writer.append(event, 100.5 + number)
    return path


def append(path: Path, body: object) -> Path:
    """Adds a record with a good checksum, as another version of DORA might write it."""
    with path.open("ab") as stream:
        stream.write(framed(msgpack.packb(body)))
    return path


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


def test_a_log_comes_back_with_its_header(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "log", *EVENTS))
    assert log.config == validated({"window": {"size": 3}}), "the token stays out"
    assert log.now_s == 100.0 and log.started_at > 1.7e9
    for _ in range(2):  # it may be read again
        assert [record.event for record in log] == list(EVENTS)
        assert [(record.number, record.now_s) for record in log] == [(1, 100.5), (2, 101.5), (3, 102.5), (4, 103.5)]
    assert log.torn_bytes == 0
    assert b"correct-horse" not in (tmp_path / "log").read_bytes()


def test_the_dicts_of_an_event_may_be_filled_until_it_is_appended(tmp_path: Path) -> None:
    """The shell makes a report first and fills it then: what is logged is what the core gets."""
    with FileWriter(tmp_path / "log", CONFIG, now_s=0.0) as writer:
        report = on.Progress("w0", 1, 0)
        report.tokens["g0.0"] = 3
        writer.append(report, 1.0)
        report.tokens["g0.0"] = 4
    assert [record.event for record in read_log(tmp_path / "log")] == [on.Progress("w0", 1, 0, {"g0.0": 3})]


def test_a_reason_that_quotes_a_strange_file_name_can_be_logged(tmp_path: Path) -> None:
    lost = on.WorkerLost("w0", 1, b"no file \xff".decode(errors="surrogateescape"))
    assert [record.event for record in read_log(write(tmp_path / "log", lost))] == [lost]


def test_fields_that_an_older_log_does_not_have_take_their_defaults(tmp_path: Path) -> None:
    old = append(write(tmp_path / "log"), (1.0, "CommandDone", {"worker_id": "w0", "epoch": 1, "command_id": 7}))
    append(old, (2.0, "PromptsOffered", {"prompts": [event_to_fields(EVENTS[1])[1]["prompts"][0]]}))
    done, offered = (record.event for record in read_log(old))
    assert done == on.CommandDone("w0", 1, 7)
    assert offered == on.PromptsOffered(EVENTS[1].prompts)  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------- crash and damage


def test_a_log_cut_short_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    whole = write(tmp_path / "log", *EVENTS).read_bytes()
    begins = len(write(tmp_path / "empty").read_bytes())
    for size in range(begins, len(whole)):
        (tmp_path / "torn").write_bytes(whole[:size])
        log = read_log(tmp_path / "torn")
        events = [record.event for record in log]
        assert events == list(EVENTS[: len(events)]) and len(events) < len(EVENTS)
        kept = len(write(tmp_path / f"kept{size}", *events).read_bytes())
        assert log.torn_bytes == size - kept


@pytest.mark.parametrize("size", [0, 4, PREAMBLE_BYTES, PREAMBLE_BYTES + 5, PREAMBLE_BYTES + 100])
def test_a_log_without_a_whole_header_is_none(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "log")
    path.write_bytes(path.read_bytes()[:size])
    known = {"field": path} if size >= PREAMBLE_BYTES else {"field": "LOG", "value": path}
    with refused(InvalidValue, **known):
        read_log(path)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """In a length as in a checksum or a body: nothing that was changed is passed off as an event, or as an end."""
    whole = write(tmp_path / "log", *EVENTS).read_bytes()
    last = len(write(tmp_path / "but-one", *EVENTS[:-1]).read_bytes())
    begins = len(write(tmp_path / "empty").read_bytes())
    for at in range(begins, last):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "damaged").write_bytes(damaged)
        with refused(InvalidValue, names=("record", "checksum")):
            list(read_log(tmp_path / "damaged"))


def test_damage_is_told_with_its_place_and_what_came_before_can_be_read(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "log", *EVENTS).read_bytes())
    second = len(write(tmp_path / "one", EVENTS[0]).read_bytes())
    whole[second + 20] ^= 1
    (tmp_path / "log").write_bytes(whole)
    records = iter(read_log(tmp_path / "log"))
    assert next(records).event == EVENTS[0]
    with refused(InvalidValue, names=(second,)):
        next(records)


# ----------------------------------------------------------------------------------------------------- other versions


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log", *EVENTS)
    newer = bytearray(path.read_bytes())
    newer[8:10] = struct.pack("<H", 2)
    path.write_bytes(newer)
    with refused(InvalidValue, value=2, names=("1",)):
        read_log(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            (1.0, "Teleported", {}),
            r"record 1 at byte \d+: kind = 'Teleported' is not valid: it must be one of PromptsOffered, .*newer",
        ),
        ((1.0, "Tick", {"colour": 1}), r"Tick = 'colour' is not valid: it must be fields \(none\); a newer"),
        ((1.0, "StepRequested", {"step": 1}), r"StepRequested.trainer_epoch is missing: .* no default"),
        ((1.0, "StepRequested", {"step": "1", "trainer_epoch": 1}), r"StepRequested.step = '1' .* type int"),
        ((1.0, "RequestScored", {"request_id": 1}), r"RequestScored.request_id = 1 .* type str"),
        ((1.0, "PromptsOffered", {"prompts": [{"prompt_id": "p"}]}), r"PromptsOffered.prompts\[0\].task_id is missing"),
        ((1.0, "PromptsOffered", {"prompts": [], "exhausted": 1}), r"exhausted = 1 .* type bool"),
        ((1.0, "Progress", {"worker_id": "w", "epoch": 1, "version": 0, "finished": {"g": "bored"}}), r"'bored'"),
        ((1.0, "Progress", {"worker_id": "w", "epoch": 1, "version": 0, "tokens": [1]}), r"tokens = \[1\] .* dict"),
        (("now", "Tick", {}), r"now_s = 'now' .* type float"),
        ((1.0, "Tick"), r"record 1 at byte \d+ = .* \[now_s, kind, fields\]"),
        ((1.0, "Tick", None), r"record 1 at byte \d+"),
        ((1.0, ["Tick"], {}), r"record 1 at byte \d+"),
        (7, r"record 1 at byte \d+"),
    ],
)
def test_what_this_version_does_not_know_is_told(tmp_path: Path, body: object, message: str) -> None:
    with refused(InvalidValue, names=data_words(message)):
        list(read_log(append(write(tmp_path / "log"), body)))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {"config": '{"window": {"sise": 3}}', "started_at": 1.0, "now_s": 0.0},
            r"window.sise = 3 .*did you mean size",
        ),
        ({"config": "{", "started_at": 1.0, "now_s": 0.0}, r"record 0 at byte 10"),
        ({"config": "{}", "started_at": 1.0}, r"record 0 at byte 10 = .*now_s"),
        ([], r"record 0 at byte 10"),
    ],
)
def test_a_header_that_cannot_be_read_is_told(tmp_path: Path, header: object, message: str) -> None:
    path = write(tmp_path / "log")
    path.write_bytes(path.read_bytes()[:PREAMBLE_BYTES] + framed(msgpack.packb(header)))
    with refused(InvalidValue, names=data_words(message)):
        read_log(path)


@pytest.mark.parametrize("content", [b"", b'{"trajectory_id": "g0.0"}\n', b"PK\x03\x04 something else"])
def test_other_files_are_no_logs(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with refused(InvalidValue, field="LOG"):
        read_log(tmp_path / "file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(InvalidValue, field="LOG"):
        read_log(tmp_path / "nothing")


# ------------------------------------------------------------------------------------------------------ state folders


def kept(folder: Path, *events: on.Event) -> Path:
    """A state folder with these events, one a second from 100.5 s on."""
    with FolderWriter(folder, CONFIG, now_s=100.0) as writer:
        for number, event in enumerate(events):
            writer.append(event, 100.5 + number)
    return folder


def segment(folder: Path) -> Path:
    return folder / "log" / "00000001.seg"


def test_a_state_folder_is_a_log(tmp_path: Path) -> None:
    log = read_log(kept(tmp_path, *EVENTS))
    assert log.config == validated({"window": {"size": 3}}), "the token stays out"
    assert log.now_s == 100.0 and log.started_at == 1.8e9
    for _ in range(2):  # it may be read again
        assert [record.event for record in log] == list(EVENTS)
        assert [(record.number, record.now_s) for record in log] == [(1, 100.5), (2, 101.5), (3, 102.5), (4, 103.5)]
    assert log.torn_bytes == 0


def test_a_state_folder_without_events_is_none(tmp_path: Path) -> None:
    with refused(InvalidValue, field="LOG", names=("service.keep_events",)):
        read_log(kept(tmp_path))
    with refused(InvalidValue, field="LOG"):
        read_log(tmp_path / "log")


def test_each_life_begins_with_its_configuration(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path, CONFIG)
    writer.append(on.Tick(), 1.0)
    writer.write(records.Begun(1, 1.8e9, 50.0, '{"window": {"size": 4}}'))
    writer.append(on.Tick(), 51.0)
    log = read_log(tmp_path)
    assert log.config.window.size == 3
    assert [record.config.window.size for record in log if record.config is not None] == [3, 4]


def test_events_of_a_life_whose_beginning_is_gone_are_passed_over(tmp_path: Path) -> None:
    """A later life that kept less has let its segment go."""
    kept(tmp_path, *EVENTS)
    end = segment(tmp_path).stat().st_size
    body = records.encoded(records.Event(1.0, *event_to_fields(on.Tick())))
    following = segment(tmp_path).with_name("00000003.seg")
    following.write_bytes(frames.header(3, end + 1000) + frames.framed(body, 0) + body)
    assert [record.event for record in read_log(tmp_path)] == list(EVENTS)


def test_a_state_folder_cut_short_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    path = segment(kept(tmp_path, *EVENTS))
    whole, begins = path.read_bytes(), segment(kept(tmp_path / "one", EVENTS[0])).stat().st_size
    for size in range(begins, len(whole)):
        path.write_bytes(whole[:size])
        log = read_log(tmp_path)
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
            list(read_log(tmp_path))


def test_the_setting_of_before_is_refused_with_what_is_in_its_place() -> None:
    with refused(InvalidValue, field="service.event_log", value="x", names=("service.keep_events",)):
        validated({"service": {"event_log": "x"}})
    assert upgraded({"service": {"event_log": "x", "tick_s": 1.0}}) == {"service": {"tick_s": 1.0}}
