"""A disk that is full is a state of the service: it admits nothing, keeps what it has acknowledged, and goes on.

The faults are real: files that may not grow, and a file where a folder should be.
"""

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dora.errors import InvalidValue, SnapshotRefused
from dora.kvtransfer.segments import SegmentPool
from dora.orchestrator import record_queue
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.eventlog import EventLogWriter, read_log
from dora.orchestrator.setup import store_of
from dora.orchestrator.storage import check_room
from dora.record import CANCELLED_FILE, STEPS_FILE, TRAJECTORIES_FILE, CommittedStep, Recorder
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded, ServiceUnavailable
from dora.types import Prompt, TokenDelta
from dora.verify.check import read_trajectories
from dora.verify.committed import missing
from dora.weights.files import hash_file
from tests.abuse.full import files_up_to
from tests.contract.trainer_service import make_group
from tests.unit.test_runtime import Shell, ended

SMALL_BYTES = 300  # there is room for the store's own notes on a version, and not for a trajectory


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    yield made
    await made.runtime.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_queue, "STORED_WAIT_S", 0.0)


def record_of(shell: Shell) -> Path:
    return shell.store.root.parent / "record"


def lines_of(shell: Shell, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (record_of(shell) / name).read_text().splitlines()]


async def fill(shell: Shell) -> None:
    """Step 0 waits for its commit."""
    (request_id,) = await shell.admit(1)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    shell.report(ended(request_id))
    async for _ in stream:
        pass


def faults(shell: Shell) -> dict[str, str]:
    return {fault.place: fault.reason for fault in shell.runtime.storage.faults.values()}


async def looking(shell: Shell, call: "asyncio.Future[pb.CommitStepReply]") -> pb.CommitStepReply:
    """What the call returns, while the service looks at its storage again and again."""
    while not call.done():
        await shell.runtime.look_at_storage()
    return await call


# ------------------------------------------------------------------------------------------------ the record, commits


async def test_a_step_is_acknowledged_once_its_record_is_on_disk(shell: Shell) -> None:
    request = shell.commit_request()
    with files_up_to(SMALL_BYTES):
        await fill(shell)
        commit = asyncio.ensure_future(shell.trainer.CommitStep(request, None))
        await shell.until(lambda: shell.state.window.closed)
        for _ in range(3):
            await shell.runtime.look_at_storage()
        assert not commit.done() and shell.state.window.newest == 0
        assert faults(shell)["record"] == "File too large"
    await shell.runtime.look_at_storage()
    assert (await commit).next_step == 1 and not shell.runtime.storage.faults
    await shell.until(lambda: not shell.state.window.closed)
    (step,) = lines_of(shell, STEPS_FILE)
    assert (step["step"], step["version"], step["groups"]) == (0, 1, {"g0": 1})
    assert (await shell.trainer.CommitStep(request, None)).next_step == 1, "repeated, it is recognised"
    assert len(lines_of(shell, STEPS_FILE)) == 1


async def test_a_commit_that_cannot_be_stored_is_unavailable_and_may_be_repeated(shell: Shell, impatient: None) -> None:
    request = shell.commit_request()
    with files_up_to(SMALL_BYTES):
        await fill(shell)
        for _ in range(3):
            commit = asyncio.ensure_future(shell.trainer.CommitStep(request, None))
            with pytest.raises(ServiceUnavailable, match=r"not stored: .* record .* \(File too large\).* repeated"):
                await looking(shell, commit)
        assert shell.state.window.newest == 0 and shell.store.versions() == (0,)
    assert not lines_of(shell, STEPS_FILE) and not lines_of(shell, TRAJECTORIES_FILE)
    commit = asyncio.ensure_future(shell.trainer.CommitStep(request, None))
    assert (await looking(shell, commit)).next_step == 1, "its files need not be brought again"
    trajectories = read_trajectories(record_of(shell) / TRAJECTORIES_FILE)
    steps, lacking = missing(record_of(shell), trajectories)
    assert steps == 1 and not list(lacking) and len(trajectories) == 1
    assert not shell.runtime.failed.done()


