"""Compaction that a crash or a fault of the disk ends in its midst: nothing is lost, and nothing stands there twice."""

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.data.types import Prompt
from dora.journal import compaction, frames, records
from dora.journal import log as journal_log
from dora.journal.content import Content, Requests
from dora.journal.durable import Durable
from dora.journal.finding import find
from dora.journal.log import LOG_FOLDER, Log
from tests.unit.journal.incarnations import SMALL, Incarnation, Known, check, flip, opened, until

SIZES = replace(SMALL, segment_bytes=3000)
NEVER = 1000  # a step that is not trained here


async def with_slow_groups(log: Log, told: Incarnation, steps: int = 16) -> None:
    """Steps, and groups between them that a later step has taken: segments with little in them that is alive."""
    slow: dict[int, list[int]] = {}
    for step in range(steps):
        told.step()
        if step % 2 == 0:
            kept = told.admit()
            for ends in (False, False, True):
                told.report(ends)
            log.append(records.Leased(kept, NEVER))
            told.known.steps[kept] = NEVER
            slow |= {number: told.known.tokens.pop(number) for number in (kept, kept + 1)}
        settled = log.settled()
        log.try_again()
        await settled
    told.known.tokens |= slow
    told.known.scored |= set(slow)


async def check_again(folder: Path, known: Known) -> None:
    """A start finds all that is known, and calls nothing of it damaged."""
    found, log = opened(folder, SIZES)
    assert found.said == [] and found.requests.damaged == []
    check(found, known)
    await log.close()


async def test_a_crash_before_the_old_segment_goes_leaves_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash just before each segment goes: what was alive in it is on disk anew."""
    folder, real, crashes = tmp_path / "state", os.unlink, 0

    def unlink(path: Path) -> None:
        nonlocal crashes
        shutil.copytree(folder, tmp_path / f"crash{crashes}")
        crashes += 1
        real(path)

    _, log = opened(folder, SIZES)
    told = Incarnation(log.append, Known())
    with monkeypatch.context() as patched:
        patched.setattr(compaction.os, "unlink", unlink)
        await with_slow_groups(log, told)
        await log.checkpoint()
    await log.close()
    for crash in range(crashes):
        found = find(tmp_path / f"crash{crash}")
        assert found.said == [] and found.requests.damaged == []
    assert crashes > 5
    await check_again(folder, told.known)


async def test_a_write_that_fails_in_the_midst_leaves_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write fails after the first part of a segment was copied: all of it is copied again."""
    monkeypatch.setattr(compaction, "PART_BYTES", 60)
    _, log = opened(tmp_path, SIZES)
    told = Incarnation(log.append, Known())
    real, written, failed = log._append, -1, 0

    def append(chunk: list[Any], *, is_copy: bool = False) -> None:
        nonlocal written, failed
        if is_copy:
            chosen = log._compaction._chosen
            if chosen == written and failed < 4:
                failed, written = failed + 1, -1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = -1 if chosen is None else chosen
        real(chunk, is_copy=is_copy)

    monkeypatch.setattr(log, "_append", append)
    await with_slow_groups(log, told)
    await log.checkpoint()
    await log.close()
    assert failed
    await check_again(tmp_path, told.known)


async def test_a_renumbered_group_is_found_from_the_log_alone(tmp_path: Path) -> None:
    """Whatever has gone since: the log says what was asked for under the number that the group has now."""
    _, log = opened(tmp_path, SIZES)
    told = Incarnation(log.append, Known())
    old = told.admit()
    told.report(ends=True)
    log.append(records.Leased(old, NEVER))
    await log.close()
    found, log = opened(tmp_path, SIZES)
    new = found.durable.next_number
    log.append(replace(found.groups[0], number=new, step=-1).admitted(replaces=old))
    known = told.known
    known.tokens, known.scored, known.steps, known.next_number = {}, set(), {}, new + 2
    told = Incarnation(log.append, known)
    await with_slow_groups(log, told)
    known.tokens |= {new: [], new + 1: []}
    known.steps[new] = -1
    await log.checkpoint()
    await log.close()
    assert segment_paths(tmp_path)[0].stem > "00000001", "the segment is gone in which it was admitted"
    await check_again(tmp_path, known)


def segment_paths(folder: Path) -> list[Path]:
    return sorted((folder / LOG_FOLDER).iterdir())


