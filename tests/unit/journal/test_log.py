"""The log and its ledger: what was told is found again, after a stop, a crash, compaction, disk faults, damage."""

import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal import content, frames, records
from dora.journal import log as journal_log
from dora.journal.content import Content
from dora.journal.finding import LEDGER_FILE, find
from dora.journal.log import LOG_FOLDER, Sizes
from tests.abuse.full import files_up_to
from tests.refusals import refused
from tests.unit.journal.incarnations import SMALL, Incarnation, Known, check, flip, forget_ledger, opened, until


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / LOG_FOLDER).iterdir())


async def test_a_new_folder_has_nothing(tmp_path: Path) -> None:
    found = find(tmp_path / "new")
    assert found.is_new and not found.groups and not found.said and found.position == 0
    found.ledger.close()


@pytest.mark.parametrize("ledger", [True, False], ids=["with its ledger", "from the log alone"])
async def test_lives_follow_each_other(tmp_path: Path, ledger: bool) -> None:
    known = Known()
    for incarnation in range(4):
        found, log = opened(tmp_path)
        assert found.said == [] and found.ledger.values["life"] == incarnation - 1
        check(found, known)
        log.append(records.Begun(incarnation, 1.0, 2.0, "{}"))
        told = Incarnation(log.append, known, incarnation)
        for _ in range(3):
            told.step()
        told.report()
        await log.close()
        if not ledger:
            forget_ledger(tmp_path)
    found, log = opened(tmp_path)
    check(found, known)
    await log.close()


async def test_what_is_waited_for_is_on_disk(tmp_path: Path) -> None:
    _, log = opened(tmp_path, Sizes(flush_s=1000.0))
    told = Incarnation(log.append, Known())
    told.step()
    assert log.durable < log.appended
    await log.settled()
    assert log.durable == log.appended
    shutil.copytree(tmp_path / LOG_FOLDER, tmp_path / "copy" / LOG_FOLDER)
    copy = find(tmp_path / "copy")
    check(copy, told.known)
    copy.ledger.close()
    await log.close()


async def test_the_log_stays_small(tmp_path: Path) -> None:
    """However much is told: at most twice what is alive, and two segments; a write may go over a segment's end."""
    _, log = opened(tmp_path)
    told = Incarnation(log.append, Known())
    for step in range(60):
        told.step()
        if step % 10 == 9:
            size = await log.checkpoint()
            assert size.log_bytes <= 2 * size.live_bytes + 2 * (SMALL.segment_bytes + 2 * SMALL.flush_bytes)
            assert size.segments == len(list((tmp_path / LOG_FOLDER).iterdir()))
            assert size.log_bytes == size_of(tmp_path)
    await log.close()
    found, log = opened(tmp_path)
    check(found, told.known)
    await log.close()


