"""Weights, or the whole run folder, vanish under a living service: it says so, asks for them, and goes on."""

import asyncio
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
from safetensors.numpy import load_file

import dora
from dora.client import Operator
from dora.errors import Conflict, VersionRejected
from dora.orchestrator import spread
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from tests.service import check_promises, configured, running, until
from tests.unit.test_runtime import Shell, ended

GROUPS = 4


@pytest.mark.timeout(300)
async def test_a_version_whose_weights_vanish_is_published_anew(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the very weights, as responses were sampled under it."""
    monkeypatch.setattr(spread, "REMIND_S", 0.0)
    tensors = load_file(tiny_dense / "model.safetensors")
    other = {name: np.float32(2) * tensor for name, tensor in tensors.items()}
    config = configured(tiny_dense, workers__engine="fake", workers__count=2)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps, told = [], []
        async for step in trainer.steps(groups=GROUPS):
            taken = []
            if step.number == 1:
                await until(operator, lambda status: all(worker.version == 1 for worker in status.workers))
                rmtree(handle.run_folder / "weights" / "versions" / "1")
                status = await until(operator, lambda status: _of(status, 1).state == "rejected")
                assert _of(status, 1).reason == "no host has its weights any more"
            while not step.committed:
                try:
                    async for group in step:
                        taken.append(group)
                    await step.commit(weights=tensors, wait=True)
                except VersionRejected as rejected:
                    told.append(rejected)
                    with pytest.raises(Conflict, match="byte for byte: there are responses"):
                        await trainer.republish(other, version=rejected.version)
                    await trainer.republish(tensors, version=rejected.version)
            steps.append(taken)
            if len(steps) == 4:
                break
        counters = (await operator.status()).counters
    assert [(each.version, each.worker_ids) for each in told] == [(1, ())]
    assert counters["groups_lost"] == counters["c1_violations"] == counters["workers_lost"] == 0
    check_promises(steps, window=2, groups=GROUPS)


async def test_weights_that_vanish_before_anybody_has_loaded_them_end_nothing(tiny_dense: Path) -> None:
    """Whoever finds it first, a worker, the order to load, or the look of every few seconds."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=2, window__size=1)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps = []
        async for step in trainer.steps(groups=GROUPS):
            taken = []
            while not step.committed:
                try:
                    async for group in step:
                        taken.append(group)
                    await step.commit(weights=handle.model, wait=True)
                    if step.number == 1:
                        rmtree(handle.run_folder / "weights" / "versions" / "2")
                except VersionRejected as rejected:
                    await trainer.republish(handle.model, version=rejected.version)
            steps.append(taken)
            if len(steps) == 4:
                break
        counters = (await operator.status()).counters
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    check_promises(steps, window=1, groups=GROUPS)


def _of(status: pb.Status, version: int) -> pb.VersionStatus:
    return next(each for each in status.versions if each.version == version)


async def test_a_run_folder_that_vanishes_is_a_fault_that_is_shown(tiny_dense: Path, tmp_path: Path) -> None:
    """And that passes, as any other one of the storage does: no status ends the service."""
    config = configured(tiny_dense, workers__engine="fake", workers__count=1, service__run_folder=str(tmp_path / "run"))
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        aside = handle.run_folder.with_name("aside")
        await asyncio.to_thread(handle.run_folder.rename, aside)
        status = await until(operator, lambda status: status.storage_faults)
        assert [(fault.place, fault.reason) for fault in status.storage_faults] == [
            ("run folder", "No such file or directory")
        ]
        (local,) = (await operator.status()).hosts
        assert local.name == "local" and list(local.versions) == [] and local.capacity.cores > 0
        assert not local.capacity.store_free_bytes
        await asyncio.to_thread(aside.rename, handle.run_folder)
        await until(operator, lambda status: not status.storage_faults)
        steps = []
        async for step in trainer.steps(groups=GROUPS):
            steps.append([group async for group in step])
            await step.commit(weights=handle.model, wait=True)
            if len(steps) == 3:
                break
    check_promises(steps, window=2, groups=GROUPS)


async def test_a_commit_into_a_run_folder_that_has_vanished_is_to_be_repeated(tiny_dense: Path, tmp_path: Path) -> None:
    shell = Shell(tmp_path, tiny_dense, None)
    (request_id,) = await shell.admit(1)
    stream = shell.trainer.StreamStep(pb.StreamStepRequest(trainer_epoch=1, step=0), None)
    shell.report(ended(request_id))
    async for _ in stream:
        pass
    request, aside = shell.commit_request(), tmp_path / "aside"
    shell.store.root.rename(aside)
    with pytest.raises(ServiceUnavailable, match=r"run folder cannot be written \(No such file"):
        await shell.trainer.CommitStep(request, None)
    assert not shell.runtime.failed.done() and shell.state.window.newest == 0
    aside.rename(shell.store.root)
    assert (await shell.trainer.CommitStep(request, None)).next_step == 1
    await shell.runtime.close()
