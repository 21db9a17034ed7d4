"""Environments that a server of OpenEnv runs. Each session has a WebSocket of its own.

Source: OpenEnv 0.10, ``openenv/core/env_server/types.py`` and ``http_server.py``.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from yarl import URL

from dora.agents.environment.openenv_actions import Actions, actions_of, numbers_of, text_of, tools_of
from dora.agents.environment.protocol import Messages, Reply, Task, first_message
from dora.agents.environment.spec import OPTION, seed_of
from dora.data.strict_json import read_json
from dora.errors import DoraError, InvalidValue

PREFIX: Final = "openenv:"
PAUSE_S: Final = 0.1  # before a server is asked again, at first
PAUSE_MAX_S: Final = 5.0
HEARTBEAT_S: Final = 30.0
MESSAGE_BYTES: Final = 16 << 20
_SCHEMES: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_FULL: Final = "CAPACITY_REACHED"
_INVALID: Final = "VALIDATION_ERROR"  # of an action: the policy is told


class ServerRefused(DoraError):
    """A server's error, with its code as ``value``."""


class Freed:
    """Wakes the sessions of this process that wait for room, one for each that has closed, in their order."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Event] = []

    async def wait(self, most_s: float) -> bool:
        """Returns whether a session has closed within ``most_s``."""
        mine = asyncio.Event()
        self._waiting.append(mine)
        try:
            async with asyncio.timeout(most_s):
                await mine.wait()
        except TimeoutError:
            return False
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        return True

    def tell(self) -> None:
        if self._waiting:
            self._waiting.pop(0).set()


@dataclass(frozen=True, slots=True)
class Server:
    """A server. A session waits ``full_s`` for one without room, and ``away_s`` for one that cannot be reached."""

    url: URL
    full_s: float = 300.0
    away_s: float = 30.0
    freed: Freed = field(default_factory=Freed)

    @property
    def socket_url(self) -> URL:
        return self.url.with_scheme(_SCHEMES[self.url.scheme]) / "ws"

    @property
    def schema_url(self) -> URL:
        return self.url.with_scheme("https" if self.url.scheme in ("https", "wss") else "http") / "schema"


class OpenEnvEpisode:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._actions = Actions()
        self.tools: list[dict[str, Any]] = []

    async def reset(self, task: Task) -> Messages:
        options = task.verifier.get("options", {})
        if not isinstance(options, dict):
            raise InvalidValue("verifier.options", options, "an object, for reset")
        seed = task.verifier.get("seed", seed_of(task.prompt_id))
        self._http = aiohttp.ClientSession()
        found = await self._begun(self._http, {"seed": seed, "episode_id": task.session_id, **options})
        if found.get("done"):
            raise ServerRefused("the episode is over at its reset", "done", "true")
        if self._actions.are_calls:
            self.tools = tools_of((await self._request("step", {"type": "list_tools"}))["observation"])
        return first_message(task, text_of(found["observation"]))

    async def step(self, reply: Reply) -> tuple[str | Messages, float, bool, bool, Mapping[str, Any]]:
        """Takes the reply's actions. The policy is told of one that is not valid."""
        actions = self._actions.of(reply)
        if not actions:
            is_over = self._actions.are_calls
            return "the reply calls no tool" if is_over else self._actions.expected, 0.0, False, is_over, {}
        reward, texts, found = 0.0, list[str](), dict[str, Any]()
        for action in actions:
            found = await self._stepped(action)
            reward += found.get("reward") or 0.0
            texts.append(text_of(found["observation"]))
            if found.get("done"):
                return await self._last(texts[-1]), reward, True, False, _components(found)
        if self._actions.are_calls:
            calls = zip(reply.tool_calls, texts, strict=False)
            told = [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in calls]
            return told, reward, False, False, _components(found)
        return texts[0], reward, False, False, _components(found)

    async def close(self) -> None:
        if self._socket is not None:
            with suppress(ConnectionError):
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
            self._server.freed.tell()
        if self._http is not None:
            await self._http.close()

    async def _begun(self, http: aiohttp.ClientSession, options: Mapping[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        began_s, pause_s = loop.time(), PAUSE_S
        while True:
            try:
                self._actions = await self._described(http)
                self._socket = await http.ws_connect(
                    self._server.socket_url, heartbeat=HEARTBEAT_S, max_msg_size=MESSAGE_BYTES
                )
                return await self._request("reset", options)
            except ServerRefused as error:
                if error.value != _FULL or loop.time() - began_s >= self._server.full_s:
                    raise
            except (aiohttp.ClientError, OSError) as error:
                if loop.time() - began_s >= self._server.away_s:
                    raise ServerRefused(f"{self._server.url} cannot be reached: {error}", "openenv", "away") from error
            if self._socket is not None:
                await self._socket.close()
            pause_s = PAUSE_S if await self._server.freed.wait(pause_s) else min(2 * pause_s, PAUSE_MAX_S)

    async def _described(self, http: aiohttp.ClientSession) -> Actions:
        async with http.get(self._server.schema_url) as reply:
            if reply.status != 200:
                said = (await reply.text())[:200]
                raise ServerRefused(
                    f"{self._server.schema_url} answered {reply.status}: {said}", "schema", reply.status
                )
            return actions_of((await reply.json())["action"])

    async def _stepped(self, action: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._request("step", action)
        except ServerRefused as error:
            if error.value != _INVALID:
                raise
            return {"observation": {"error": str(error)}}

    async def _last(self, text: str) -> str:
        state = await self._request("state")
        return f"episode {state.get('episode_id')}, {state.get('step_count')} steps: {text}"

    async def _request(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert self._socket is not None
        with suppress(ConnectionError):  # the server has refused the session: its reason is the next message
            await self._socket.send_json({"type": kind} if data is None else {"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ServerRefused(f"the server closed the connection ({message.data}) at {kind}", "openenv", "closed")
        answer = read_json(message.data, "openenv", MESSAGE_BYTES)
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise ServerRefused(f"the server's answer to {kind} has no data", "openenv", "answer")
        if answer.get("type") == "error":
            details = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found.get("errors", ())]
            said = "; ".join([str(found.get("message")), *details])
            raise ServerRefused(f"{found.get('code')}: {said}", "openenv", found.get("code"))
        return found


def openenv_episodes(spec: str) -> Callable[[], OpenEnvEpisode]:
    """Returns a maker of episodes of ``openenv:URL``. Raises InvalidValue for another kind of URL."""
    try:
        url = URL(spec.removeprefix(PREFIX))
    except ValueError as error:
        raise InvalidValue(OPTION, spec, f"openenv:URL ({error})") from error
    if url.scheme not in _SCHEMES or not url.host or url.query or url.user:
        allowed = "openenv: and the URL of a server without user or query, e.g. openenv:http://127.0.0.1:8000"
        raise InvalidValue(OPTION, spec, allowed)
    server = Server(url)
    return lambda: OpenEnvEpisode(server)


def _components(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"components": numbers_of(found.get("metadata"))}
