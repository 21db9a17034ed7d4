"""The world of the faults: a service with its workers and pool, a trainer, a joined host, and prompts."""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from dora.client import Operator
from dora.errors import DoraError
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import Role, ServiceTokens
from tests.chaos import breaking, clock, family
from tests.chaos.cast import AgentProcess, Command, FrontOfAgents, OpeningProcess, Orphaned, TrainerProcess
from tests.chaos.disk import Disk
from tests.chaos.link import HostLink
from tests.chaos.prompts import Submitting
from tests.chaos.setting import HOST, HOST_WORKER, STATE_BYTES, Setting, settings_in
from tests.e2e.restarts import Killed
from tests.prometheus.server import free_address

QUEUED_MIN: Final = 48  # prompts
POLL_S: Final = 0.02

Condition = Callable[[pb.Status], bool]


class Stuck(Exception):
    """An awaited event has not happened."""


class World:
    """Everything that runs. ``operator`` is that of the service's present life."""

    def __init__(self, setting: Setting, stack: AsyncExitStack) -> None:
        self.setting = setting
        self._stack = stack
        folder = setting.folder
        self.clock = folder / "clock"
        clock.jump(self.clock, 0.0)
        self.disk = Disk(folder / "disk", STATE_BYTES) if setting.has_disk else None
        if self.disk is not None:
            stack.callback(self.disk.close)
        self.link = stack.enter_context(HostLink()) if setting.has_link else None
        # the beginning of a service's command line
        self.inside = [
            *(self.disk.inside if self.disk else ()),
            sys.executable,
            "-m",
            "tests.chaos.clock",
            str(self.clock),
        ]
        self.memory = _memory()
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", dir=self.memory)))
        self.state = folder / "disk" / "state"
        self.state_seen = self.disk.seen / "state" if self.disk else self.state  # from outside of the service
        settings = settings_in(setting, self.state) | {"service.run_folder": str(shared)}
        self.host = self.link.address if self.link else "127.0.0.1"
        self.metrics = free_address(self.host) if setting.has_alerts else ""
        settings |= {"service.metrics": self.metrics}
        self.service = Killed(folder, settings, self.inside, self.host)
        self.incarnations = 0
        self.phases: Counter[str] = Counter()  # in which handoffs were made to stand still; empty: they were over
        self.processes: list[tuple[float, str, int, int]] = []  # when, whose, its id, resident bytes

    async def open(self) -> None:
        setting, folder = self.setting, self.setting.folder
        breaks = setting.breaks if setting.has_sessions else None
        setting.breaks.mkdir()
        self._stack.push_async_callback(self._end)
        await self.start()
        tokens = ServiceTokens(self.service.token).of
        self.submitting = await self._stack.enter_async_context(
            Submitting(self.service.address, tokens[Role.SUBMITTER], setting.rows, breaks)
        )
        await self.submitting.submit()
        argv = [self.service.address, str(setting.groups_per_step), setting.engine]
        self.trainer = TrainerProcess(argv, tokens[Role.TRAINER], folder / "trainer.log")
        own = ["tests.tools", self.service.address, str(folder / "opened")]
        self.environment = OpeningProcess("environment", own, tokens[Role.SUBMITTER], folder / "environment.log")
        self.fronts = [
            FrontOfAgents(
                name, self.service.address, self.service.token, folder / f"{name}.log", self.host, setting.model
            )
            for name in ("front", "second front")
        ]
        self.environments = Command(
            "environments",
            [
                *("environment", breaking.ENVIRONMENT, "--service", self.service.address),
                *("--model", str(setting.model), "--set", f"environment.timeout_s={breaking.CODE_MOST_S}"),
            ],
            tokens[Role.ENVIRONMENT],
            folder / "environments.log",
        )
        own = ["tests.chaos.chats", *(front.url for front in self.fronts)]
        self.chats = OpeningProcess("chats", own, "", folder / "chats.log")
        beyond = self.link.inside if self.link else ()
        self.agent = AgentProcess(HOST, self.service.address, tokens[Role.HOST], folder / "agent.log", beyond)
        self.cast: list[Orphaned] = [self.trainer]
        self.cast += [self.environment, self.environments, *self.fronts, self.chats] if setting.has_sessions else []
        self.cast += [self.agent] if setting.has_host else []
        for each in self.cast:
            self._stack.push_async_callback(each.aclose)
            each.begin()
        self._feeding = asyncio.create_task(self._feed())
        self._stack.push_async_callback(_ended, self._feeding)

    async def start(self) -> float:
        """Starts the service, again where it was killed; the seconds that took."""
        began_s = time.monotonic()
        await self.service.start()
        self.incarnations += 1
        self.operator = await self._stack.enter_async_context(Operator(self.service.address, self.service.token))
        return time.monotonic() - began_s

    async def status(self) -> pb.Status | None:
        """None: there is none now."""
        if not self.incarnations:
            return None
        try:
            return await self.operator.status()
        except DoraError:
            return None

    async def until(self, condition: Condition, what: str) -> pb.Status:
        """Looks again and again, for as long as a recovery may last. Raises Stuck."""
        limit_s = self.setting.recovery_most_s
        status: pb.Status | None = None
        try:
            async with asyncio.timeout(limit_s):
                while status is None or not condition(status):
                    self.check()
                    status = await self.status()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Stuck(f"{what}: not within {limit_s:g} s; {_told(status)}") from None
        return status

    def check(self) -> None:
        """Raises Stuck where a process has ended that nobody has killed."""
        for each in self.cast:
            if each.ended.done():
                raise Stuck(f"the {each.name} has ended with {each.ended.result()}: {each.log.read_text()[-2000:]}")
        if self._feeding.done() and not self._feeding.cancelled():
            self._feeding.result()

    async def recovered(self, trained: float) -> pb.Status:
        """Once everybody is there again, and more groups were trained on than ``trained``."""
        status = await self.until(
            lambda status: self.is_whole(status) and status.counters["groups_trained"] > trained,
            "everybody at work again",
        )
        self.weigh(status)
        return status

    def is_whole(self, status: pb.Status) -> bool:
        wanted = {f"w{number}" for number in range(self.setting.workers)}
        if self.setting.has_host:
            wanted.add(HOST_WORKER)
        ready = {worker.worker_id for worker in status.workers if worker.version >= 0 and worker.pid}
        pools = [pool for pool in status.pools if pool.host == "local" and pool.state == "ready"]
        return wanted <= ready and bool(pools) and bool(status.trainer) and not status.storage_faults

    def weigh(self, status: pb.Status) -> None:
        """Notes how much memory each process has."""
        found = {f"worker {worker.worker_id}": worker.pid for worker in status.workers if worker.pid}
        found |= {f"pool {pool.pool_id}": pool.pid for pool in status.pools if pool.pid}
        found |= {"orchestrator": self.service.pid}
        found |= {"keeper": family.supervisor(self.service.pid), "verifier": family.verifier(self.service.pid)}
        found |= {each.name: each.pid for each in self.cast}
        now_s = time.monotonic()
        for name, pid in found.items():
            with contextlib.suppress(psutil.Error):
                if pid:
                    self.processes.append((now_s, name, pid, psutil.Process(pid).memory_info().rss))

    # -------------------------------------------------------------------------------------------------------- its end

    async def finish(self) -> pb.Status:
        """No more prompts go in; returns once all that went in is trained on, and nothing is under way."""
        await _ended(self._feeding)
        self.check()
        if self.setting.has_host:
            await self.agent.aclose()
        await self.submitting.end()
        code = await asyncio.wait_for(self.trainer.ended, 2 * self.setting.recovery_most_s)
        if code:
            raise Stuck(f"the trainer has ended with {code}: {self.trainer.log.read_text()[-2000:]}")
        if self.setting.has_sessions:
            code = await asyncio.wait_for(self.chats.ended, self.setting.recovery_most_s)
            if code:
                raise Stuck(f"the chats have ended with {code}: {self.chats.log.read_text()[-2000:]}")
        self.cast = []
        return await self.until(_is_empty, "all KV let go")

    async def _feed(self) -> None:
        while True:
            status = await self.status()
            if status is not None and status.prompts_queued < QUEUED_MIN:
                await self.submitting.submit()
            await asyncio.sleep(10 * POLL_S)

    async def _end(self) -> None:
        """Kills what is left of the service, where something failed; else ends it as an operator does."""
        status = await self.status()
        try:
            await asyncio.wait_for(self.service.stop(), self.setting.recovery_most_s)
        except TimeoutError:
            await self.service.kill()
        if status is None:
            return
        for pid in [*(worker.pid for worker in status.workers), *(pool.pid for pool in status.pools)]:
            with contextlib.suppress(psutil.Error):
                if pid and self.service.address in psutil.Process(pid).cmdline():  # and no other that has its id now
                    psutil.Process(pid).kill()


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        world = World(setting, stack)
        await world.open()
        yield world


def _memory() -> str | None:
    """A folder in memory that all processes share; None: that of temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _is_empty(status: pb.Status) -> bool:
    busy = [worker for worker in status.workers if worker.pid and (worker.running or worker.kv_use)]
    return not busy and not any(pool.parked or pool.kv_tokens or pool.memory_bytes for pool in status.pools)


def _told(status: pb.Status | None) -> str:
    if status is None:
        return "the service does not answer"
    workers = ", ".join(f"{each.worker_id} {each.state} v{each.version} {each.reason}" for each in status.workers)
    pools = ", ".join(f"{each.pool_id} {each.state}" for each in status.pools)
    faults = ", ".join(fault.reason for fault in status.storage_faults)
    counters = {name: value for name, value in status.counters.items() if value}
    return (
        f"step {status.filling_step}, newest {status.newest_version}, trainer {status.trainer!r}, {workers}; {pools}; "
        f"storage: {faults}; {counters}"
    )


async def _ended(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    await asyncio.wait([task])
