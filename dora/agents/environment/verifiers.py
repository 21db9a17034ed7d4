"""Tasksets of verifiers, whose harnesses reach their sessions over HTTP.

verifiers' requirements clash with DORA's, so ``verifiers_bridge.py`` runs its episodes with another interpreter. Each
session has a base URL of this process: an unmodified harness calls it as it would call a model's server.
"""

import asyncio
import json
import math
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from dora.agents.environment.calls import EnvironmentFailed
from dora.agents.environment.episode import RECONNECT_S
from dora.agents.environment.spec import OPTION
from dora.agents.environment.verifiers_bridge import KEY_VARIABLE, LINE_BYTES
from dora.agents.environment.verifiers_process import bridge_argv, bridge_variables
from dora.agents.front.app import serving
from dora.agents.front.gateway import FrontLimits, Gateway
from dora.agents.front.listening import listening_socket
from dora.agents.front.model import ServedModel
from dora.agents.front.service import ServiceSession
from dora.agents.front.sessions import AgentSession, SessionReward
from dora.agents.front.source import LiveVersions, SessionHandle, SessionOpening
from dora.client.connection import until_answered
from dora.client.sessions import Session
from dora.config import EnvironmentConfig
from dora.errors import InvalidValue, NotFound

LOOK_S: Final = 0.5
_ENDS_WITHIN_S: Final = 10.0


class Bridge:
    """A bridge under way. ``gone`` is done when it has ended."""

    def __init__(self, spec: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spec = spec
        self._reader = reader
        self._writer = writer
        self._awaited: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.gone: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Waits until it serves. Raises InvalidValue for a taskset that does not load."""
        first = json.loads(await self._reader.readline() or b"{}")
        if not first.get("ready"):
            raise InvalidValue(OPTION, self._spec, first.get("refused", "a taskset that verifiers loads"))
        self.gone = asyncio.create_task(self._read())

    async def run(self, session_id: str, task: int, base_url: str) -> dict[str, Any]:
        """Runs an episode. Returns its reward, components and log. Raises Failed."""
        if self.gone is None or self.gone.done():
            raise EnvironmentFailed("the process of verifiers has ended")
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._awaited[session_id] = answer
        try:
            self._send({"id": session_id, "task": task, "base_url": base_url})
            found = await answer
        except asyncio.CancelledError:
            self._send({"cancel": session_id})
            raise
        finally:
            del self._awaited[session_id]
        if "error" in found:
            raise EnvironmentFailed(found["error"])
        return found

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        while line := await self._reader.readline():
            found = json.loads(line)
            answer = self._awaited.get(found["id"])
            if answer is not None and not answer.done():
                answer.set_result(found)
        for answer in self._awaited.values():
            if not answer.done():
                answer.set_exception(EnvironmentFailed("the process of verifiers has ended"))


@asynccontextmanager
async def bridge(settings: EnvironmentConfig, model: Path, key: str) -> AsyncIterator[Bridge]:
    """Runs a bridge. The sessions' URLs have ``key``. Raises InvalidValue for a taskset that does not load."""
    ours, theirs = socket.socketpair()
    with theirs:
        argv = [*bridge_argv(settings, model), str(theirs.fileno())]
        variables = {**bridge_variables(settings, os.environ), KEY_VARIABLE: key}
        process = await asyncio.create_subprocess_exec(*argv, env=variables, pass_fds=(theirs.fileno(),))
    reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
    found = Bridge(settings.spec, reader, writer)
    try:
        await found.begin()
        yield found
    finally:
        writer.close()  # by which the process ends
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _ENDS_WITHIN_S)
        if process.returncode is None:
            process.kill()
            await process.wait()
        if found.gone is not None:
            await found.gone


