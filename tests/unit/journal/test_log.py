"""The log and the state that it folds: all is found again after a stop, a crash, compaction, disk faults, damage."""

import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal import frames, records
from dora.journal import log as journal_log
from dora.journal.content import Content
from dora.journal.durable import Durable
from dora.journal.finding import find
from dora.journal.log import LOG_FOLDER, Sizes
from tests.abuse.full import files_up_to
from tests.refusals import refused
from tests.unit.journal.incarnations import SMALL, Incarnation, Known, check, flip, opened, until


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / LOG_FOLDER).iterdir())


async def test_a_new_folder_has_nothing(tmp_path: Path) -> None:
    found = find(tmp_path / "new")
    assert found.is_new and not found.groups and not found.said and found.position == 0


async def test_lives_follow_each_other(tmp_path: Path) -> None:
    known = Known()
    for incarnation in range(4):
        found, log = opened(tmp_path)
        assert found.said == [] and found.durable.incarnation == incarnation - 1
        check(found, known)
        log.append(records.Begun(incarnation, 1.0, 2.0, "{}"))
        told = Incarnation(log.append, known, incarnation)
        for _ in range(3):
            told.step()
        told.report()
        await log.close()
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


async def test_what_is_alive_in_old_segments_is_written_anew(tmp_path: Path) -> None:
    """A group that is never trained on outlives many segments, and is found whole; so is a queued prompt.

    Those that have been trained on stay away.
    """
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
    found, log = opened(tmp_path)
    check(found, told.known)
    assert [prompt for _, prompt in found.queued] == [queued[0], *queued[2:]]
    assert found.groups[0].number == kept and found.groups[0].rows == (0, 1)
    await log.close()


async def test_a_start_holds_no_more_than_what_is_alive(tmp_path: Path) -> None:
    """No segment is deleted: each has groups that are alive at its end, and trained on later."""
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
    tracemalloc.start()
    found = find(tmp_path, sizes)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
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


async def test_a_kill_at_any_write_leaves_a_state_to_continue_from(tmp_path: Path) -> None:
    """20 steps in two incarnations, with compaction: after each write, what was acknowledged is there, and no more than
    was appended. The state is the one to which the same records fold, and the log goes on from it.
    """
    folder, known, appended, writes = tmp_path / "state", Known(), list[records.LogRecord](), list[int]()

    before = 0

    def killed(log: journal_log.Log) -> None:
        shutil.copytree(folder, tmp_path / f"killed{len(writes)}")
        writes.append(before + log.durable)  # acknowledged before this write

    for incarnation in range(2):
        _, log = opened(folder, replace(SMALL, segment_bytes=3000))
        before = len(appended)

        def tell(record: records.LogRecord, log: journal_log.Log = log) -> None:
            appended.append(record)
            log.append(record)

        log.synced = lambda took_s, log=log: killed(log)  # type: ignore[misc]
        tell(records.Begun(incarnation, 1.0, 2.0, "{}"))
        told = Incarnation(tell, known, incarnation)
        for _ in range(10):
            told.step()
            await log.settled()
        await log.close()
    folds, fold = [], Durable()
    for record in appended:
        fold.apply(record)
        folds.append(fold.checkpoint())
    reached = 0
    for number, acknowledged in enumerate(writes):
        found, log = opened(tmp_path / f"killed{number}")
        assert found.said == [] and found.requests.damaged == []
        reached = next(each for each in range(reached, len(folds)) if folds[each] == found.durable.checkpoint())
        following = next((each for each in range(reached, len(folds)) if folds[each] != folds[reached]), len(folds))
        assert following >= acknowledged
        log.append(records.WorkerBegan(7))
        await log.close()
        assert find(tmp_path / f"killed{number}").durable.worker_epoch == 7
    assert len(writes) > 40 and reached == len(folds) - 1


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
        again = find(folder)
        assert again.said == [] or size < frames.HEADER_BYTES, "it is cut off once"