async def test_what_was_cancelled_is_known_from_the_log_alone(tmp_path: Path) -> None:
    """Whatever has gone since: cancelling may be repeated, and a record may lack the groups."""
    _, log = opened(tmp_path, SIZES)
    told = Incarnation(log.append, Known())
    gone = told.admit()
    del told.known.steps[gone], told.known.tokens[gone], told.known.tokens[gone + 1]
    log.append(records.Dropped(gone, ["g0"], '{"group": "g0"}'))
    log.append(records.PromptsWithdrawn([], [], ["z", "a"]))
    await with_slow_groups(log, told)
    await log.checkpoint()
    await log.close()
    assert segment_paths(tmp_path)[0].stem > "00000001"
    found = find(tmp_path, SIZES)
    assert list(found.durable.dropped.values()) == ['{"group": "g0"}']
    assert list(found.durable.cancelled) == ["g0", "z", "a"]


@pytest.mark.parametrize("part_bytes", [1 << 20, 60], ids=["at once", "in parts"])
async def test_a_segment_that_cannot_be_read_once_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Too many files are open as it is to be written anew, or a read fails in its midst."""
    monkeypatch.setattr(compaction, "PART_BYTES", part_bytes)
    faults: list[OSError | None] = []
    _, log = opened(tmp_path, SIZES, faults)
    told = Incarnation(log.append, Known())
    real, failed = frames.records, 0

    def records(segment: frames.LogSegment, end: int | None = None) -> Iterator[tuple[int, int, memoryview]]:
        nonlocal failed
        failed += 1
        for position, record in enumerate(real(segment, end)):
            if failed % 2 and position >= (4 if part_bytes == 60 else 0):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            yield record

    with monkeypatch.context() as patched:
        patched.setattr(frames, "records", records)
        await with_slow_groups(log, told)
        await log.close()
    assert failed > 1 and isinstance(faults[0], OSError) and faults[0].errno == errno.EMFILE
    await check_again(tmp_path, told.known)


def cut_off_the_last_record(path: Path) -> None:
    segment = frames.opened(path)
    assert segment is not None
    *_, (last, _, _) = frames.records(segment)
    os.truncate(path, last)


@pytest.mark.parametrize(
    ("hurt", "told_as"),
    [
        pytest.param(partial(flip, at=10), "damaged", id="its header"),
        pytest.param(partial(flip, at=60), "damaged", id="a record"),
        pytest.param(cut_off_the_last_record, "missing", id="cut between two records"),
    ],
)
async def test_a_segment_that_is_damaged_stays_and_a_start_tells_it(
    tmp_path: Path, hurt: Callable[[Path], None], told_as: str
) -> None:
    """The disk has lost something of it since it was written: what is still alive in it does not go unsaid."""
    faults: list[OSError | None] = []
    _, log = opened(tmp_path, SIZES, faults)
    told = Incarnation(log.append, Known())
    kept = told.admit()
    told.report(ends=True)
    log.append(records.Leased(kept, NEVER))
    for number in (kept, kept + 1):
        told.known.tokens.pop(number)
    told.known.steps.pop(kept)
    await log.settled()
    (first,) = (tmp_path / LOG_FOLDER).iterdir()
    hurt(first)
    while not faults:
        await with_slow_groups(log, told)
        await log.checkpoint()
    await log.close()
    assert first.exists() and [fault.errno for fault in faults if fault is not None] == [errno.EIO]
    found = find(tmp_path)
    assert found.groups[0].number == kept and first.name in found.said[0] and told_as in found.said[0]


async def test_that_storage_is_well_again_is_told_after_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction could not write, and nothing else waits to be written: trying again tries to write."""
    faults: list[OSError | None] = []
    _, log = opened(tmp_path, SIZES, faults)
    told = Incarnation(log.append, Known())
    append, write, is_full, tries = log._append, journal_log._write, False, 0

    def appended(chunk: list[Any], *, is_copy: bool = False) -> None:
        nonlocal is_full
        is_full |= is_copy
        append(chunk, is_copy=is_copy)

    def written(descriptor: int, parts: Sequence[bytes]) -> None:
        nonlocal tries
        if is_full:
            tries += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, parts)

    with monkeypatch.context() as patched:
        patched.setattr(log, "_append", appended)
        patched.setattr(journal_log, "_write", written)
        with monkeypatch.context() as unnoticed:
            unnoticed.setattr(log._compaction, "changed", lambda durable: None)
            await with_slow_groups(log, told, 6)
        checkpoint = asyncio.create_task(log.checkpoint())  # compacts, and nothing else waits
        await until(lambda: is_full)
        await until(lambda: bool(faults))
        for before in (1, 2):
            log.try_again()
            await until(lambda before=before: tries > before or None in faults)  # type: ignore[misc]
        assert None not in faults and isinstance(faults[0], OSError)
        patched.setattr(log, "_append", append)
        is_full = False
        log.try_again()
        await until(lambda: faults[-1] is None)
        await checkpoint
    await log.close()
    await check_again(tmp_path, told.known)


