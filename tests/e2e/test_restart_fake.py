"""The orchestrator is killed and started again on its state folder, with fake engines: nothing is lost or doubled."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import dora
from dora.client import Operator
from dora.data.run_record import STEPS_FILE, TRAJECTORIES_FILE
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Prompt
from dora.errors import Conflict
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.invariants import violations
from tests.e2e.restarts import Killed, settings_of
from tests.refusals import refused
from tests.service import check_promises

GROUPS = 4


@asynccontextmanager
async def serving(folder: Path, settings: dict[str, Any]) -> AsyncIterator[Killed]:
    service = Killed(folder, settings)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def trained(
    service: Killed, model: Path, steps: int, kill_in: dict[int, int]
) -> tuple[list[list[TrajectoryGroup]], Any]:
    """Trains so many steps; in step ``s`` of ``kill_in`` the service dies once so many groups of it were taken."""
    taken: list[list[TrajectoryGroup]] = []
    async with dora.Trainer(service.address, token=service.token) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            groups = []
            if kill_in.get(len(taken)) == 0:
                await service.restart()
            async for group in step:
                groups.append(group)
                if kill_in.get(len(taken)) == len(groups):
                    await service.restart()
            taken.append(groups)
            await step.commit(weights=model, wait=True)
            if len(taken) == steps:
                break
    async with Operator(service.address, service.token) as operator:
        return taken, await operator.status()


async def test_a_killed_orchestrator_costs_no_sample(tiny_dense: Path, tmp_path: Path) -> None:
    """It dies as a step begins, in the middle of one, and once all of one is delivered; the record goes on."""
    record = tmp_path / "record"
    settings = settings_of(tiny_dense, tmp_path, window__size=2, record=str(record))
    async with serving(tmp_path, settings) as service:
        steps, status = await trained(service, tiny_dense, 7, {1: 2, 3: 0, 5: GROUPS})
    check_promises(steps, window=2, groups=GROUPS)
    assert status.counters["groups_trained"] == 7 * GROUPS
    assert status.counters["groups_lost"] == 0
    lines = [json.loads(line) for line in (record / TRAJECTORIES_FILE).read_text().splitlines()]
    recorded = {line["trajectory_id"]: line for line in lines}
    assert len(recorded) == len(lines), "each trajectory once"
    for step in steps:
        for group in step:
            for each in group.trajectories:
                assert recorded[each.trajectory_id]["response_token_ids"] == each.response_token_ids.tolist()
                assert recorded[each.trajectory_id]["trained_step"] == each.trained_step
    assert not list(violations(read_trajectories(record / TRAJECTORIES_FILE), 2))
    committed = [json.loads(line)["step"] for line in (record / STEPS_FILE).read_text().splitlines()]
    assert committed == list(range(7)), "each step once"


@pytest.mark.full
async def test_a_stop_keeps_its_state_and_so_does_a_change_that_does_not_matter(
    tiny_dense: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_dense, tmp_path, window__size=2)
    service = Killed(tmp_path, settings)
    await service.start()
    first, _ = await trained(service, tiny_dense, 2, {})
    async with Operator(service.address, service.token) as operator:
        before = await operator.checkpoint()
    assert before.step == 2 and before.incarnation == 0 and before.log_bytes >= before.live_bytes > 0
    assert await service.stop() == 0
    assert not service.run_folder.exists()
    service.change(**{"workers.count": 1, "service.tick_s": 0.2})
    await service.start()
    async with Operator(service.address, service.token) as operator:
        assert (await operator.checkpoint()).incarnation == 1
    steps: list[list[TrajectoryGroup]] = list(first)
    async with dora.Trainer(service.address, token=service.token) as trainer:
        async for step in trainer.steps(groups=GROUPS):
            assert step.number == len(steps)
            steps.append([group async for group in step])
            await step.commit(weights=tiny_dense, wait=True)
            if len(steps) == 4:
                break
    assert await service.stop() == 0
    check_promises(steps, window=2, groups=GROUPS)
    prompts = [group.prompt_id for step in steps for group in step]
    assert len(set(prompts)) == len(prompts), "no prompt of the source comes twice"
    service.change(**{"rollout.temperature": 0.5})
    with refused(AssertionError, names=("rollout.temperature = 0.5", "1.0")):
        await service.start()
    (tmp_path / "state" / "versions" / "4").rename(tmp_path / "gone")
    service.change(**{"rollout.temperature": 1.0})
    with refused(AssertionError, names=(f"service.state = {str(tmp_path / 'state')!r}", "version 4")):
        await service.start()
    (tmp_path / "gone" / "model.safetensors").unlink()
    (tmp_path / "gone" / "model.safetensors").write_bytes(bytes((tiny_dense / "model.safetensors").stat().st_size))
    (tmp_path / "gone").rename(tmp_path / "state" / "versions" / "4")
    with refused(AssertionError, names=(f"service.state = {str(tmp_path / 'state')!r}", "undamaged", "version 4")):
        await service.start()


@pytest.mark.full
async def test_what_was_submitted_comes_once_whatever_dies(tiny_dense: Path, tmp_path: Path) -> None:
    """Prompts that are queued, taken back, or being generated as the service dies; then it is said that none follow."""
    settings = settings_of(tiny_dense, tmp_path, prompts="none", **{"reward.function": "dora.rewards.tiny:score"})
    async with serving(tmp_path, settings) as service:
        async with dora.Prompts(service.address, service.token) as submitter:
            await submitter.submit([Prompt(f"p{i}", "echo", (1, 2, 3), priority=i % 3) for i in range(40)])
        await service.restart()
        async with dora.Prompts(service.address, service.token) as submitter:
            with refused(Conflict, names=("p0",)):
                await submitter.submit([Prompt("p0", "echo", (1, 2, 3))])
            assert [each.state for each in await submitter.cancel(["p1"])] == ["dequeued"]
        await service.restart()
        async with dora.Prompts(service.address, service.token) as submitter:
            assert [each.state for each in await submitter.cancel(["p1"])] == ["before"]
            await submitter.end()
        seen: list[str] = []
        async with dora.Trainer(service.address, token=service.token) as trainer:
            async for step in trainer.steps(groups=GROUPS):
                async for group in step:
                    seen.append(group.prompt_id)
                    if len(seen) in (2, 22):
                        await service.restart()
                await step.commit(weights=tiny_dense, wait=True)
    assert sorted(seen) == sorted(f"p{i}" for i in range(40) if i != 1)


async def test_a_state_folder_that_is_in_use_is_refused(tiny_dense: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_dense, tmp_path)
    async with serving(tmp_path, settings) as service:
        other = Killed(tmp_path / "state", settings)
        names = (f"service.state = {str(tmp_path / 'state')!r}", f"process {service.pid} on")
        with refused(AssertionError, names=names):
            await other.start()
