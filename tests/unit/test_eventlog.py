"""The event log's file: exact round trips of every event, crashes, damage, and logs of other versions."""

import dataclasses
import errno
import struct
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.config import Config, validated
from dora.errors import InvalidValue
from dora.orchestrator import eventlog
from dora.orchestrator.core import events as on
from dora.orchestrator.eventlog import (
    EVENT_KINDS,
    FLUSH_RECORDS,
    EventLogWriter,
    event_from_fields,
    event_to_fields,
    framed,
    read_log,
)
from tests.abuse.full import files_up_to

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
    if hint is int:
        return st.integers(-(1 << 63), (1 << 64) - 1)
    return st.floats(allow_nan=False) if hint is float else st.from_type(hint)


def write(path: Path, *events: on.Event) -> Path:
    """A log of these events, one a second from 100.5 s on."""
    with EventLogWriter(path, CONFIG, now_s=100.0) as writer:
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
    with EventLogWriter(tmp_path / "log", CONFIG, now_s=0.0) as writer:
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


# ------------------------------------------------------------------------------------------------------------ writing


def test_events_reach_the_disk_by_number_and_by_time(tmp_path: Path) -> None:
    writer = EventLogWriter(tmp_path / "log", CONFIG, now_s=0.0)
    log = read_log(tmp_path / "log")
    for _ in range(FLUSH_RECORDS - 1):
        writer.append(on.Tick(), 0.5)
    assert len(list(log)) == 0
    writer.append(on.Tick(), 0.5)
    assert len(list(log)) == FLUSH_RECORDS
    writer.append(on.Tick(), 1.5)
    assert len(list(log)) == FLUSH_RECORDS + 1, "the last write was a second ago"
    writer.append(on.Tick(), 1.5)
    writer.close()
    writer.close()
    assert len(list(log)) == FLUSH_RECORDS + 2


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    before = write(tmp_path / "log", *EVENTS).read_bytes()
    with pytest.raises(
        InvalidValue, match=r"service.event_log = '.*log' is not valid: it must be a file that does not exist yet"
    ):
        EventLogWriter(tmp_path / "log", CONFIG, now_s=0.0)
    assert (tmp_path / "log").read_bytes() == before


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="No such file or directory"):
        EventLogWriter(tmp_path / "nowhere" / "log", CONFIG, now_s=0.0)


def test_on_a_full_disk_events_wait_until_there_is_room(tmp_path: Path) -> None:
    writer = EventLogWriter(tmp_path / "log", CONFIG, now_s=0.0)
    with files_up_to((tmp_path / "log").stat().st_size + 100):
        for number in range(3 * FLUSH_RECORDS):
            writer.append(on.Tick(), 0.001 * number)
        error = writer.write_again()
        assert error is not None and error.errno == errno.EFBIG
        log = read_log(tmp_path / "log")
        assert 1 <= len(list(log)) <= 4 and log.torn_bytes > 0
    assert writer.write_again() is None
    writer.append(on.Tick(), 9.0)
    writer.close()
    log = read_log(tmp_path / "log")
    assert len(list(log)) == 3 * FLUSH_RECORDS + 1 and not log.torn_bytes


def test_what_waits_is_bounded_and_what_was_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eventlog, "WAITING_BYTES_MOST", 10_000)
    writer = EventLogWriter(tmp_path / "log", CONFIG, now_s=0.0)
    with files_up_to((tmp_path / "log").stat().st_size + 100):
        for number in range(20 * FLUSH_RECORDS):
            writer.append(on.WorkerLost("w0", 1, "because"), 0.001 * number)
        assert writer.write_again() is None, "it is given up: nothing waits for it"
    writer.close()
    assert caplog.text.count("ends here, of what waits: File too large") == 1
    assert 1 <= len(list(read_log(tmp_path / "log"))) <= 4


def test_a_new_log_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    with files_up_to(100), pytest.raises(InvalidValue, match="File too large"):
        EventLogWriter(tmp_path / "log", CONFIG, now_s=0.0)
    assert not (tmp_path / "log").exists()


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
    with pytest.raises(InvalidValue, match="log"):
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
        with pytest.raises(InvalidValue, match=r"damaged: record [123] at byte \d+ = .* the file was damaged"):
            list(read_log(tmp_path / "damaged"))


def test_damage_is_told_with_its_place_and_what_came_before_can_be_read(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "log", *EVENTS).read_bytes())
    second = len(write(tmp_path / "one", EVENTS[0]).read_bytes())
    whole[second + 20] ^= 1
    (tmp_path / "log").write_bytes(whole)
    records = iter(read_log(tmp_path / "log"))
    assert next(records).event == EVENTS[0]
    with pytest.raises(
        InvalidValue, match=rf"log: record 2 at byte {second} = '[0-9a-f]{{8}}' is not valid: it must be checksum"
    ):
        next(records)


# ----------------------------------------------------------------------------------------------------- other versions


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log", *EVENTS)
    newer = bytearray(path.read_bytes())
    newer[8:10] = struct.pack("<H", 2)
    path.write_bytes(newer)
    with pytest.raises(InvalidValue, match=r"format version = 2 is not valid: it must be 1; a newer DORA"):
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
    with pytest.raises(InvalidValue, match=message):
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
    with pytest.raises(InvalidValue, match=message):
        read_log(path)


@pytest.mark.parametrize("content", [b"", b'{"trajectory_id": "g0.0"}\n', b"PK\x03\x04 something else"])
def test_other_files_are_no_logs(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InvalidValue, match=r"LOG = '.*file' is not valid: it must be an event log"):
        read_log(tmp_path / "file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"LOG = '.*nothing' .*No such file"):
        read_log(tmp_path / "nothing")


def test_the_default_configuration_writes_no_log() -> None:
    assert Config().service.event_log == ""
