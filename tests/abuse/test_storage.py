"""A disk that is full is a state of the service: it admits nothing, keeps what it has acknowledged, and goes on.

The faults are real: files that may not grow, and a file where a folder should be.
"""

import asyncio
import errno
import logging
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dora
from dora.client import Operator
from dora.core import events as on
from dora.data.run_record import STEPS_FILE, TRAJECTORIES_FILE, Recorder
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt, TokenDelta
from dora.errors import InvalidValue
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import missing, read_steps
from dora.orchestrator import setup
from dora.orchestrator.recording import storage as storage_faults
from dora.orchestrator.rollout import record_queue
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.weights.files import hash_file
from tests.abuse.full import FILLING, faults, files_up_to, fill, full_device, lines_of, looking, record_of
from tests.contract.trainer_service import make_group
from tests.refusals import refused
from tests.service import check_promises, configured, during, running, train, until
from tests.unit.test_runtime import Shell, ended

SMALL_BYTES = 3000  # there is room for the store's own notes on a version, and not for eight trajectories


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    yield made
    await made.runtime.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_queue, "STORED_WAIT_S", 0.0)


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
    assert (step["step"], step["version"], step["groups"]) == (0, 1, {"g0": FILLING})
    assert (await shell.trainer.CommitStep(request, None)).next_step == 1, "repeated, it is recognised"
    assert len(lines_of(shell, STEPS_FILE)) == 1


async def test_a_commit_that_cannot_be_stored_is_unavailable_and_may_be_repeated(shell: Shell, impatient: None) -> None:
    request = shell.commit_request()
    with files_up_to(SMALL_BYTES):
        await fill(shell)
        for _ in range(3):
            commit = asyncio.ensure_future(shell.trainer.CommitStep(request, None))
            with refused(ServiceUnavailable, field="record", names=(os.strerror(errno.EFBIG),)):
                await looking(shell, commit)
        assert shell.state.window.newest == 0 and shell.store.versions() == (0,)
        assert not lines_of(shell, STEPS_FILE) and not lines_of(shell, TRAJECTORIES_FILE)
    commit = asyncio.ensure_future(shell.trainer.CommitStep(request, None))
    assert (await looking(shell, commit)).next_step == 1, "its files need not be brought again"
    trajectories = read_trajectories(record_of(shell) / TRAJECTORIES_FILE)
    steps, lacking = missing(record_of(shell), trajectories)
    assert steps == 1 and not list(lacking) and len(trajectories) == FILLING
    assert not shell.runtime.core.failed.done()


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
        admitted = shell.runtime.core.machine.counters.groups_admitted
        assert len((await receiving).groups) == 1, "the trainer gets what is finished"
        shell.report(ended(second))
        assert [len(batch.groups) async for batch in stream] == [1]
        assert shell.runtime.core.machine.counters.groups_admitted == admitted == 2
        assert not lines_of(shell, TRAJECTORIES_FILE)
    await shell.runtime.look_at_storage()
    await shell.runtime.recorder.written()
    assert [line["group_id"] for line in lines_of(shell, TRAJECTORIES_FILE)] == ["g0", "g1"], "none is torn or missing"
    await shell.until(lambda: len(shell.state.group_row) == 3)


async def test_a_service_that_ends_says_what_its_record_lacks(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    (request_id,) = await shell.admit(1)
    shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    shell.runtime.core.post(on.StepRequested(1, 0))
    with files_up_to(10):
        shell.report(ended(request_id))
        await shell.until(lambda: shell.runtime.storage.faults)
        await shell.runtime.close()
    assert (
        "the run record lacks the last 1 writes: the service's record cannot be written (File too large)" in caplog.text
    )
    assert not shell.runtime.core.failed.done()


async def test_a_fault_is_said_once(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with files_up_to(1000):
        for _ in range(5):
            await shell.runtime.look_at_storage()
    assert caplog.text.count("storage is at fault: run folder: File too large") == 1
    await shell.runtime.look_at_storage()
    assert caplog.text.count("storage has recovered: run folder") == 1 and shell.runtime.storage.faults_seen == 1


@pytest.mark.parametrize("torn_bytes", [1, 20, 4000])
def test_a_line_that_does_not_fit_is_not_there_at_all(tmp_path: Path, torn_bytes: int) -> None:
    first, second = make_group(0, 0), make_group(0, 1)
    file = tmp_path / TRAJECTORIES_FILE
    with Recorder(tmp_path) as recorder:
        recorder.append(first.trajectories)
        before = file.read_bytes()
        with files_up_to(len(before) + torn_bytes):
            if torn_bytes < len(before):
                with refused(OSError, errno=errno.EFBIG):
                    recorder.append(second.trajectories)
                assert file.read_bytes() == before
        recorder.append(second.trajectories)
    assert len(read_trajectories(file)) == 4


async def test_logprobs_that_are_no_numbers_end_nothing(shell: Shell) -> None:
    """They are refused before the book, the record and the trainer see them."""
    (request_id,) = await shell.admit(1)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    for value in (math.nan, math.inf, -math.inf):
        with refused(InvalidValue, field="logprobs"):
            shell.report(TokenDelta(request_id, 0, 0, (3, 2), (value, value), "stop"))
    assert not lines_of(shell, TRAJECTORIES_FILE) and not len(shell.runtime.buffer[request_id])
    shell.report(ended(request_id))
    assert [len(batch.groups) async for batch in stream] == [1]
    await shell.runtime.recorder.written()
    (line,) = lines_of(shell, TRAJECTORIES_FILE)
    assert line["logprobs"] == [-0.5, -0.25] and not shell.runtime.core.failed.done()


async def test_a_trainer_repeats_its_commit_until_the_record_takes_it(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step's line goes to a device that is always full, for a while."""
    monkeypatch.setattr(record_queue, "STORED_WAIT_S", 0.0)
    made: list[Recorder] = []

    class Kept(Recorder):
        def __init__(self, folder: Path, *options: str) -> None:
            super().__init__(folder, *options)
            made.append(self)

    monkeypatch.setattr(setup, "Recorder", Kept)
    record = tmp_path / "record"
    config = configured(tiny_dense, workers__engine="fake", workers__count=1, record=str(record))
    taken: list[list[TrajectoryGroup]] = []
    async with running(config) as handle, Operator(handle.address, handle.token) as operator:
        steps_file = made[0]._steps
        with full_device() as full:
            true_stream, steps_file._stream = steps_file._stream, full
            async with dora.Trainer(handle.address, token=handle.token, reconnect_s=5) as trainer:
                training = asyncio.create_task(train(handle, trainer, steps=2, groups=4))
                status = await during(training, until(operator, lambda status: status.storage_faults))
                assert [fault.place for fault in status.storage_faults] == ["record"]
                assert (await operator.status()).newest_version == 0 and not training.done()
                steps_file._stream = true_stream
                taken = await training
        status = await operator.status()
        assert not status.storage_faults and status.counters["groups_lost"] == 0
    check_promises(taken, window=2, groups=4)
    assert sorted(read_steps(record / STEPS_FILE)[0]) == [0, 1]


async def test_a_file_that_the_service_has_deleted_itself_is_no_fault(tmp_path: Path) -> None:
    storage = storage_faults.Storage()
    with storage.tidying(storage_faults.RUN_FOLDER):
        (tmp_path / "retired" / "model.safetensors").unlink()
    assert not storage.faults and not storage.faults_seen
    await storage.look_at(storage_faults.RUN_FOLDER, tmp_path / "gone")
    assert "run folder" in storage.faults, "a place that is gone as a whole is one"
