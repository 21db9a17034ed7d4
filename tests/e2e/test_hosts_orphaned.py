"""A host that has joined outlives a killed orchestrator that keeps its state, with its workers, pool and store."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

import dora
from dora.client import Operator
from dora.data.trajectory import TrajectoryGroup
from dora.rpc import dora_pb2 as pb
from tests.e2e.agents import are_ready, ended, host, joining
from tests.e2e.restarts import Killed, settings_of
from tests.e2e.service_host import Weights, farthest_of
from tests.e2e.test_hosts_join import is_alive
from tests.e2e.test_orphans_fake import pids_of, running, until_none_is_behind
from tests.service import check_promises, until

GROUPS = 4
EXACT = 1e-6
END_S = 60.0


async def test_workers_of_a_joined_host_go_on_with_what_they_run(tiny_dense: Path, tmp_path: Path) -> None:
    """No process is another one, and no token is computed twice, though the service dies in the middle of it."""
    settings = settings_of(tiny_dense, tmp_path, window__size=2, workers__count=1, workers__reattach_timeout_s=30.0)
    service = Killed(tmp_path, settings | {"kv.pool_mb": 64, "rollout.max_tokens": 1500})
    await service.start()
    agent = await joining(service.address, service.token, "h1", tmp_path / "h1.log", "--workers", "2")
    try:
        async with Operator(service.address, service.token) as operator:
            await until(operator, are_ready(3))
        steps: list[list[TrajectoryGroup]] = []
        restarts = 0
        async with dora.Trainer(service.address, token=service.token) as trainer:
            async for step in trainer.steps(groups=GROUPS):
                async with Operator(service.address, service.token) as operator:
                    status = await until(operator, lambda status: running_at(status, "h1") >= 4 or is_sampled(status))
                    if is_sampled(status):  # before this look; the next step is tried
                        steps.append([group async for group in step])
                        await step.commit(weights=tiny_dense, wait=True)
                        continue
                    before, pids = await running(operator), await pids_of(operator)
                    epoch = host(await operator.status(), "h1").epoch
                await service.restart()
                restarts += 1
                async with Operator(service.address, service.token) as operator:
                    status = await until(operator, lambda status: host(status, "h1").state == "ready")
                    assert await pids_of(operator) == pids, "the same processes"
                    assert host(status, "h1").epoch > epoch
                    await until_none_is_behind(operator, before)
                    status = await operator.status()
                assert status.counters["tokens_reprefilled"] == status.counters["migrations_reprefill"] == 0
                assert status.counters["workers_lost"] == 0
                steps.append([group async for group in step])
                await step.commit(weights=tiny_dense, wait=True)
                if restarts == 3:
                    break
        check_promises(steps, window=2, groups=GROUPS)
        every = [each for step in steps for group in step for each in group.trajectories]
        assert {"h1-w0", "h1-w1", "w0"} <= {part.worker_id for each in every for part in each.worker_history}
        assert farthest_of(every, Weights(tiny_dense, "")) < EXACT
        said = (tmp_path / "h1.log").read_text()
        assert said.count("h1 is back at") == 3, said
    finally:
        await ended(agent)
        await service.stop()


@pytest.mark.full  # half a minute
async def test_a_host_goes_on_over_a_stop_that_keeps_the_state(tiny_dense: Path, tmp_path: Path) -> None:
    """Not over one whose agent was killed meanwhile: another one of that name is a host without anything."""
    settings = settings_of(tiny_dense, tmp_path, workers__count=1, workers__reattach_timeout_s=1.0)
    service = Killed(tmp_path, settings)
    await service.start()
    agent = await joining(service.address, service.token, "h1", tmp_path / "h1.log", "--workers", "2")
    try:
        async with Operator(service.address, service.token) as operator:
            await until(operator, are_ready(3))
            assert "h1-w2" in (await operator.scale(3, "h1")).message
            await until(operator, are_ready(4))
            before = await pids_of(operator)
        assert await service.stop() == 0
        await service.start()
        async with Operator(service.address, service.token) as operator:
            await until(
                operator,
                lambda status: (
                    any(each.name == "h1" and each.state == "ready" for each in status.hosts) and are_ready(4)(status)
                ),
            )
            after = await pids_of(operator)
            assert {name: after[name] for name in ("h1-w0", "h1-w1", "h1-w2")} == {
                name: before[name] for name in ("h1-w0", "h1-w1", "h1-w2")
            }
        await service.kill()
        agent.kill()
        await agent.wait()
        await service.start()
        agent = await joining(service.address, service.token, "h1", tmp_path / "h1.log", "--workers", "1")
        async with Operator(service.address, service.token) as operator:
            status = await until(operator, are_ready(2))
            assert host(status, "h1").state == "ready" and host(status, "h1").epoch == 3
            assert (await pids_of(operator))["h1-w0"] != after["h1-w0"]
    finally:
        await ended(agent)
        await service.stop()


@pytest.mark.full
async def test_a_host_that_was_lost_does_not_come_back_with_what_it_ran(tiny_dense: Path, tmp_path: Path) -> None:
    """Its requests resumed elsewhere, and the next life of the service knows it."""
    settings = settings_of(tiny_dense, tmp_path, window__size=2, workers__count=1, workers__silence_timeout_s=2.0)
    service = Killed(tmp_path, settings | {"rollout.max_tokens": 1500})
    await service.start()
    agent = await joining(service.address, service.token, "h1", tmp_path / "h1.log", "--workers", "1")
    try:
        async with Operator(service.address, service.token) as operator:
            await until(operator, are_ready(2))
        steps: list[list[TrajectoryGroup]] = []
        async with dora.Trainer(service.address, token=service.token) as trainer:
            async for step in trainer.steps(groups=GROUPS):
                if not steps:
                    async with Operator(service.address, service.token) as operator:
                        status = await until(operator, lambda status: running_at(status, "h1") >= 1)
                        before, pids = host(status, "h1"), await pids_of(operator)
                        agent.send_signal(signal.SIGSTOP)
                        await until(operator, lambda status: host(status, "h1").state == "lost")
                        await operator.checkpoint()  # otherwise the next life may not know of the loss
                    await service.kill()
                    agent.send_signal(signal.SIGCONT)
                    await service.start()
                    async with Operator(service.address, service.token) as operator:
                        status = await until(operator, lambda status: is_ready_again(status, "h1"))
                        assert host(status, "h1").epoch > before.epoch
                        assert (await pids_of(operator))["h1-w0"] != pids["h1-w0"]
                        assert not is_alive(pids["h1-w0"])
                steps.append([group async for group in step])
                await step.commit(weights=tiny_dense, wait=True)
                if len(steps) == 2:
                    break
        check_promises(steps, window=2, groups=GROUPS)
        assert "is back at" not in (tmp_path / "h1.log").read_text()
    finally:
        await ended(agent)
        await service.stop()


@pytest.mark.full
async def test_a_host_ends_its_workers_where_no_service_comes_back(tiny_dense: Path, tmp_path: Path) -> None:
    settings = settings_of(tiny_dense, tmp_path, workers__count=1, workers__orphan_timeout_s=0.5)
    service = Killed(tmp_path, settings)
    await service.start()
    agent = await joining(service.address, service.token, "h1", tmp_path / "h1.log", "--workers", "1")
    try:
        async with Operator(service.address, service.token) as operator:
            await until(operator, are_ready(2))
            before = (await pids_of(operator))["h1-w0"]
        descriptor, gone = os.pidfd_open(before), asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, gone.set)
        try:
            await service.kill()
            await asyncio.wait_for(gone.wait(), END_S)
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        await service.start()  # the agent waits on, and has nothing any more
        async with Operator(service.address, service.token) as operator:
            await until(operator, are_ready(2))
            assert (await pids_of(operator))["h1-w0"] != before
        said = (tmp_path / "h1.log").read_text()
        assert "no service within 0.5 s: the workers end" in said and "is back at" not in said
    finally:
        await ended(agent)
        await service.stop()


def is_ready_again(status: pb.Status, name: str) -> bool:
    """Whether a host is there, and its first worker hosts a version."""
    there = any(each.name == name and each.state == "ready" for each in status.hosts)
    return there and any(each.worker_id == f"{name}-w0" and each.version >= 0 for each in status.workers)


def is_sampled(status: pb.Status) -> bool:
    """A step's groups are there, and nothing runs."""
    held = status.counters["groups_admitted"] - status.counters["groups_taken"]
    return held >= GROUPS and not any(worker.running for worker in status.workers)


def running_at(status: pb.Status, name: str) -> int:
    """Requests that run on workers of this host."""
    return sum(worker.running for worker in status.workers if worker.host == name)