async def test_damaged_tokens_cost_what_they_were_of(tmp_path: Path) -> None:
    """A later checkpoint has what the facts said; groups whose tokens are lost are named, all others are whole."""
    known = await recorded(tmp_path)
    live = {number + index for number in known.steps for index in range(2)}
    first, offset = next(
        (path, offset)
        for path in segments(tmp_path)
        for offset, code, body in frames.records(segment_of(path))
        if isinstance(record := records.decoded(code, body), records.Tokens) and live & set(record.numbers.tolist())
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


async def test_a_segment_that_ends_before_the_next_one_begins_is_told(tmp_path: Path) -> None:
    """Cut between two records, nothing of it looks damaged. Without any byte its header is."""
    known = await recorded(tmp_path)
    first = segments(tmp_path)[0]
    content = first.read_bytes()
    for offset in [0, *(offset for offset, _, _ in frames.records(segment_of(first)))]:
        first.write_bytes(content[:offset])
        found = find(tmp_path)
        (said,) = found.said
        assert str(first) in said and ("are missing" in said if offset else "header is damaged" in said)
        assert {group.number: group.step for group in found.groups} == known.steps


async def test_a_damaged_fact_that_no_later_checkpoint_repeats_is_refused(tmp_path: Path) -> None:
    """The last segment, without the checkpoint of its end. Its damaged tokens alone are no reason to refuse."""
    known = await recorded(tmp_path)
    last = segments(tmp_path)[-1]
    kinds = {offset: records.KINDS[code] for offset, code, _ in frames.records(segment_of(last))}
    *_, end = kinds
    assert kinds[end] is records.Checkpoint
    whole, written = last.read_bytes(), segment_of(last)
    list(frames.records(written, written.position(end)))
    tried = set()
    for offset, kind in [each for each in kinds.items() if frames.HEADER_BYTES < each[0] < written.last_write]:
        last.write_bytes(whole[:end])
        flip(last, at=offset + frames.HEAD_BYTES)
        tried.add(kind)
        if kind in (records.Tokens, records.Verdict, records.Checkpoint):
            found = find(tmp_path)
            assert {group.number: group.step for group in found.groups} == known.steps and len(found.said) == 1
        else:
            with refused(InvalidValue, field="service.state", names=(f"at byte {offset}",)):
                find(tmp_path)
        last.write_bytes(whole)
        flip(last, at=offset + frames.HEAD_BYTES)
        if kind is not records.Admitted:
            assert {group.number: group.step for group in find(tmp_path).groups} == known.steps
    assert {records.Tokens, records.Admitted} < tried


async def test_a_last_segment_without_its_header_is_refused(tmp_path: Path) -> None:
    """A start never removes it: records that are whole were written, and perhaps acknowledged."""
    await recorded(tmp_path)
    last = segments(tmp_path)[-1]
    flip(last, at=20)
    content = last.read_bytes()
    for _ in range(2):
        with refused(InvalidValue, field="service.state", names=("header is damaged",)):
            find(tmp_path)
    assert last.read_bytes() == content


async def test_a_damaged_checkpoint_costs_nothing_while_the_log_before_it_is_there(tmp_path: Path) -> None:
    known = await recorded(tmp_path)
    for path in segments(tmp_path):
        for offset, code, _ in list(frames.records(segment_of(path))):
            if records.KINDS[code] is records.Checkpoint:
                flip(path, at=offset + frames.HEAD_BYTES + 5)
    found = find(tmp_path)
    assert len(found.said) >= len(segments(tmp_path))
    check(found, known)


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


@pytest.mark.parametrize("body", [b"", b"\x91", b"\x91\xcc\xff", b"\xc0", b"\x93\x06\x01\x02"])
def test_what_is_no_fact_is_refused(body: bytes) -> None:
    for code in (records.CODE[records.Leased], len(records.KINDS)):
        with pytest.raises(InvalidValue):
            records.decoded(code, body)


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
        records.Checkpoint(Durable().checkpoint(), [[1, 64]]),
        records.HostStands("h1", 2, {"h1-w0": "ab"}),
        records.HostStands("h1", 2, None),
    ]
    assert {type(record) for record in told} | {records.Tokens} == set(records.KINDS)
    for record in told:
        assert records.decoded(records.CODE[type(record)], records.encoded(record)) == record
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
    back = records.decoded(records.CODE[records.Tokens], records.encoded(both))
    assert isinstance(back, records.Tokens) and back.prompt_logprobs == both.prompt_logprobs
    assert (4 * back.logprobs).tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    content = Content(Durable())
    content.add([both])
    assert len(content.requests([])) == 0


@pytest.mark.parametrize("what", ["folder", "files"])
async def test_a_log_that_is_removed_while_it_is_written_acknowledges_nothing_more(what: str, tmp_path: Path) -> None:
    """The removed content cannot be written again."""
    told: list[OSError | None] = []
    found = find(tmp_path)
    log = journal_log.Log(
        tmp_path / LOG_FOLDER,
        found.durable,
        number=found.number,
        position=found.position,
        compaction=found.compaction,
        fault=told.append,
    )
    log.append(records.Begun(0, 1.0, 2.0, "{}"))
    await log.checkpoint()
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
