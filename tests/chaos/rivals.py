"""Second services and copies of the state beside the one that runs: each is refused or a run of its own, and the first
one goes on unharmed.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import Role, ServiceTokens
from tests.chaos.setting import HOST, settings_in
from tests.chaos.world import Stuck, World
from tests.e2e.agents import ended, joining
from tests.e2e.restarts import Killed

OF_ITS_OWN: Final = "serves another service"  # what a copy says of the processes that are the original's


class Rivals:
    """Starts services and agents beside the world's service. Each method raises Stuck if that service is harmed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0

    async def second(self, thing: str) -> None:
        """A second service, or a second agent, on one thing of the first: it is refused, with the owner's name."""
        if thing == "agent":
            await self._second_agent()
            return
        world, address = self._world, self._world.service.address
        state = world.state
        settings, port = {
            "state": ({"service.state": str(state)}, 0),
            "record": ({"record": str(world.setting.record)}, 0),
            "run folder": ({"service.run_folder": str(world.service.run_folder)}, 0),
            "kept weights": ({"service.begin_from": f"{state}@{(await world.operator.status()).newest_version}"}, 0),
            "port": ({}, int(address.rpartition(":")[2])),
        }[thing]
        async with self._beside(settings, port) as rival:
            complaint = await self._refused(rival, thing)
        _check_names(complaint, f"process {world.service.pid}", thing)

    async def copied(self) -> None:
        """A copy of the state is a run of its own, with processes of its own, or it is refused."""
        folder = self._copy()
        before = await self._processes()
        async with self._beside({"service.state": str(folder)}, 0) as rival:
            try:
                await asyncio.wait_for(rival.start(), self._world.setting.recovery_most_s)
            except AssertionError as refused:
                if "must be" not in str(refused):
                    raise Stuck(f"a copied state ends with: {str(refused)[-600:]}") from None
            else:
                if OF_ITS_OWN not in rival.said.read_text():
                    raise Stuck(f"a copied state says nothing of the original: {rival.said.read_text()[-600:]}")
        await self._check_unharmed(before, "a copied state")

    async def older(self) -> Callable[[], Awaitable[None]]:
        """Keeps a copy of the state until a later step is committed, and ends the service. Returns what is to follow: a
        start with the copy, which is refused with both steps.
        """
        world, folder = self._world, self._copy()
        then = (await world.operator.status()).newest_version
        await world.until(lambda status: status.newest_version > then + 1, "two more steps")
        await world.service.kill()

        async def start() -> None:
            async with self._beside({"service.state": str(folder), "record": str(world.setting.record)}, 0) as rival:
                complaint = await self._refused(rival, "an older state")
            for part in (str(world.setting.record), str(folder), "the state is older"):
                if part not in complaint:
                    raise Stuck(f"an older state is refused without {part!r}: {complaint[-600:]}")

        return start

    # ---------------------------------------------------------------------------------------------------------- parts

    @asynccontextmanager
    async def _beside(self, settings: dict[str, Any], port: int) -> AsyncIterator[Killed]:
        """A service of its own but for these settings; ended afterwards."""
        world = self._world
        self._count += 1
        folder = world.setting.folder / f"rival-{self._count}"
        folder.mkdir()
        with tempfile.TemporaryDirectory(prefix="chaos-rival-", dir=world.memory) as shared:
            own = settings_in(world.setting, folder / "state") | {"record": "", "workers.count": 1}
            own |= {"service.run_folder": str(Path(shared) / "run"), "kv.pool_mb": 0}
            rival = Killed(folder, own | settings, world.inside, world.host, port)
            try:
                yield rival
            finally:
                with contextlib.suppress(AssertionError):
                    await rival.stop()

    async def _refused(self, rival: Killed, what: str) -> str:
        """Returns its output once it has ended. Raises Stuck if it does not end."""
        before = await self._processes()
        try:
            await asyncio.wait_for(rival.start(), self._world.setting.recovery_most_s)
        except AssertionError as complaint:
            await self._check_unharmed(before, what)
            return str(complaint)
        except TimeoutError:
            pass
        raise Stuck(f"a second service on {what} is not refused")

    async def _second_agent(self) -> None:
        world = self._world
        before = await self._processes()
        self._count += 1
        log = world.setting.folder / f"rival-{self._count}.log"
        token = ServiceTokens(world.service.token).of[Role.HOST]
        inside = world.link.inside if world.link else ()
        process = await joining(world.service.address, token, HOST, log, "--workers", "1", inside=inside)
        try:
            # it tries again for 90 s: the name may be that of its own earlier life
            code = await asyncio.wait_for(process.wait(), 2 * world.setting.recovery_most_s)
        except TimeoutError:
            raise Stuck("a second agent of one name is not refused") from None
        finally:
            await ended(process)
        if not code:
            raise Stuck("a second agent of one name ends with 0")
        _check_names(log.read_text(), f"process {world.agent.pid}", "the host's name")
        await self._check_unharmed(before, "a second agent")

    async def _processes(self) -> dict[str, int]:
        """The first service's processes by name; none if it does not run now."""
        status = await self._world.status()
        return {} if status is None else _pids_of(status)

    async def _check_unharmed(self, before: dict[str, int], by: str) -> None:
        gone = [name for name, pid in before.items() if not psutil.pid_exists(pid)]
        now = await self._processes() if before else {}
        other = [name for name, pid in before.items() if now.get(name, pid) != pid]
        if gone or other:
            raise Stuck(f"{by} has harmed {', '.join([*gone, *other])}")

    def _copy(self) -> Path:
        """The state as it is at one moment: the service stands still meanwhile, as after a crash."""
        self._count += 1
        folder = self._world.setting.folder / f"copied-{self._count}"
        pid = self._world.service.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            shutil.copytree(self._world.state_seen, folder)
        finally:
            os.kill(pid, signal.SIGCONT)
        folder.chmod(0o700)
        return folder


def _pids_of(status: pb.Status) -> dict[str, int]:
    found = {worker.worker_id: worker.pid for worker in status.workers if worker.pid}
    return found | {pool.pool_id: pool.pid for pool in status.pools if pool.pid}


def _check_names(complaint: str, owner: str, thing: str) -> None:
    if owner not in complaint:
        raise Stuck(f"a second service on {thing} is refused without {owner!r}: {complaint[-600:]}")
