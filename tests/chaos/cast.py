"""The processes of a run that are not the service's: trainer, environment, front, chats, and a joined host's agent."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dora.agents.front.listening import BACKLOG, INHERITED, url_of
from tests.e2e.agents import joining

LINE_BYTES_MAX: Final = 1 << 20


class Orphaned:
    """A process that is started again as often as it is killed, as whoever runs it would."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self.deaths = 0
        self.may_return = asyncio.Event()  # not set: it stays away after it was killed
        self.may_return.set()
        self.process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None and self.process.returncode is None else 0

    @property
    def ended(self) -> "asyncio.Task[int]":
        """Its exit code, once it has ended by itself."""
        assert self._task is not None
        return self._task

    def begin(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            await self.process.wait()

    async def _keep(self) -> int:
        while True:
            self.process = await self._start()
            await self._lived(self.process)
            code = await self.process.wait()
            if code != -signal.SIGKILL:
                return code
            self.deaths += 1
            await self.may_return.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        raise NotImplementedError

    async def _lived(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()


class Telling(Orphaned):
    """A module of Python that prints a line of JSON, with ``at``, at each moment of its work."""

    def __init__(self, name: str, argv: list[str], token: str, log: Path) -> None:
        super().__init__(name, log)
        self._argv = [sys.executable, "-m", *argv]
        self._environment = {**os.environ, "DORA_TOKEN": token, "OMP_NUM_THREADS": "1"}
        self._awaited: list[tuple[str, asyncio.Future[Mapping[str, Any]]]] = []

    async def reaches(self, moment: str) -> Mapping[str, Any]:
        """What it says, as soon as it says that it is at this moment."""
        awaited: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._awaited.append((moment, awaited))
        return await awaited

    async def _start(self) -> asyncio.subprocess.Process:
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES_MAX,
                start_new_session=True,  # Ctrl-C is for the run alone
            )

    async def _lived(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.endswith(b"\n"):  # else it was killed as it wrote
                self._said(json.loads(line))

    def _said(self, said: Mapping[str, Any]) -> None:
        for moment, awaited in self._awaited:
            if moment == said["at"] and not awaited.done():
                awaited.set_result(said)
        self._awaited = [each for each in self._awaited if not each[1].done()]


class OpeningProcess(Telling):
    """One that opens groups of sessions. ``opened``: their prompts' ids, as it has said. ``last``: its last words."""

    def __init__(self, name: str, argv: list[str], token: str, log: Path) -> None:
        super().__init__(name, argv, token, log)
        self.opened: set[str] = set()
        self.last: Mapping[str, Any] = {}

    def _said(self, said: Mapping[str, Any]) -> None:
        self.last = said
        if said["at"] == "opened":
            self.opened.add(said["prompt_id"])
        super()._said(said)


class TrainerProcess(Telling):
    """``tests.chaos.trainer``. ``trained``: what it has said after its commits."""

    def __init__(self, argv: list[str], token: str, log: Path) -> None:
        super().__init__("trainer", ["tests.chaos.trainer", *argv], token, log)
        self.trained: list[tuple[int, list[str]]] = []

    def _said(self, said: Mapping[str, Any]) -> None:
        if said["at"] == "committed":
            self.trained.append((said["step"], said["group_ids"]))
        super()._said(said)


class Command(Orphaned):
    """A command of ``dora``."""

    def __init__(self, name: str, argv: Sequence[str], token: str, log: Path) -> None:
        super().__init__(name, log)
        self._argv = [sys.executable, "-m", "dora", *argv]
        self._environment = {**os.environ, "DORA_TOKEN": token, "OMP_NUM_THREADS": "1"}
        self._files: tuple[int, ...] = ()  # that it inherits

    async def _start(self) -> asyncio.subprocess.Process:
        with self.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._argv,
                env=self._environment,
                stdout=log,
                stderr=log,
                pass_fds=self._files,
                start_new_session=True,
            )


class FrontOfAgents(Command):
    """``dora front``. The run has its listening socket, so calls that come while it is dead only wait. It knows the
    ``model``, so it starts without its service too.
    """

    def __init__(self, name: str, service: str, token: str, log: Path, host: str, model: Path) -> None:
        self._listening = socket.create_server((host, 0), backlog=BACKLOG)
        listen = f"{INHERITED}{self._listening.fileno()}"
        super().__init__(name, ["front", "--service", service, "--http", listen, "--model", str(model)], token, log)
        self._files = (self._listening.fileno(),)

    @property
    def url(self) -> str:
        return url_of(self._listening)

    async def aclose(self) -> None:
        await super().aclose()
        self._listening.close()


class AgentProcess(Orphaned):
    """A host that joins, and joins again. ``inside``: the beginning of its command line, before Python."""

    def __init__(self, name: str, address: str, token: str, log: Path, inside: Sequence[str]) -> None:
        super().__init__(name, log)
        self._address, self._token, self._inside = address, token, inside

    async def _start(self) -> asyncio.subprocess.Process:
        options = ("--workers", "1")
        return await joining(self._address, self._token, self.name, self.log, *options, inside=self._inside)
