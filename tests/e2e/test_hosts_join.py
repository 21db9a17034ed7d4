"""Hosts that join by ``dora host``, with fake engines on loopback: they work, are killed, come back, are drained."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import dora
from dora.client import Operator
from dora.errors import Conflict, NotFound
from dora.models.tiny import make_tiny
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import Role
from tests.e2e.agents import agent, are_ready, host, joining
from tests.refusals import refused
from tests.service import check_promises, configured, during, running, train, until

GROUPS = 4
# long enough that a version is published while responses of the one before are under way
LONG = {
    "workers__engine": "fake",
    "workers__count": 1,
    "rollout__ignore_eos": True,
    "rollout__max_tokens": 1500,
    "workers__max_model_len_tokens": 2048,
    "workers__kv_tokens": 16384,
    "kv__pool_mb": 64,
}


async def test_two_hosts_join_and_one_is_killed(tiny_dense: Path, tmp_path: Path) -> None:
    config = configured(tiny_dense, window__size=2, **LONG)
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(running(config, processes=True))
        operator = await stack.enter_async_context(Operator(handle.address, handle.token))
        trainer = await stack.enter_async_context(dora.Trainer(handle.address, token=handle.token))
        h1 = await stack.enter_async_context(agent(handle, "h1", tmp_path / "h1.log", "--workers", "2"))
        await stack.enter_async_context(agent(handle, "h2", tmp_path / "h2.log"))
        status = await until(operator, are_ready(4))
        assert [worker.worker_id for worker in status.workers] == ["h1-w0", "h1-w1", "h2-w0", "w0"]
        assert [worker.host for worker in status.workers] == ["h1", "h1", "h2", "local"]
        assert [each.name for each in status.hosts] == ["local", "h1", "h2"]
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=8, groups=GROUPS, enough=enough))
        await during(training, until(operator, lambda status: status.counters["groups_trained"] >= GROUPS))
        h1.kill()
        lost = until(operator, lambda status: host(status, "h1").state == "lost")
        status = await during(training, lost)
        assert host(status, "h1").reason == "its agent's connection broke"
        enough.set()
        steps = await training
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    counters = status.counters
    assert counters["groups_trained"] == len(steps) * GROUPS
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    assert counters["workers_lost"] == 2
    used = {
        segment.worker_id
        for step in steps
        for group in step
        for each in group.trajectories
        for segment in each.worker_history
    }
    assert {"h1-w0", "h1-w1", "h2-w0", "w0"} <= used


@pytest.mark.full
async def test_hosts_are_scaled_drained_and_leave(tiny_dense: Path, tmp_path: Path) -> None:
    config = configured(tiny_dense, window__size=2, **LONG)
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(running(config, processes=True))
        operator = await stack.enter_async_context(Operator(handle.address, handle.token))
        trainer = await stack.enter_async_context(dora.Trainer(handle.address, token=handle.token))
        h1 = await stack.enter_async_context(agent(handle, "h1", tmp_path / "h1.log"))
        h2 = await stack.enter_async_context(agent(handle, "h2", tmp_path / "h2.log", "--workers", "0"))
        await until(operator, lambda status: are_ready(2)(status) and len(status.hosts) == 3)
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=8, groups=GROUPS, enough=enough))
        await during(training, until(operator, lambda status: status.counters["groups_trained"] >= GROUPS))
        started = (await operator.scale(4)).message.removeprefix("started: ").split(", ")
        assert sorted(started) == ["h1-w1", "h2-w0"]  # by who joined first
        status = await during(training, until(operator, are_ready(4)))
        assert {host(status, name).workers for name in ("h1", "h2")} == {2, 1}
        with refused(NotFound, names=("h3",)):
            await operator.scale(1, "h3")
        with refused(NotFound, names=("h3",)):
            await operator.drain("h3")
        assert (await operator.scale(1, "h1")).message == "draining: h1-w1"
        gone = until(operator, lambda status: host(status, "h1").workers == 1)
        await during(training, gone)
        assert (await operator.drain("h1")).message.startswith("h1 is draining: its workers (1) leave")
        drained = until(operator, lambda status: host(status, "h1").state == "drained")
        status = await during(training, drained)
        assert await asyncio.wait_for(h1.wait(), 60) == 0, "its agent has ended"
        h2.send_signal(signal.SIGTERM)  # the machine is to be shut down
        left = until(operator, lambda status: host(status, "h2").state == "drained")
        await during(training, left)
        assert await asyncio.wait_for(h2.wait(), 60) == 0
        with refused(Conflict, names=("w0",)):
            await operator.drain("local")
        enough.set()
        steps = await training
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    assert status.counters["groups_lost"] == status.counters["c1_violations"] == status.counters["workers_lost"] == 0
    pools = {each.pool_id: each.state for each in status.pools}
    assert pools == {"pool-0": "ready", "h1-pool-0": "drained", "h2-pool-0": "drained"}


async def test_a_host_that_cannot_serve_is_told_why(tiny_dense: Path, tmp_path: Path) -> None:
    other = make_tiny("dense", tmp_path / "other", seed=5)
    config = configured(tiny_dense, workers__engine="fake", workers__count=1)
    async with running(config) as handle, Operator(handle.address, handle.token) as operator:
        refused = {
            "in use": ("h1", handle.tokens[Role.HOST], ("--rejoin-s", "0")),
            "the service's host token": ("h2", handle.tokens[Role.WORKER], ()),
            "it must be that of the service's model": ("h2", handle.tokens[Role.HOST], ("--model", str(other))),
            "letters, digits": ("local", handle.tokens[Role.HOST], ()),
            "no GPU": ("h2", handle.tokens[Role.HOST], ("--device", "cuda:99")),
        }
        async with agent(handle, "h1", tmp_path / "h1.log", "--model", str(tiny_dense), "--workers", "0"):
            await until(operator, lambda status: len(status.hosts) == 2)
            for why, (name, token, options) in refused.items():
                log = tmp_path / f"{why[:6]}.log"
                process = await joining(handle.address, token, name, log, *options)
                assert await asyncio.wait_for(process.wait(), 60) != 0
                said = await asyncio.to_thread(log.read_text)
                assert why in " ".join(said.split()), said
                assert "Traceback" not in said
        assert [each.name for each in (await operator.status()).hosts] == ["local", "h1"]


@pytest.mark.full
async def test_a_host_comes_back_under_a_new_epoch(tiny_dense: Path, tmp_path: Path) -> None:
    """An agent that is stopped for a while is lost; it ends its workers before it joins again, and keeps its folder."""
    config = configured(tiny_dense, window__size=2, workers__silence_timeout_s=2, **LONG)
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(running(config, processes=True))
        operator = await stack.enter_async_context(Operator(handle.address, handle.token))
        trainer = await stack.enter_async_context(dora.Trainer(handle.address, token=handle.token))
        folder = tmp_path / "h1"
        h1 = await stack.enter_async_context(agent(handle, "h1", tmp_path / "h1.log", "--folder", str(folder)))
        status = await until(operator, are_ready(2))
        before = next(worker for worker in status.workers if worker.worker_id == "h1-w0")
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=12, groups=GROUPS, enough=enough))
        await during(training, until(operator, lambda status: status.counters["groups_trained"] >= GROUPS))
        h1.send_signal(signal.SIGSTOP)

        def is_gone(status: pb.Status) -> bool:
            """Its worker's loss is told in the next turn of the service's loop."""
            there = any(worker.worker_id == "h1-w0" and worker.state != "lost" for worker in status.workers)
            return host(status, "h1").state == "lost" and not there

        status = await during(training, until(operator, is_gone))
        assert host(status, "h1").reason == "lease lost: silent for 2 s"
        h1.send_signal(signal.SIGCONT)

        def is_back(status: pb.Status) -> bool:
            return any(
                each.worker_id == "h1-w0" and each.epoch > before.epoch and each.version >= 0 for each in status.workers
            )

        status = await during(training, until(operator, is_back))
        after = next(worker for worker in status.workers if worker.worker_id == "h1-w0")
        assert after.pid != before.pid and host(status, "h1").epoch >= 2
        assert not is_alive(before.pid)
        enough.set()
        steps = await training
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    assert status.counters["groups_lost"] == status.counters["c1_violations"] == 0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
