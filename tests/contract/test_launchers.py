"""One suite for all launchers: that of this machine's processes, and that of an agent elsewhere, over its stream."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dora.client import Operator
from dora.errors import InvalidValue
from dora.host.launcher import Launcher, WorkerStartError
from dora.orchestrator.hosts.hosts import Hosts
from dora.rpc import dora_pb2 as pb
from tests.e2e.agents import agent
from tests.refusals import refused
from tests.service import configured, running, until
from tests.sweeps import some_of

NAMES = {"local": "", "remote": "far-"}  # with what the ids of workers begin


@dataclass(frozen=True)
class Ground:
    """A launcher at work, and what a service sees of its workers."""

    launcher: Launcher
    operator: Operator
    prefix: str

    def name(self, number: int) -> str:
        return f"{self.prefix}w{number}"

    async def seen(self, condition: Callable[[dict[str, pb.WorkerStatus]], bool]) -> dict[str, pb.WorkerStatus]:
        """This launcher's workers that are connected and host a version, once they are as they should be."""
        found: dict[str, pb.WorkerStatus] = {}

        def holds(status: pb.Status) -> bool:
            found.clear()
            host = "local" if not self.prefix else "far"
            found.update({each.worker_id: each for each in status.workers if each.host == host and each.version >= 0})
            return condition(found)

        await until(self.operator, holds)
        return found


@asynccontextmanager
async def ground(
    kind: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, restarts: int = 16
) -> AsyncIterator[Ground]:
    kept: list[Hosts] = []

    class Kept(Hosts):
        def begin(self, *given: object) -> None:  # type: ignore[override]
            kept.append(self)
            super().begin(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("dora.orchestrator.runtime.Hosts", Kept)
    local = 1 if kind == "remote" else 0
    config = configured(model, workers__engine="fake", workers__count=local, workers__restarts=restarts)
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(running(config, processes=True))
        operator = await stack.enter_async_context(Operator(handle.address, handle.token))
        if kind == "remote":
            await stack.enter_async_context(agent(handle, "far", folder / "far.log", "--workers", "0"))
            await until(operator, lambda status: len(status.hosts) == 2)
        launcher = kept[0]._hosts["far" if kind == "remote" else "local"].launcher
        yield Ground(launcher, operator, NAMES[kind])


def is_newer(workers: dict[str, pb.WorkerStatus], before: dict[str, pb.WorkerStatus], name: str) -> bool:
    """Whether all are there, this one in a later epoch."""
    return len(workers) == len(before) and workers[name].epoch > before[name].epoch


@pytest.mark.parametrize("kind", some_of(NAMES, "local"))
async def test_a_launcher_starts_scales_stops_and_starts_again(
    kind: str, tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ground(kind, tiny_dense, tmp_path, monkeypatch) as on:
        launcher = on.launcher
        assert not launcher.workers and not launcher.failed.done()
        launcher.start(on.name(1))
        launcher.start(on.name(1))  # it is there: nothing happens
        await on.seen(lambda workers: set(workers) == {on.name(1)})
        change = launcher.scale(3)  # the lowest free numbers
        assert change.started == (on.name(0), on.name(2)) and not change.surplus
        before = await on.seen(lambda workers: len(workers) == 3)
        assert set(launcher.workers) == set(before) == {on.name(0), on.name(1), on.name(2)}

        os.kill(before[on.name(0)].pid, signal.SIGKILL)  # it dies: it comes again, under its name and a new epoch
        after = await on.seen(
            lambda workers: len(workers) == 3 and workers[on.name(0)].epoch > before[on.name(0)].epoch
        )
        launcher.stop(on.name(1), again=True)  # it is not trusted: the same
        last = await on.seen(lambda workers: len(workers) == 3 and workers[on.name(1)].epoch > after[on.name(1)].epoch)
        assert last[on.name(2)].epoch == before[on.name(2)].epoch

        change = launcher.scale(1)
        assert change.surplus == (on.name(1), on.name(2)) and not change.started
        assert len(launcher.workers) == 3, "whoever asked empties the surplus first"
        for name in change.surplus:
            launcher.stop(name)
        await on.seen(lambda workers: set(workers) == {on.name(0)})
        assert set(launcher.workers) == {on.name(0)}
        launcher.stop("another")  # not its own
        with refused(InvalidValue, field="workers", value=257, names=("0", "256")):
            launcher.scale(257)
        change = launcher.scale(2)  # a name that was left is taken again
        assert change.started == (on.name(1),)
        await on.seen(lambda workers: set(workers) == {on.name(0), on.name(1)})


@pytest.mark.parametrize("kind", some_of(NAMES, "local"))
async def test_a_launcher_fails_once_no_worker_is_left_that_may_be_started_again(
    kind: str, tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = False
    with contextlib.suppress(WorkerStartError):  # as the service of a local launcher ends, for it has no other host
        async with ground(kind, tiny_dense, tmp_path, monkeypatch, restarts=0) as on:
            on.launcher.scale(2)
            workers = await on.seen(lambda workers: len(workers) == 2)
            first, second = (workers[on.name(number)].pid for number in range(2))
            os.kill(first, signal.SIGKILL)
            await on.seen(lambda workers: len(workers) == 1 and not psutil.pid_exists(first))  # its parent has seen it
            assert not on.launcher.failed.done(), "the other one goes on"
            os.kill(second, signal.SIGKILL)
            with refused(WorkerStartError, names=(on.name(1), -signal.SIGKILL)):
                await asyncio.wait_for(asyncio.shield(on.launcher.failed), 60)
            reached = True
    assert reached