async def test_after_a_commit_that_was_not_stored_other_weights_may_be_published(shell: Shell, impatient: None) -> None:
    """As a new trainer would that has trained the step anew. The record then holds these."""
    request = shell.commit_request()
    with files_up_to(SMALL_BYTES):
        await fill(shell)
        with pytest.raises(ServiceUnavailable):
            await looking(shell, asyncio.ensure_future(shell.trainer.CommitStep(request, None)))
    await shell.trainer.Attach(pb.AttachRequest(), None)
    file = shell.store.begin(2, 1) / "model.safetensors"
    content = bytearray((shell.model / "model.safetensors").read_bytes())
    content[-4:] = b"\0\0\x80\x3e"
    file.write_bytes(content)
    other = hash_file(file)
    announced = pb.WeightFile(name=other.name, file_bytes=other.file_bytes, blake3=other.blake3)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=2, step=0), None)
    assert [len(batch.groups) async for batch in stream] == [1]
    request = pb.CommitStepRequest(trainer_epoch=2, step=0, version=1, files=[announced])
    commit = asyncio.ensure_future(shell.trainer.CommitStep(request, None))
    assert (await looking(shell, commit)).next_step == 1
    for folder in (shell.store.folder(1), record_of(shell) / "versions" / "1"):
        assert hash_file(folder / "model.safetensors").blake3 == other.blake3


async def test_nothing_is_admitted_meanwhile_and_what_was_admitted_goes_on(shell: Shell) -> None:
    first, second = await shell.admit(2)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    receiving = asyncio.ensure_future(anext(stream))
    await shell.until(lambda: shell.state.stream_step == 0)
    with files_up_to(10):
        shell.report(ended(first))
        await shell.until(lambda: shell.state.window.closed)
        shell.runtime.feed.submit([Prompt("more", "task", (1, 2))])
        await shell.until(lambda: len(shell.state.backlog))
        admitted = shell.runtime.machine.counters.groups_admitted
        assert len((await receiving).groups) == 1, "the trainer gets what is finished"
        shell.report(ended(second))
        assert [len(batch.groups) async for batch in stream] == [1]
        assert shell.runtime.machine.counters.groups_admitted == admitted == 2
        assert not lines_of(shell, TRAJECTORIES_FILE)
    await shell.runtime.look_at_storage()
    await shell.runtime.recorder.written()
    assert [line["group_id"] for line in lines_of(shell, TRAJECTORIES_FILE)] == ["g0", "g1"], "none is torn or missing"
    await shell.until(lambda: len(shell.state.group_row) == 3)