@pytest.mark.parametrize("late_s", [0.0, 3600.0], ids=["at once", "late"])
@pytest.mark.parametrize("ledger", [True, False], ids=["with its ledger", "from the log alone"])
async def test_what_is_alive_in_old_segments_is_written_anew(
    tmp_path: Path, ledger: bool, late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is never trained on outlives many segments, and is found whole; so is a queued prompt.

    Those that have been trained on stay away, however far the ledger is behind.
    """
    monkeypatch.setattr(journal_log, "LEDGER_S", late_s)
    sizes = replace(SMALL, segment_bytes=1500)
    _, log = opened(tmp_path, sizes)
    told = Incarnation(log.append, Known())
    queued = [Prompt("waits", "sum", (1, 2), "text", 1, {"stop": ("a", "b")}), Prompt("goes", "sum", (3,))]
    log.append(records.Submitted([1, 2], [records.prompt_values(prompt) for prompt in queued]))
    kept = told.admit()
    told.report()
    slow = {number: told.known.tokens.pop(number) for number in (kept, kept + 1)}  # nothing more is reported of them
    log.append(records.PromptsWithdrawn([2], [], ["goes"]))
    for step in range(40):
        told.step()
        if step % 10 == 0:
            queued.append(Prompt(f"waits{step}", "sum", (1, 2)))
            log.append(records.Submitted([3 + step], [records.prompt_values(queued[-1])]))
        await log.settled()
    size = await log.checkpoint()
    assert size.log_bytes <= 2 * size.live_bytes + 2 * (sizes.segment_bytes + sizes.flush_bytes)
    assert size.segments <= 4, "there was something alive in six"
    await log.close()
    told.known.tokens |= slow
    if not ledger:
        forget_ledger(tmp_path)
    found, log = opened(tmp_path)
    check(found, told.known)
    assert [prompt for _, prompt in found.ledger.queued()] == [queued[0], *queued[2:]]
    assert found.groups[0].number == kept and found.groups[0].rows == (0, 1)
    await log.close()


@pytest.mark.parametrize("ledger", [True, False], ids=["with its ledger", "from the log alone"])
async def test_a_start_holds_no_more_than_what_is_alive(
    tmp_path: Path, ledger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No segment is deleted: each has groups that are alive at its end, and trained on later."""
    monkeypatch.setattr(content, "SIFT_BYTES", 100_000)
    sizes = replace(SMALL, segment_bytes=100_000, compacts=False)
    _, log = opened(tmp_path, sizes)
    told = Incarnation(log.append, Known())
    for number in range(0, 400, 2):
        told.admit()
        zeros = np.zeros(8192)
        log.append(records.Tokens(1.0, np.array([number]), np.array([0]), np.array([8192]), zeros[:0], zeros, zeros))
        log.append(records.Leased(number, number // 4))
        if number % 4 == 2 and number > 6:
            log.append(records.Committed(number // 4 - 1, b"digest", 1.0, {}, ""))
        await log.settled()
    await log.close()
    assert size_of(tmp_path) > 13_000_000
    if not ledger:
        forget_ledger(tmp_path)
    tracemalloc.start()
    found = find(tmp_path, sizes)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    found.ledger.close()
    assert found.requests.counts.tolist() == len(found.groups) * [8192, 0] and found.groups
    assert peak_bytes < 3_000_000


# ------------------------------------------------------------------------------------------------- faults of the disk


async def test_without_room_nothing_is_lost_and_it_goes_on(tmp_path: Path) -> None:
    faults: list[OSError | None] = []
    _, log = opened(tmp_path, faults=faults)
    told = Incarnation(log.append, Known())
    told.step()
    await log.settled()
    with files_up_to(1000):
        told.step()
        told.step()
        waiting = log.settled()
        log.try_again()
        await until(lambda: bool(faults))
        assert log.durable < log.appended
        log.try_again()
    log.try_again()
    await waiting
    await until(lambda: faults[-1] is None)
    assert isinstance(faults[0], OSError) and faults[0].strerror == "File too large"
    told.step()
    await log.close()
    found, log = opened(tmp_path)
    assert found.said == []
    check(found, told.known)
    await log.close()


async def test_a_service_that_ends_without_room_keeps_what_was_acknowledged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, log = opened(tmp_path)
    told = Incarnation(log.append, Known())
    told.step()
    await log.settled()
    with files_up_to(100):
        log.append(records.WorkerBegan(7))
        await log.close()
    assert "lacks its last 1 facts" in caplog.text
    found, log = opened(tmp_path)
    check(found, told.known)
    await log.close()


async def test_a_disk_that_is_too_slow_is_at_fault_until_it_has_caught_up(tmp_path: Path) -> None:
    faults: list[OSError | None] = []
    _, log = opened(tmp_path, Sizes(behind_bytes=2000, flush_s=1000.0), faults)
    told = Incarnation(log.append, Known())
    for _ in range(6):
        told.step()
    assert faults[0] is journal_log.BEHIND
    await log.settled()
    await until(lambda: faults[-1] is None)
    await log.close()


# --------------------------------------------------------------------------------------------------- crash and damage


async def recorded(folder: Path, steps: int = 4) -> Known:
    """A folder with several segments, as a service leaves it that was stopped."""
    _, log = opened(folder, replace(SMALL, compacts=False))
    log.append(records.Begun(0, 1.0, 2.0, "{}"))
    told = Incarnation(log.append, Known())
    for _ in range(steps):
        told.step()
        told.admit()
        await log.settled()
    for _ in range(3):
        told.report()
        await log.settled()
    await log.close()
    return told.known


def segment_of(path: Path) -> frames.LogSegment:
    segment = frames.opened(path)
    assert segment is not None
    return segment


def segments(folder: Path) -> list[Path]:
    return sorted((folder / LOG_FOLDER).iterdir())


async def test_what_a_crash_cut_short_is_cut_off_and_said(tmp_path: Path) -> None:
    await recorded(tmp_path / "whole")
    last = segments(tmp_path / "whole")[-1]
    whole = last.read_bytes()
    for size in range(0, len(whole), 37):
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole" / LOG_FOLDER, folder / LOG_FOLDER)
        (folder / LOG_FOLDER / last.name).write_bytes(whole[:size])
        found = find(folder)
        assert all("cut short" in line for line in found.said)
        found.ledger.close()
        again = find(folder)
        assert again.said == [] or size < frames.HEADER_BYTES, "it is cut off once"
        again.ledger.close()


async def test_damaged_tokens_cost_what_they_were_of(tmp_path: Path) -> None:
    """The ledger has what the facts said; groups whose tokens are lost are named, all others are whole."""
    known = await recorded(tmp_path)
    live = {number + index for number in known.steps for index in range(2)}
    first, offset = next(
        (path, offset)
        for path in segments(tmp_path)
        for offset, body in frames.records(segment_of(path))
        if isinstance(record := records.decoded(body), records.Tokens) and live & set(record.numbers.tolist())
    )
    flip(first, at=offset + 40)
    found = find(tmp_path)
    assert len(found.said) == 1 and first.name in found.said[0] and "damaged" in found.said[0]
    assert [group.number for group in found.groups] == sorted(known.steps)
    assert found.requests.damaged
    for index, group in enumerate(found.groups):
        for position in (2 * index, 2 * index + 1):
            begin, count = int(found.requests.begins[position]), int(found.requests.counts[position])
            tokens = found.requests.tokens["token_id"][begin : begin + count].tolist()
            whole = known.tokens[group.number + position % 2]
            assert index in found.requests.damaged or tokens == whole[: len(tokens)]
    found.ledger.close()


async def test_a_segment_that_ends_before_the_next_one_begins_is_told(tmp_path: Path) -> None:
    """Cut between two records, nothing of it looks damaged. Without any byte its header is."""
    known = await recorded(tmp_path)
    first = segments(tmp_path)[0]
    content = first.read_bytes()
    for offset in [0, *(offset for offset, _ in frames.records(segment_of(first)))]:
        first.write_bytes(content[:offset])
        found = find(tmp_path)
        (said,) = found.said
        assert str(first) in said and ("are missing" in said if offset else "header is damaged" in said)
        assert {group.number: group.step for group in found.groups} == known.steps
        found.ledger.close()


async def test_damage_that_the_ledger_does_not_make_good_is_refused(tmp_path: Path) -> None:
    await recorded(tmp_path)
    forget_ledger(tmp_path)
    first = segments(tmp_path)[-1]
    content = first.read_bytes()
    flip(first, at=content.find(b"\xd0\x0a\xa7\x1e", len(content) // 4) + 30)
    with refused(InvalidValue, field="service.state"):
        find(tmp_path)


async def test_a_last_segment_without_its_header_is_refused_unless_the_ledger_has_what_it_said(tmp_path: Path) -> None:
    """A start never removes it: records that are whole were written, and perhaps acknowledged."""
    known = await recorded(tmp_path)
    last = segments(tmp_path)[-1]
    flip(last, at=20)
    content = last.read_bytes()
    found, log = opened(tmp_path, replace(SMALL, compacts=False))
    assert last.name in found.said[0] and "header is damaged" in found.said[0]
    assert {group.number: group.step for group in found.groups} == known.steps
    log.append(records.WorkerBegan(7))
    await log.settled()
    await log.close()
    assert last.read_bytes() == content
    for path in segments(tmp_path)[segments(tmp_path).index(last) + 1 :]:
        path.unlink()
    forget_ledger(tmp_path)
    for _ in range(2):
        with refused(InvalidValue, field="service.state"):
            find(tmp_path)
    assert last.read_bytes() == content


async def test_a_damaged_ledger_is_made_anew(tmp_path: Path) -> None:
    known = await recorded(tmp_path)
    ledger = tmp_path / LEDGER_FILE
    content = bytearray(ledger.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    ledger.write_bytes(content)
    found = find(tmp_path)
    assert len(found.said) == 1 and "made anew from the log" in found.said[0]
    check(found, known)
    found.ledger.close()


async def test_what_is_no_segment_and_those_of_another_schema_are_refused(tmp_path: Path) -> None:
    """With the command that finishes the run under the release that began it."""
    await recorded(tmp_path)
    newest = segments(tmp_path)[-1]
    content = bytearray(newest.read_bytes())
    for schema in (1, frames.SCHEMA_VERSION + 1):
        changed = bytearray(frames.header(9, 0))
        changed[8] = schema
        changed[-4:] = crc(changed[:-4])
        newest.write_bytes(changed + content[frames.HEADER_BYTES :])
        with refused(InvalidValue, value=schema, names=(str(frames.SCHEMA_VERSION), "dora serve --state")):
            find(tmp_path)
    other = bytearray(frames.header(9, 0))
    other[:8] = b"SOMEBODY"
    other[-4:] = crc(other[:-4])
    newest.write_bytes(other)
    with refused(InvalidValue, field="log"):
        find(tmp_path)


def crc(body: bytes | bytearray) -> bytes:
    return crc32(body).to_bytes(4, "little")


# -------------------------------------------------------------------------------------------------------------- facts


@pytest.mark.parametrize("body", [b"", b"\x91", b"\x91\xcc\xff", b"\x92\x00\x01", b"\xc0", b"\x93\x06\x01\x02"])
def test_what_is_no_fact_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidValue):
        records.decoded(body)


def test_every_kind_of_fact_comes_back() -> None:
    prompt = records.prompt_values(Prompt("p", "t", (1, 2), "\udcff", 3, {"stop": ("x",), "seed": 1}, "{}", 2))
    told = [
        records.Begun(1, 2.0, 3.0, "{}"),
        records.Event(1.0, "Tick", {}),
        records.Submitted([1], [prompt]),
        records.PromptsWithdrawn([1], [2], ["a"]),
        records.PromptsEnded(),
        records.Admitted(3, "g1", prompt, 4, 5, 2, 1.5, [7, 8], -1, 9),
        records.Verdict(1, 2.0, 0.5, False, "log", {"a": 1.0}),
        records.Leased(1, 2),
        records.Dropped(1, ["g1"], "{}"),
        records.Committed(1, b"d", 2.0, {"a": 1}, "l"),
        records.Republished(1, b"d"),
        records.Rejected(1, "why", ["w0"], 0.5),
        records.Retired(1, True),
        records.Attached(1, 2),
        records.WorkerBegan(1),
        records.WindowStands(1, 2, 3),
        records.Renumbered(1, 2),
        records.Standing({"a": 1}, [[1, "g", 2, -1, 0]], [1], [2], [[1, b"d", None]], [[3, "{}"]], ["a"], [[1, 64]]),
        records.Standing({}, [], [], [], [], None, None, []),
        records.HostStands("h1", 2, {"h1-w0": "ab"}),
        records.HostStands("h1", 2, None),
    ]
    assert {type(record) for record in told} | {records.Tokens} == set(records.KINDS)
    for record in told:
        body = records.encoded(record)
        assert records.decoded(body) == record and records.kind_of(body) is type(record)
    assert records.prompt_of(prompt) == Prompt("p", "t", (1, 2), "\udcff", 3, {"stop": ("x",), "seed": 1}, "{}", 2)


def test_tokens_are_cut_and_joined_column_by_column() -> None:
    def tokens(first: int, routed: bool) -> records.Tokens:
        rows = np.array([2, 0, 4], "<u4") if routed else np.zeros(0, "<u4")
        return records.Tokens(
            1.0 + first,
            np.array([first, first + 1, first + 2]),
            np.array([0, 5, 0]),
            np.array([2, 1, 3]),
            np.array([0, 1, 0], np.uint8),
            np.arange(6) + 10 * first,
            np.arange(6) / 4,
            [[0, "w0", 0, "new"], [2, "w1", 0, "migrated"]],
            [[1, "stop"]],
            rows,
            b"abcdef" if routed else b"",
            prompt_logprobs=[[0, b"0123"], [2, b"01234567"]],
        )

    some = records.only(tokens(3, True), np.array([False, True, True]))
    assert (some.numbers.tolist(), some.token_ids.tolist()) == ([4, 5], [32, 33, 34, 35])
    assert (some.segment_starts, some.stops, some.routed) == ([[1, "w1", 0, "migrated"]], [[0, "stop"]], b"cdef")
    both = records.joined([tokens(0, False), some])
    assert both.numbers.tolist() == [0, 1, 2, 4, 5] and both.ats.tolist() == [1.0, 1.0, 1.0, 4.0, 4.0]
    assert both.routed_bytes.tolist() == [0, 0, 0, 0, 4] and both.ends.tolist() == [0, 1, 0, 1, 0]
    assert both.segment_starts == [[0, "w0", 0, "new"], [2, "w1", 0, "migrated"], [4, "w1", 0, "migrated"]]
    assert both.prompt_logprobs == [[0, b"0123"], [2, b"01234567"], [4, b"01234567"]]
    back = records.decoded(records.encoded(both))
    assert isinstance(back, records.Tokens) and back.prompt_logprobs == both.prompt_logprobs
    assert records.kind_of(records.encoded(both)) is records.Tokens
    assert (4 * back.logprobs).tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert len(Content([]).of([both], [])) == 0


@pytest.mark.parametrize("what", ["folder", "files"])
async def test_a_log_that_is_removed_while_it_is_written_acknowledges_nothing_more(what: str, tmp_path: Path) -> None:
    """The removed content cannot be written again. A start reports the loss."""
    told: list[OSError | None] = []
    found = find(tmp_path)
    log = journal_log.Log(
        tmp_path / LOG_FOLDER,
        found.ledger,
        number=found.number,
        position=found.position,
        compaction=found.compaction,
        fault=told.append,
    )
    log.append(records.Begun(0, 1.0, 2.0, "{}"))
    await log.checkpoint()  # the ledger has it, too
    if what == "folder":
        shutil.rmtree(tmp_path / LOG_FOLDER)
    else:
        for path in segments(tmp_path):
            path.unlink()
    log.append(records.WorkerBegan(7))
    for _ in range(3):
        await log.flush()
        assert log.durable == 1
        log.try_again()
    assert told and {error and error.strerror for error in told} == {journal_log.REMOVED}
    await log.close()
    with refused(InvalidValue, field="service.state", names=("it was removed",)):
        find(tmp_path)
