"""Requests that are parked while a service runs, with fake engines: by hand, over a killed pool and a killed worker."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

import dora
from dora.client import Operator
from dora.data.trajectory import TrajectoryGroup
from dora.errors import NotFound
from dora.rpc import dora_pb2 as pb
from tests.refusals import refused
from tests.service import check_promises, configured, during, park, running, train, train_beside, until

GROUPS = 4
TCP = pytest.param("dora", "tcp", marks=pytest.mark.full)
LONG = {
    "workers__engine": "fake",
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 1500,
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
    "kv__pool_mb": 64,
}


def arrivals(steps: list[list[TrajectoryGroup]]) -> list[str]:
    groups = [group for step in steps for group in step]
    found = [segment for group in groups for each in group.trajectories for segment in each.worker_history]
    assert not any(segment.worker_id == "pool-0" for segment in found), "a pool samples nothing"
    return [segment.arrival for segment in found]


def is_empty(status: pb.Status) -> bool:
    pool = status.pools[0]
    return (pool.state, pool.parked, pool.kv_tokens, pool.memory_bytes, pool.spill_bytes) == ("ready", 0, 0, 0, 0)


@pytest.mark.parametrize(("policy", "transports"), [("laxity", "shm,tcp"), TCP])
async def test_parked_requests_go_on_and_nothing_is_left(tiny_dense: Path, policy: str, transports: str) -> None:
    config = configured(tiny_dense, window__size=2, balance__policy=policy, kv__transports=transports, **LONG)
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps = await train_beside(handle, trainer, 4, GROUPS, park(operator, 6))
        status = await until(operator, is_empty)
    check_promises(steps, window=2, groups=GROUPS)
    assert "parked" in arrivals(steps)
    counters = status.counters
    assert counters["groups_lost"] == counters["c1_violations"] == counters["groups_cancelled"] == 0
    assert counters["tokens_reprefilled"] == counters["parked_lost"] == 0


@pytest.mark.full
async def test_a_killed_pool_costs_no_sample(tiny_dense: Path) -> None:
    async with (
        running(configured(tiny_dense, window__size=2, **LONG)) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=8, groups=GROUPS, enough=enough))
        await during(training, park(operator, 2))
        first = (await operator.status()).pools[0]
        parking = asyncio.create_task(park(operator, 1 << 30))
        os.kill(first.pid, signal.SIGKILL)
        again = until(operator, lambda status: status.pools[0].state == "ready" and status.pools[0].epoch > first.epoch)
        await during(training, again)
        parking.cancel()
        enough.set()
        steps = await training
        status = await until(operator, is_empty)
        assert not list(handle.run_folder.glob(f"kv/{first.epoch}")), "its memory is swept"
    check_promises(steps, window=2, groups=GROUPS)
    assert status.counters["groups_lost"] == status.counters["workers_lost"] == 0


@pytest.mark.full
async def test_parked_requests_outlive_their_worker(tiny_dense: Path) -> None:
    async with (
        running(configured(tiny_dense, window__size=2, **LONG), processes=True) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=6, groups=GROUPS, enough=enough))
        await during(training, park(operator, 2))
        parking = asyncio.create_task(park(operator, 1 << 30))
        status = await operator.status()
        os.kill(status.workers[0].pid, signal.SIGKILL)
        await during(training, until(operator, lambda status: status.counters["workers_lost"] >= 1))
        parking.cancel()
        enough.set()
        steps = await training
        status = await until(operator, is_empty)
    check_promises(steps, window=2, groups=GROUPS)
    assert status.counters["groups_lost"] == 0


async def test_a_service_without_a_pool_parks_nothing(tiny_dense: Path) -> None:
    config = configured(tiny_dense, window__size=2, **{**LONG, "kv__pool_mb": 0, "rollout__max_tokens": 100})
    async with (
        running(config) as handle,
        Operator(handle.address, handle.token) as operator,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        steps = await train(handle, trainer, steps=2, groups=GROUPS)
        status = await operator.status()
        with refused(NotFound, names=("pool-0",)):
            await operator.migrate((await operator.trajectories("")).trajectories[0].trajectory_id, "pool-0")
    check_promises(steps, window=2, groups=GROUPS)
    assert not status.pools and not status.counters["requests_parked"]