async def test_a_service_that_ends_says_what_its_record_lacks(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    (request_id,) = await shell.admit(1)
    shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    shell.runtime.post(on.StepRequested(1, 0))
    with files_up_to(10):
        shell.report(ended(request_id))
        await shell.until(lambda: shell.runtime.storage.faults)
        await shell.runtime.close()
    assert "the record lacks the last 1 writes: File too large" in caplog.text and not shell.runtime.failed.done()


async def test_a_fault_is_said_once(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with files_up_to(1000):
        for _ in range(5):
            await shell.runtime.look_at_storage()
    assert caplog.text.count("storage is at fault: run folder: File too large") == 1
    await shell.runtime.look_at_storage()
    assert caplog.text.count("storage is well again: run folder") == 1 and shell.runtime.storage.faults_seen == 1


@pytest.mark.parametrize("torn_bytes", [1, 20, 4000])
def test_a_line_that_does_not_fit_is_not_there_at_all(tmp_path: Path, torn_bytes: int) -> None:
    first, second = make_group(0, 0), make_group(0, 1)
    file = tmp_path / TRAJECTORIES_FILE
    with Recorder(tmp_path) as recorder:
        recorder.append(first.trajectories)
        before = file.read_bytes()
        with files_up_to(len(before) + torn_bytes):
            if torn_bytes < len(before):
                with pytest.raises(OSError, match="File too large"):
                    recorder.append(second.trajectories)
                assert file.read_bytes() == before
        recorder.append(second.trajectories)
    assert len(read_trajectories(file)) == 4


async def test_logprobs_that_are_no_numbers_end_nothing(shell: Shell) -> None:
    """They are refused before the book, the record and the trainer see them."""
    (request_id,) = await shell.admit(1)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidValue, match="logprobs"):
            shell.report(TokenDelta(request_id, 0, 0, (3, 2), (value, value), "stop"))
    assert not lines_of(shell, TRAJECTORIES_FILE) and not shell.runtime.book[request_id].tokens
    shell.report(ended(request_id))
    assert [len(batch.groups) async for batch in stream] == [1]
    await shell.runtime.recorder.written()
    (line,) = lines_of(shell, TRAJECTORIES_FILE)
    assert line["logprobs"] == [-0.5, -0.25] and not shell.runtime.failed.done()


# -------------------------------------------------------------------------------------------------- the run folder


async def test_weights_that_do_not_fit_leave_nothing_and_may_be_published_again(shell: Shell) -> None:
    request = shell.commit_request()
    await fill(shell)
    await shell.runtime.recorder.written()
    with files_up_to(10), pytest.raises(LimitExceeded, match=r"weights: version 1 = .* run folder .*repeat it later"):
        await shell.trainer.CommitStep(request, None)
    assert faults(shell) == {"run folder": "File too large"}
    assert [file.name for file in (shell.store.root / "versions").iterdir()] == ["0"]
    assert not list((shell.store.root / "incoming").iterdir())
    await shell.runtime.look_at_storage()
    assert not faults(shell)
    assert (await shell.trainer.CommitStep(shell.commit_request(), None)).next_step == 1


async def test_an_upload_that_does_not_fit_leaves_nothing(shell: Shell) -> None:
    await shell.trainer.Attach(pb.AttachRequest(groups_per_step=1), None)

    async def messages() -> AsyncIterator[pb.WeightChunk]:
        header = pb.WeightFileHeader(trainer_epoch=1, version=1, file_name="a.safetensors", file_bytes=8000)
        yield pb.WeightChunk(header=header)
        for _ in range(8):
            yield pb.WeightChunk(content=bytes(1000))

    with files_up_to(2500), pytest.raises(LimitExceeded, match=r"a\.safetensors = '8,000 bytes' .*File too large"):
        await shell.trainer.UploadWeights(messages(), None)
    assert not list((shell.store.root / "incoming" / "1-1").iterdir())
    assert (await shell.trainer.UploadWeights(messages(), None)).file_bytes == 8000


async def test_a_workers_canary_that_cannot_be_written_breaks_no_stream(shell: Shell) -> None:
    """Without the file every later worker is held to it all the same."""
    (load,) = [p.command for p in shell.state.pending.values() if isinstance(p.command, do.LoadVersion)]
    canary = pb.Canary(token_ids=convert._bytes((1, 2), convert._INT32))
    canary.logprobs = convert._bytes((-1.0,), convert._FLOAT32)
    with files_up_to(10):
        outcome = pb.WorkerOutcome(command_id=load.command_id, ok=True, canary=canary)
        shell.runtime.reports.outcome(shell.session, outcome)
    assert shell.store.canary(0) is not None and faults(shell) == {"run folder": "File too large"}
    assert shell.runtime.sessions.workers == {"w0": shell.session} and not shell.runtime.failed.done()


async def test_what_cannot_be_tidied_ends_nothing(shell: Shell, tmp_path: Path) -> None:
    os.rename(tmp_path / "kv", tmp_path / "away")
    (tmp_path / "kv").write_text("no folder")
    shell.runtime.sweep_snapshots()
    assert not shell.runtime.failed.done()
    os.rename(shell.store.root, tmp_path / "gone")
    await shell.runtime.look_at_storage()
    assert faults(shell) == {"run folder": "No such file or directory"}, "and nothing is admitted"
    os.rename(tmp_path / "gone", shell.store.root)
    await shell.runtime.look_at_storage()
    assert not faults(shell)


def test_a_snapshot_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    segments = SegmentPool(tmp_path, "1", 1 << 20)
    with files_up_to(100), pytest.raises(SnapshotRefused, match="no room left"):
        segments.lend(1000)
    assert [file.name for file in (tmp_path / "1").iterdir()] == ["owner.lock"] and not segments.lent_bytes()
    segments.close()
    with pytest.raises(SnapshotRefused, match="No such file"):
        segments.lend(1000)


def test_room_is_looked_for_by_taking_it(tmp_path: Path) -> None:
    check_room(tmp_path)
    found = os.statvfs(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        check_room(tmp_path, found.f_blocks * found.f_frsize + 1)
    with files_up_to(100), pytest.raises(OSError, match="File too large"):
        check_room(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_start_without_room_is_refused(tmp_path: Path, tiny_dense: Path) -> None:
    with files_up_to(10), pytest.raises(InvalidValue, match=r"service.run_folder = .* room to write in"):
        store_of(tmp_path, tiny_dense)


# --------------------------------------------------------------------------------------------------- the event log


async def test_an_event_log_without_room_stops_admission_and_lacks_nothing(shell: Shell, tmp_path: Path) -> None:
    log = EventLogWriter(tmp_path / "log", shell.runtime.config, now_s=0.0)
    shell.runtime.event_log = log
    with files_up_to((tmp_path / "log").stat().st_size + 300):
        for _ in range(200):
            shell.runtime.post(on.Tick())
        await shell.runtime.look_at_storage()
        await shell.until(lambda: shell.state.window.closed)
        assert faults(shell)["event log"] == "File too large"
        shell.runtime.post(on.Tick())
    await shell.runtime.look_at_storage()
    await shell.until(lambda: not shell.state.window.closed)
    log.close()
    kinds = [type(record.event).__name__ for record in read_log(tmp_path / "log")]
    assert kinds.count("Tick") == 201 and kinds.count("StorageChanged") >= 2


# ---------------------------------------------------------------------------------------------------- what verify sees


def recorded(folder: Path, tiny_dense: Path, steps: int = 3) -> list[str]:
    """A record of so many committed steps of two groups each, and of a step that was not committed."""
    with Recorder(folder) as recorder:
        recorder.keep_version(0, tiny_dense)
        for step in range(steps + 1):
            groups = [make_group(step, number) for number in range(2)]
            for group in groups:
                recorder.append(group.trajectories)
            if step < steps:
                counts = {group.group_id: len(group.trajectories) for group in groups}
                recorder.commit(CommittedStep(step, step + 1, counts, 1.0), tiny_dense)
    return found(folder)


def found(folder: Path) -> list[str]:
    return list(missing(folder, read_trajectories(folder / TRAJECTORIES_FILE))[1])


def test_a_record_that_lacks_what_was_committed_is_found_out(tmp_path: Path, tiny_dense: Path) -> None:
    assert not recorded(tmp_path, tiny_dense)
    whole = (tmp_path / TRAJECTORIES_FILE).read_bytes().splitlines(keepends=True)
    steps = (tmp_path / STEPS_FILE).read_bytes().splitlines(keepends=True)
    for cut in (1, 2, 6, 12):  # of 16 lines, 4 a step
        (tmp_path / TRAJECTORIES_FILE).write_bytes(b"".join(whole[:-cut]))
        assert bool(found(tmp_path)) == (cut > 4), cut
    (tmp_path / TRAJECTORIES_FILE).write_bytes(b"".join(whole[4:]))
    assert "step 0 was committed, and the record lacks groups of it: s0-g0 (0 of 2 trajectories)" in found(tmp_path)[0]
    (tmp_path / TRAJECTORIES_FILE).write_bytes(b"".join(whole)[:-30])
    assert not found(tmp_path), "a torn line at the end was never acknowledged"
    (tmp_path / TRAJECTORIES_FILE).write_bytes(b"".join(whole))
    for kept, complaint in (
        (steps[:2], "though step 2 was not committed"),
        (steps[1:], "step 0 is missing"),
        (steps[:1] + steps[2:], "step 1 is missing"),
        ([], "though step 0 was not committed"),
        ([steps[0], steps[1].replace(b"s1-g1", b"s1-g0"), steps[2]], "committed without it"),
        ([steps[0], steps[1].replace(b"s1-g1", b"s0-g1"), steps[2]], "in step 0 and in step 1"),
        ([*steps, steps[2]], ""),
    ):
        (tmp_path / STEPS_FILE).write_bytes(b"".join(kept))
        assert complaint in " ".join(found(tmp_path)) and bool(complaint) == bool(found(tmp_path)), kept
    (tmp_path / STEPS_FILE).unlink()
    assert found(tmp_path) == [f"{STEPS_FILE} is missing: the record does not say which steps were committed."]


def test_a_cancelled_groups_lines_are_no_violation(tmp_path: Path, tiny_dense: Path) -> None:
    recorded(tmp_path, tiny_dense)
    with Recorder(tmp_path) as recorder:
        recorder.append(make_group(0, 5).trajectories)
    assert found(tmp_path) == ["group s0-g5 is recorded of step 0, which was committed without it."]
    (tmp_path / CANCELLED_FILE).write_text(json.dumps({"group_id": "s0-g5"}) + "\n")
    assert not found(tmp_path)
    os.rename(tmp_path / "versions" / "2", tmp_path / "elsewhere")
    assert found(tmp_path) == ["version 2, which step 1 published, is not in the record."]
