"""Workers and pools outlive a killed orchestrator: they go on with what they run, and end where none comes back."""

import asyncio
import json
import os
from pathlib import Path

import pytest

import dora
from dora.client import Operator
from tests.e2e.restarts import Killed, settings_of
from tests.service import check_promises, park, until

GROUPS = 4
END_S = 60.0


async def running(operator: Operator) -> dict[str, int]:
    """The requests on workers, with the tokens of each as the service knows it."""
    listed = (await operator.trajectories("running", limit=1000)).trajectories
    return {each.trajectory_id: each.tokens for each in listed}


async def until_none_is_behind(operator: Operator, before: dict[str, int]) -> None:
    """Workers report again what the killed service may have known and not written down."""
    async for _ in operator.watch(period_ms=50):
        after = await running(operator)
        if all(after[name] >= tokens for name, tokens in before.items() if name in after):
            return


async def test_requests_go_on_where_they_run(tiny_dense: Path, tmp_path: Path) -> None:
    """No token is computed twice, though the service dies while all of them are under way."""
    settings = settings_of(
        tiny_dense, tmp_path, window__size=2, rollout__max_tokens=1500, workers__reattach_timeout_s=30.0
    )
    service = Killed(tmp_path, settings)
    await service.start()
    try:
        async with dora.Trainer(service.address, token=service.token) as trainer:
            steps = []
            async for step in trainer.steps(groups=GROUPS):
                async with Operator(service.address, service.token) as operator:
                    await until(operator, lambda status: sum(worker.running for worker in status.workers) >= 8)
                    before, pids = await running(operator), await pids_of(operator)
                await service.restart()
                async with Operator(service.address, service.token) as operator:
                    assert await pids_of(operator) == pids, "the same processes"
                    await until_none_is_behind(operator, before)
                    status = await operator.status()
                assert status.counters["tokens_reprefilled"] == status.counters["migrations_reprefill"] == 0
                steps.append([group async for group in step])
                await step.commit(weights=tiny_dense, wait=True)
                if len(steps) == 2:
                    break
        check_promises(steps, window=2, groups=GROUPS)
    finally:
        await service.stop()


@pytest.mark.full
async def test_what_is_parked_outlives_the_orchestrator(tiny_dense: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_dense, tmp_path, window__size=2)
    settings |= {"kv.pool_mb": 64, "workers.reattach_timeout_s": 30.0, "rollout.max_tokens": 4000}
    settings |= {"workers.max_model_len_tokens": 4096, "workers.kv_tokens": 65536}  # none ends before it is parked
    service = Killed(tmp_path, settings)
    await service.start()
    try:
        async with dora.Trainer(service.address, token=service.token) as trainer:
            async for step in trainer.steps(groups=GROUPS):
                async with Operator(service.address, service.token) as operator:
                    await park(operator, 1)
                await service.restart()
                groups = [group async for group in step]
                break
        assert len(groups) == GROUPS
        async with Operator(service.address, service.token) as operator:
            (pool,) = (await operator.status()).pools
            assert pool.state == "ready"
        told = service.said.read_text()
        assert "1 pools" in told and "is replaced" not in told
    finally:
        await service.stop()


async def test_a_worker_ends_where_no_service_comes_back(tiny_dense: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_dense, tmp_path, **{"workers.orphan_timeout_s": 0.5})
    service = Killed(tmp_path, settings)
    await service.start()
    async with Operator(service.address, service.token) as operator:
        pids = await pids_of(operator)
    descriptors = [os.pidfd_open(pid) for pid in pids.values()]
    try:
        await service.kill()
        ended = [asyncio.Event() for _ in descriptors]
        for descriptor, event in zip(descriptors, ended, strict=True):
            asyncio.get_running_loop().add_reader(descriptor, event.set)
        async with asyncio.timeout(END_S):
            await asyncio.gather(*(event.wait() for event in ended))
    finally:
        for descriptor in descriptors:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
    assert "no service within 0.5 s" in (service.run_folder / "logs" / "w0.log").read_text()
    known = json.loads((tmp_path / "state" / "processes.json").read_text())
    assert {name: told["pid"] for name, told in known.items()} == pids
    await service.start()  # with other processes
    async with Operator(service.address, service.token) as operator:
        assert not set((await pids_of(operator)).values()) & set(pids.values())
    await service.stop()


async def pids_of(operator: Operator) -> dict[str, int]:
    return {worker.worker_id: worker.pid for worker in (await operator.status()).workers}