async def test_a_segment_without_its_header_goes_once_it_was_passed_over(tmp_path: Path) -> None:
    """A later checkpoint has all that it said."""
    _, log = opened(tmp_path, SIZES)
    told = Incarnation(log.append, Known())
    waiting = Prompt("waits", "sum", (1, 2))
    log._compaction.changed = lambda durable: None  # type: ignore[method-assign]
    for step in range(3):
        told.step(groups=step)
        await log.settled()
    first = segment_paths(tmp_path)[0]
    told.step(groups=6)
    await log.settled()
    log.append(records.Submitted([1], [records.prompt_values(waiting)]))
    told.step(groups=3)
    await log.close()
    assert len(segment_paths(tmp_path)) > 2
    flip(first, at=20)
    found, log = opened(tmp_path, SIZES)
    assert "header is damaged" in found.said[0]
    log.append(records.WorkerBegan(7))
    await log.checkpoint()
    await log.close()
    assert first not in segment_paths(tmp_path)
    found = find(tmp_path, SIZES)
    assert found.said == [] and [prompt for _, prompt in found.queued] == [waiting]
    assert {group.number: group.step for group in found.groups} == told.known.steps


def test_stretches_that_are_there_twice_count_once() -> None:
    """With all that came with them, whether they were written anew beside others or alone."""
    prompt = records.prompt_values(Prompt("p0", "sum", (1, 2), "what", 2))
    admitted = records.Admitted(0, "g0", prompt, 0, 1, 2, 1.0, [0, 1], 0, 0)
    durable = Durable()
    durable.apply(admitted)

    def collected(*tokens: records.Tokens) -> Requests:
        content = Content(durable)
        content.add([admitted, *tokens])
        return content.requests(content.groups())

    begin = tokens([0, 1], [0, 0], [2, 1], segment_starts=[[0, "w0", 0, "new"], [1, "w0", 0, "new"]])
    middle = tokens([0, 1], [2, 1], [1, 2])
    end = tokens([0, 1], [3, 3], [1, 0], ends=[1, 2], stops=[[0, "stop"]], segment_starts=[[0, "w1", 3, "migrated"]])
    once = collected(begin, middle, end)
    anew = [records.joined([begin, middle]), records.only(end, np.array([True, False])), records.joined([end])]
    twice = collected(begin, *anew, middle, end)
    assert once.damaged == twice.damaged == []
    assert (twice.begins.tolist(), twice.counts.tolist()) == ([0, 4], [4, 3])
    assert twice.tokens.tobytes() == once.tokens.tobytes() and twice.ends.tolist() == once.ends.tolist() == [1, 2]
    assert (
        twice.segment_starts
        == once.segment_starts
        == {0: [("w0", 0, "new"), ("w1", 3, "migrated")], 1: [("w0", 0, "new")]}
    )
    assert twice.stops == once.stops and twice.routed == once.routed == {0: b"00010203", 1: b"101112"}
    lost = collected(begin, begin, end)
    assert lost.damaged == [0], "what is twice does not stand for what is lost"


def tokens(numbers: list[int], firsts: list[int], counts: list[int], ends: list[int] | None = None, **more: Any) -> Any:
    """Tokens that say which they are; two bytes of routed experts a token."""
    named = [
        (number, first + k) for number, first, count in zip(numbers, firsts, counts, strict=True) for k in range(count)
    ]
    ids = np.array([10 * number + position for number, position in named])
    routed = "".join(f"{number}{position}" for number, position in named)
    sizes = 2 * np.array(counts)
    return records.Tokens(
        9.0,
        np.array(numbers),
        np.array(firsts),
        np.array(counts),
        np.array(ends or [0] * len(numbers), np.uint8),
        ids,
        ids / 8,
        routed_bytes=sizes,
        routed=routed.encode(),
        **more,
    )
