"""Hosts that leave by a deadline: an operator says so, or a scheduler's signal. Fake engines on loopback."""

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

import dora
from dora.client import Operator
from dora.errors import Conflict, InvalidValue
from dora.rpc import dora_pb2 as pb
from tests.e2e.agents import agent, are_ready, host
from tests.e2e.test_hosts_join import GROUPS, LONG
from tests.refusals import refused
from tests.service import check_promises, configured, during, running, train, until


def worker_of(status: pb.Status, name: str) -> pb.WorkerStatus:
    """The only worker of a host."""
    (worker,) = (each for each in status.workers if each.host == name)
    return worker


async def test_hosts_leave_by_a_deadline_and_every_group_comes_once(tiny_dense: Path, tmp_path: Path) -> None:
    config = configured(tiny_dense, window__size=2, host__notice_s=0.5, **LONG)
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(running(config, processes=True))
        operator = await stack.enter_async_context(Operator(handle.address, handle.token))
        trainer = await stack.enter_async_context(dora.Trainer(handle.address, token=handle.token))
        asked = await stack.enter_async_context(agent(handle, "h1", tmp_path / "h1.log"))
        told = await stack.enter_async_context(agent(handle, "h2", tmp_path / "h2.log"))
        await until(operator, are_ready(3))
        enough = asyncio.Event()
        training = asyncio.create_task(train(handle, trainer, steps=8, groups=GROUPS, enough=enough))
        await during(training, until(operator, lambda status: status.counters["groups_trained"] >= GROUPS))
        with refused(InvalidValue, names=("local",)):
            await operator.drain("local", 30.0)
        with refused(InvalidValue, names=("h1-w0",)):
            await operator.drain("h1-w0", 30.0)

        status = await during(training, until(operator, lambda status: worker_of(status, "h1").running > 0))
        stopped = psutil.Process(worker_of(status, "h1").pid)
        stopped.suspend()  # so what it runs cannot leave yet
        await during(training, until(operator, lambda _: stopped.status() == psutil.STATUS_STOPPED))
        reply = await operator.drain("h1", 30.0)
        assert reply.message == "h1 is draining: its workers (1) leave, then the host, within 30 s"
        leaving = host(await operator.status(), "h1")
        assert (leaving.state, leaving.reason) == ("draining", "drained by an operator, 30 s")
        with refused(Conflict, names=("h1",)):
            await operator.scale(1, "h1")
        stopped.resume()
        await during(training, until(operator, lambda status: host(status, "h1").state == "drained"))
        assert await asyncio.wait_for(asked.wait(), 60) == 0

        told.send_signal(signal.SIGUSR1)  # half a second is not enough for what it holds, or just
        gone = until(operator, lambda status: host(status, "h2").state in ("lost", "drained"))
        await during(training, gone)
        assert await asyncio.wait_for(told.wait(), 60) == 0
        enough.set()
        steps = await training
        status = await operator.status()
    check_promises(steps, window=2, groups=GROUPS)
    counters = status.counters
    assert counters["groups_trained"] == len(steps) * GROUPS
    assert counters["groups_lost"] == counters["c1_violations"] == 0
    assert counters["hosts_noticed"] == 2
    reasons = {name: host(status, name).reason for name in ("h1", "h2")}
    assert reasons == {"h1": "drained by an operator, 30 s", "h2": "preempted by notice, 0.5 s"}