class Attended:
    """The service as a session's URL sees it: the sessions given to this process, and no others."""

    def __init__(self, model: Path, context_tokens: int) -> None:
        self._model = model.name
        self._context_tokens = context_tokens
        self._newest = 0

    def note(self, version: int) -> None:
        self._newest = max(self._newest, version)

    async def live(self) -> LiveVersions:
        return LiveVersions(self._model, self._newest, (self._newest,), self._context_tokens)

    async def find(self, group: str, size: int) -> list[SessionHandle]:
        raise NotFound("session", group, "the id of a session that is under way")

    async def find_opened(self, session_id: str) -> SessionHandle:
        raise NotFound("session", session_id, "the id of a session that is under way")

    async def open(self, opening: SessionOpening) -> list[SessionHandle]:
        raise NotFound("session", opening.group, "the id of a session that is under way")

    async def withdraw(self, group: str, reason: str) -> None:
        """Does nothing: no group was opened."""


@dataclass(frozen=True, slots=True)
class HarnessEpisodes:
    """Runs sessions with a harness of verifiers. ``gateway`` is served at ``url``."""

    bridge: Bridge
    gateway: Gateway
    known: Attended
    url: str
    timeout_s: float
    starting: asyncio.Semaphore

    async def run(self, session: Session) -> None:
        """Runs one session to its end. Raises Failed, or what the service refuses."""
        if session.turn.number:
            raise EnvironmentFailed(f"the process of its environment ended after turn {session.turn.number}")
        if len(session.prompt_token_ids):
            raise EnvironmentFailed(
                f"prompt {session.prompt_id} has tokens: submit it without, as the harness gives the prompt"
            )
        number = json.loads(session.verifier_json or "{}").get("task", 0)
        if type(number) is not int or number < 0:
            raise InvalidValue("verifier.task", number, "the number of a task, from 0")
        self.known.note(session.version)
        agent = self.gateway.adopt(ServiceSession(session, _not_taken_back))
        base_url = f"{self.url}/sessions/{agent.session_id}/v1"
        running: asyncio.Task[dict[str, Any]] | None = None
        try:
            async with self.starting:
                running = asyncio.create_task(self.bridge.run(agent.session_id, number, base_url))
                left_s = await self._watched(running, agent, self.timeout_s, until_begun=True)
            await self._watched(running, agent, left_s)
            found = running.result()
            await agent.idle.wait()
            await until_answered(
                partial(agent.close, SessionReward(found["reward"], found["components"], found["log"])), RECONNECT_S
            )
        finally:
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            self.gateway.release(agent)

    async def _watched(
        self, running: asyncio.Task[Any], agent: AgentSession, left_s: float, *, until_begun: bool = False
    ) -> float:
        """Waits for the end or first turn. Returns the time left, without the policy's turns. Raises Failed at 0."""
        loop = asyncio.get_running_loop()
        begun = asyncio.create_task(agent.begun.wait())
        try:
            while not (running.done() or (until_begun and begun.done())):
                at_s = loop.time()
                first = {running, begun} if until_begun else {running}
                await asyncio.wait(first, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                left_s -= 0.0 if agent.turns else loop.time() - at_s
                if left_s <= 0:
                    said = f"the environment took longer than environment.timeout_s = {self.timeout_s:g}"
                    raise EnvironmentFailed(said)
        finally:
            begun.cancel()
        return left_s


@asynccontextmanager
async def harness_episodes(
    settings: EnvironmentConfig, folder: Path, model: ServedModel, context_tokens: int
) -> AsyncIterator[HarnessEpisodes]:
    """Runs the bridge and serves the sessions' URLs. Raises InvalidValue."""
    key, known = secrets.token_urlsafe(24), Attended(folder, context_tokens)
    limits = FrontLimits(idle_s=math.inf, in_flight=4096, connections=1 << 16, sessions=1 << 17)
    gateway = Gateway(known, model, key=key, limits=limits)
    listening = listening_socket("127.0.0.1:0", has_key=True)
    async with bridge(settings, folder, key) as running, serving(gateway, listening) as url:
        starting = asyncio.Semaphore(settings.starting)
        yield HarnessEpisodes(running, gateway, known, url, settings.timeout_s, starting)


async def _not_taken_back(group: str, reason: str) -> None:
    raise AssertionError("a driven session is given up by its driver")
