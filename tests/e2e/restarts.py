"""``dora serve`` as a process of its own, to be killed and started again."""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dora
from dora.client.sessions import Session
from dora.data.trajectory import TrajectoryGroup
from dora.rpc.errors import ServiceUnavailable

SETTINGS = {
    "workers.engine": "fake",
    "prompts": "tiny",
    "service.tick_s": 0.1,
    "kv.pool_mb": 0,
    "workers.slots": 8,
    "workers.kv_tokens": 16384,
    "workers.max_model_len_tokens": 2048,
    "rollout.group_size": 4,
    "rollout.max_tokens": 600,
    "rollout.ignore_eos": True,
}


def settings_of(model: Path, folder: Path, **fields: Any) -> dict[str, Any]:
    """Returns settings of a small service with its state in ``folder``. ``fields``: dotted, with ``__`` for the dot."""
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return SETTINGS | {"model": str(model), "service.state": str(folder / "state")} | named


class Killed:
    """One service; its lives follow each other. ``inside``: the beginning of its command line, in place of Python;
    ``host`` and ``port``: its address."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        inside: Sequence[str] = (sys.executable,),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.address = self.token = ""
        self.run_folder = Path()
        self.said = folder / "service.log"
        self._settings = settings
        self._inside, self._listen = inside, f"{host}:{port}"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns once it is ready. It listens where it did before."""
        process = await self.begin()
        assert process.stdout is not None
        text = ""
        while line := (await process.stdout.readline()).decode():
            text += line
            if line.startswith("}"):
                break
        else:
            await process.wait()
            raise AssertionError(self.said.read_text())
        told = json.loads(text)
        assert self.token in ("", told["token"]) and self.address in ("", told["address"])
        self.address, self.token = told["address"], told["token"]
        self.run_folder = Path(told["run_folder"])

    def change(self, **settings: Any) -> None:
        """From the next start on."""
        self._settings = self._settings | settings

    async def restart(self) -> None:
        """It crashes, and is started again."""
        await self.kill()
        await self.start()

    async def keep(self) -> None:
        """Starts it again whenever it was killed; ends with it where it ends otherwise."""
        assert self._process is not None
        while await self._process.wait() == -signal.SIGKILL:
            await self.start()

    async def begin(self) -> asyncio.subprocess.Process:
        """Returns once its process has begun."""
        options = [part for name, value in self._settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
        argv = ["-m", "dora", "serve", "--json", "--listen", self._listen, *options]
        with self.said.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._inside, *argv, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
        return self._process

    async def says_more(self) -> None:
        """Returns once its process has written a further line into its log, or ended."""
        assert self._process is not None
        said_bytes = self.said.stat().st_size
        ending = asyncio.create_task(self._process.wait())
        while self.said.stat().st_size == said_bytes and not ending.done():
            await asyncio.wait([ending], timeout=0.001)
        ending.cancel()

    async def kill(self) -> None:
        """As a crash does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> int:
        """As an operator does. Returns its exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        code = await self._process.wait()
        return code


async def drive_through_restarts(
    service: Killed, environment: str, driver: Callable[[Session], Awaitable[None]]
) -> None:
    """Drives the sessions of an environment until it is cancelled."""
    while True:
        async with dora.Sessions(service.address, service.token) as sessions:
            with suppress(ServiceUnavailable):
                await sessions.drive(environment, driver)


async def train_through_restarts(
    service: Killed, weights: Path, *, groups: int, steps: int
) -> list[list[TrajectoryGroup]]:
    """Trains; the service is killed in each step, one group later than in the step before."""
    done: list[list[TrajectoryGroup]] = []
    async with dora.Trainer(service.address, token=service.token) as trainer:
        async for step in trainer.steps(groups=groups):
            found = []
            async for group in step:
                found.append(group)
                if len(found) == 1 + len(done):
                    await service.restart()
            done.append(found)
            await step.commit(weights=weights, wait=True)
            if len(done) == steps:
                return done
    raise AssertionError("the steps ended early")
