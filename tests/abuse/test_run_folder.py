"""Shared memory without room: nothing is admitted, no stream breaks, nothing is half written."""

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dora.config import Config
from dora.core import commands as do
from dora.errors import InvalidValue, SnapshotRefused
from dora.kvtransfer.transports.segments import SegmentPool
from dora.orchestrator.recording.storage import check_room
from dora.orchestrator.setup import store_of
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import LimitExceeded
from tests.abuse.full import faults, files_up_to, fill
from tests.refusals import refused
from tests.unit.test_runtime import Shell


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    yield made
    await made.runtime.close()


async def test_weights_that_do_not_fit_leave_nothing_and_may_be_published_again(shell: Shell) -> None:
    request = shell.commit_request()
    await fill(shell)
    await shell.runtime.recorder.written()
    with files_up_to(10), refused(LimitExceeded, names=("1",)):
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

    with files_up_to(2500), refused(LimitExceeded, field="a.safetensors", value="8,000 bytes"):
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
    assert shell.runtime.sessions.workers == {"w0": shell.session} and not shell.runtime.core.failed.done()


async def test_what_cannot_be_tidied_ends_nothing(shell: Shell, tmp_path: Path) -> None:
    os.rename(tmp_path / "kv", tmp_path / "away")
    (tmp_path / "kv").write_text("no folder")
    shell.runtime.sweep_snapshots()
    assert not shell.runtime.core.failed.done()
    os.rename(shell.store.root, tmp_path / "gone")
    await shell.runtime.look_at_storage()
    assert faults(shell) == {"run folder": "No such file or directory"}, "and nothing is admitted"
    os.rename(tmp_path / "gone", shell.store.root)
    await shell.runtime.look_at_storage()
    assert not faults(shell)


def test_a_snapshot_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    segments = SegmentPool(tmp_path, "1", 1 << 20)
    with files_up_to(100), refused(SnapshotRefused, field="snapshot folder", value=tmp_path) as caught:
        segments.lend(1000)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert [file.name for file in (tmp_path / "1").iterdir()] == ["owner.lock"] and not segments.lent_bytes()
    segments.close()
    with refused(SnapshotRefused, field="snapshot folder", value=tmp_path) as caught:
        segments.lend(1000)
    assert caught.value.__cause__.errno == errno.ENOENT


def test_room_is_looked_for_by_taking_it(tmp_path: Path) -> None:
    check_room(tmp_path)
    found = os.statvfs(tmp_path)
    with refused(OSError, errno=errno.ENOSPC):
        check_room(tmp_path, found.f_blocks * found.f_frsize + 1)
    with files_up_to(100), refused(OSError, errno=errno.EFBIG):
        check_room(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_start_without_room_is_refused(tmp_path: Path, tiny_dense: Path) -> None:
    with files_up_to(10), refused(InvalidValue, names=("service.run_folder",)):
        store_of(tmp_path, tiny_dense, Config())
