"""Two services on one thing: a copy of a state folder beside its original, one record, folders without lock files."""

import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

import dora
from dora.client import Operator
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import missing
from tests.e2e.restarts import Killed, settings_of
from tests.refusals import refused

GROUPS = 4


def service(folder: Path, settings: dict[str, Any], **changes: Any) -> Killed:
    folder.mkdir(exist_ok=True)
    return Killed(folder, settings | changes)


async def pids_of(told: Killed) -> dict[str, int]:
    async with Operator(told.address, told.token) as operator:
        return {worker.worker_id: worker.pid for worker in (await operator.status()).workers}


async def step_of(told: Killed, model: Path) -> int:
    """Trains one step. Returns its number."""
    async with dora.Trainer(told.address, token=told.token) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            assert len([group async for group in step]) == GROUPS
            await step.commit(weights=model, wait=True)
            return step.number
    raise AssertionError


@pytest.mark.parametrize("is_alive", [True, pytest.param(False, marks=pytest.mark.full)])
async def test_a_copy_leaves_the_original_and_its_processes_alone(
    is_alive: bool, tiny_dense: Path, tmp_path: Path
) -> None:
    """Whether or not the original's service runs; its pool and its address, too."""
    settings = settings_of(tiny_dense, tmp_path, window__size=2, **{"kv.pool_mb": 16})
    settings |= {"workers.reattach_timeout_s": 1.0}
    original = service(tmp_path / "original", settings)
    copy = service(tmp_path / "copy", settings, **{"service.state": str(tmp_path / "copied")})
    await original.start()
    try:
        assert await step_of(original, tiny_dense) == 0
        pids = await pids_of(original)
        if not is_alive:
            await original.kill()
        shutil.copytree(tmp_path / "state", tmp_path / "copied")
        await copy.start()
        assert await step_of(copy, tiny_dense) == 1
        assert not set((await pids_of(copy)).values()) & set(pids.values())
        assert await copy.stop() == 0
        assert "serves another service" in copy.said.read_text()
        assert all(psutil.pid_exists(pid) for pid in pids.values())
        if not is_alive:
            await original.start()
        assert await pids_of(original) == pids, "they go on with their own service"
        assert await step_of(original, tiny_dense) == 1
    finally:
        await copy.stop()
        await original.stop()


@pytest.mark.full
async def test_two_services_cannot_have_one_record(tiny_dense: Path, tmp_path: Path) -> None:
    """The second is started before the first step, with a state folder or without."""
    record = str(tmp_path / "record")
    settings = settings_of(tiny_dense, tmp_path, record=record)
    first = service(tmp_path / "first", settings)
    await first.start()
    try:
        for state in ("", str(tmp_path / "other")):
            second = service(tmp_path / "second", settings, **{"service.state": state})
            with refused(AssertionError, names=(f"record = {record!r}", f"process {first.pid} on")):
                await second.start()
        assert await step_of(first, tiny_dense) == 0
    finally:
        await first.stop()


@pytest.mark.full
async def test_removed_lock_files_let_no_second_service_in(tiny_dense: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_dense, tmp_path, record=str(tmp_path / "record"))
    settings |= {"service.run_folder": str(tmp_path / "run")}
    first = service(tmp_path / "first", settings)
    await first.start()
    try:
        for folder in ("state", "run", "record"):
            os.unlink(tmp_path / folder / "dora.lock")
        changes: dict[str, str] = {}
        for setting, folder in (("service.state", "state"), ("service.run_folder", "run"), ("record", "record")):
            second = service(tmp_path / "second", settings, **changes)
            with refused(AssertionError, names=(f"{setting} = {str(tmp_path / folder)!r}",)):
                await second.start()
            changes[setting] = str(tmp_path / f"another-{folder}")
        assert await step_of(first, tiny_dense) == 0
    finally:
        await first.stop()


@pytest.mark.full
async def test_an_older_state_beside_a_newer_record_trains_no_group_twice(tiny_dense: Path, tmp_path: Path) -> None:
    """It is refused, and carried on deliberately: the record's later steps are set aside."""
    record = tmp_path / "record"
    settings = settings_of(tiny_dense, tmp_path, window__size=2, record=str(record))
    told = service(tmp_path / "service", settings)
    await told.start()
    try:
        assert await step_of(told, tiny_dense) == 0
        await told.stop()
        shutil.copytree(tmp_path / "state", tmp_path / "older")
        await told.start()
        assert [await step_of(told, tiny_dense), await step_of(told, tiny_dense)] == [1, 2]
        await told.stop()
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "older").rename(tmp_path / "state")
        with refused(AssertionError, names=("service.state = ", f"record {str(record)!r}", 2, "--carry-on-from 1")):
            await told.start()
        told.change(**{"service.carry_on_from": 1})
        told.address = ""  # a copy's address is its own
        await told.start()
        assert [await step_of(told, tiny_dense), await step_of(told, tiny_dense)] == [1, 2]
        await told.stop()
    finally:
        await told.stop()
    trajectories = read_trajectories(record / "trajectories.jsonl")
    assert len({each.trajectory_id for each in trajectories}) == len(trajectories)
    steps, found = missing(record, trajectories)
    assert steps == 3 and list(found) == []
    assert len((record / "set-aside-1" / "steps.jsonl").read_text().splitlines()) == 2
