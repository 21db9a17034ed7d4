"""A kernel that drops dirty pages when an fsync fails: the record has every acknowledged line all the same."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from dora.data.run_record import CancelledGroup, CommittedStep, Recorder
from dora.data.trajectory import TrajectoryGroup
from dora.errors import InvalidValue
from dora.journal.versions import PersistedVersions
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import missing, read_steps
from dora.system.line_file import LineFile
from tests.contract.trainer_service import make_group
from tests.refusals import refused

FSYNCS = 40  # of the longest history below: later ones are not reached


class Kernel:
    """A failed fsync turns what was written since the last good one into zeros, and the next fsync says that all is
    well. ``failing`` counts fsyncs from 0 on.
    """

    def __init__(self, failing: set[int]) -> None:
        self._failing = failing
        self._numbers = count()
        self._durable: dict[tuple[int, int], int] = {}
        self._fsync = os.fsync
        self.failed = 0

    def fsync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        inode = (found.st_dev, found.st_ino)
        if next(self._numbers) not in self._failing:
            self._durable[inode] = found.st_size
            return
        self.failed += 1
        if stat.S_ISREG(found.st_mode):
            begin = min(self._durable.get(inode, 0), found.st_size)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            with open(path, "r+b") as stream:
                stream.seek(begin)
                stream.write(bytes(found.st_size - begin))
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> Iterator[Kernel]:
    kernel = Kernel(set(numbers))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", kernel.fsync)
        yield kernel


def cancelled(step: int) -> CancelledGroup:
    return CancelledGroup(f"c{step}", "p", "sum", step, "user", (1,), (None,), 1.0)


def write(recorder: Recorder, step: int, weights: Path) -> None:
    """Runs the record queue's writes of a step, each until it succeeds."""
    groups: list[TrajectoryGroup] = [make_group(step, number) for number in range(2)]
    counts = {group.group_id: len(group.trajectories) for group in groups}
    again(lambda: recorder.append(groups[0].trajectories))
    again(lambda: recorder.append_cancelled(cancelled(step)))
    again(lambda: recorder.append(groups[1].trajectories))
    again(lambda: recorder.commit(CommittedStep(step, step + 1, counts, 1.0), weights, b"%d" % step))
    if step == 1:
        again(lambda: recorder.drop_version(2))
        again(lambda: recorder.republish(2, weights, b"anew"))


def again(call: object) -> None:
    assert callable(call)
    for _ in range(4):
        try:
            call()
        except OSError:
            continue
        return
    raise AssertionError("it never succeeds")


def check(folder: Path, weights: Path, steps: int) -> None:
    trajectories = read_trajectories(folder / "trajectories.jsonl")
    assert len(trajectories) == len({each.trajectory_id for each in trajectories}) == 4 * steps
    found, lacking = missing(folder, trajectories)
    assert found == steps and not list(lacking)
    assert set(read_steps(folder / "steps.jsonl")[0]) == set(range(steps))
    assert (folder / "steps.jsonl").read_bytes().count(b'"step"') == steps, "each step's line stands once"
    assert (folder / "cancelled.jsonl").read_bytes().count(b"\n") == steps
    for version in range(1, steps + 1):
        assert (folder / "versions" / str(version) / "model.safetensors").read_bytes() == weights_of(weights)


def weights_of(weights: Path) -> bytes:
    return (weights / "model.safetensors").read_bytes()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("links", [True, False], ids=["linked", "copied"])
@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("first", range(FSYNCS))
def test_whichever_fsync_fails_nothing_acknowledged_is_lost(
    tmp_path: Path, weights: Path, first: int, failures: int, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "record"
    if not links:
        monkeypatch.setattr(os, "link", lambda source, target: (_ for _ in ()).throw(OSError(errno.EXDEV, "no links")))
    with failing(monkeypatch, *range(5 + first, 5 + first + failures)) as kernel:
        for file in weights.iterdir():  # the store's file was on disk before
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        with Recorder(folder) as recorder:  # four fsyncs
            for step in range(3):
                write(recorder, step, weights)
        check(folder, weights, 3)
        assert kernel.failed == failures or first > 20
    with Recorder(folder):
        pass
    check(folder, weights, 3)


@pytest.mark.parametrize("first", range(FSYNCS // 2))
def test_a_kill_after_a_failed_fsync_leaves_whole_lines(
    tmp_path: Path, weights: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next incarnation asks for the writes that were not acknowledged, and finds none of them half there."""
    folder = tmp_path / "record"
    with failing(monkeypatch, 5 + first) as kernel:
        for file in weights.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        recorder = Recorder(folder)
        for step in range(3):
            groups = [make_group(step, number) for number in range(2)]
            counts = {group.group_id: len(group.trajectories) for group in groups}

            def rest(recorder: Recorder, step: int = step, counts: dict[str, int] = counts) -> None:
                for number in range(2):
                    recorder.append(make_group(step, number).trajectories)
                recorder.carry_on(step, [cancelled(step)])
                recorder.commit(CommittedStep(step, step + 1, counts, 1.0), weights, b"%d" % step)

            try:
                rest(recorder)
            except OSError:
                recorder.close()  # what a kill does to it
                recorder = Recorder(folder)
                rest(recorder)
        recorder.close()
        check(folder, weights, 3)
        assert kernel.failed or first > 10


def test_what_waits_for_an_fsync_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.system.line_file.UNSYNCED_BYTES_MAX", 100)
    file = LineFile(tmp_path / "lines")
    assert list(file.lines()) == []
    with failing(monkeypatch, 0) as kernel:
        written = 0
        for number in range(50):
            line = b"line %d\n" % number
            again(lambda line=line: file.append(line))
            written += len(line)
            assert sum(map(len, file._unsynced)) <= 100 + len(line)
        assert kernel.failed == 1
    assert (tmp_path / "lines").read_bytes() == b"".join(b"line %d\n" % number for number in range(50))


def test_a_disk_that_stays_bad_acknowledges_nothing(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "record")
    with failing(monkeypatch, *range(100)):
        recorder.append(make_group(0, 0).trajectories)
        for _ in range(5):
            with refused(OSError, errno=errno.EIO):
                recorder.commit(CommittedStep(0, 1, {}, 1.0), weights)
        assert (tmp_path / "record" / "steps.jsonl").read_bytes() == b""
        with refused(InvalidValue, field="record"):
            Recorder(tmp_path / "record")


@pytest.mark.parametrize("first", range(4))
def test_a_version_is_kept_whichever_fsync_fails(
    tmp_path: Path, weights: Path, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it takes the place of an earlier publication."""
    kept = PersistedVersions(tmp_path / "versions")
    for content in (b"first", b"second"):
        store = tmp_path / content.decode()
        store.mkdir()
        (store / "model.safetensors").write_bytes(content)
        with failing(monkeypatch, 1 + first) as kernel:
            with (store / "model.safetensors").open("rb") as stream:
                os.fsync(stream.fileno())
            again(lambda store=store: kept.keep(1, store))
            assert kernel.failed == (first < 3)
        assert (tmp_path / "versions" / "1" / "model.safetensors").read_bytes() == content
        assert [entry.name for entry in (tmp_path / "versions").iterdir()] == ["1"]
