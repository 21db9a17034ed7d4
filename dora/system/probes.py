"""The HTTP pages of a process for its scheduler: ``/live`` and ``/ready``, without a token, on a bounded server.

A client that hangs costs its own connection alone: a connection serves one request and is closed after ``LIFETIME_S``,
and at most ``CONNECTIONS_MAX`` are open.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

from aiohttp import web

from dora.errors import InvalidValue
from dora.system.process_tree import listener_of

LIFETIME_S: Final = 10.0
CONNECTIONS_MAX: Final = 64

Answer = Callable[[web.BaseRequest], Awaitable[web.Response]]


class Probed(Protocol):
    """A process that is probed. Each method returns the reason of a "no", or an empty text."""

    def live(self) -> str: ...
    def ready(self) -> str: ...


def probe(path: str, of: Probed) -> web.Response | None:
    """Returns 200 or 503 with the reason for ``/live`` and ``/ready``, None for another path."""
    if path not in ("/live", "/ready"):
        return None
    reason = of.live() if path == "/live" else of.ready()
    return web.Response(status=503 if reason else 200, text=f"{reason or 'yes'}\n")


class BoundedServer:
    """Serves ``answer``. ``connect`` makes each connection's protocol."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._server = web.Server(self._reply, access_log=None)

    def connect(self) -> asyncio.BaseProtocol:
        """Makes the protocol of one connection, whose time is limited; a connection too many is closed at once."""
        if len(self._server.connections) >= CONNECTIONS_MAX:
            return Closed()
        protocol = self._server()
        asyncio.get_running_loop().call_later(LIFETIME_S, _end, protocol)
        return protocol

    async def close(self) -> None:
        await self._server.shutdown(timeout=0)

    async def _reply(self, request: web.BaseRequest) -> web.StreamResponse:
        reply = await self._answer(request)
        reply.force_close()
        return reply


def _end(protocol: web.RequestHandler) -> None:
    if protocol.transport is not None:
        protocol.transport.abort()


class Closed(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def listening(listen: str, connect: Callable[[], asyncio.BaseProtocol], option: str) -> asyncio.Server:
    """Listens at HOST:PORT. Raises InvalidValue for ``option`` if the address cannot be had."""
    host, _, port = listen.rpartition(":")
    if not port.isdecimal():
        raise InvalidValue(option, listen, "HOST:PORT")
    try:
        return await asyncio.get_running_loop().create_server(connect, host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:
        owner = listener_of(int(port))
        why = f"is in use by process {owner}" if owner else ""
        raise InvalidValue(option, listen, "a free address of this host", why=why) from error


@contextlib.asynccontextmanager
async def serving_probes(listen: str, of: Probed, option: str) -> AsyncIterator[str]:
    """Serves the two pages alone; yields the actual address (port 0 takes a free one). Raises as ``listening``."""

    async def answer(request: web.BaseRequest) -> web.Response:
        return probe(request.path, of) or web.Response(status=404, text="/live and /ready are the pages\n")

    server = BoundedServer(answer)
    listener = await listening(listen, server.connect, option)
    try:
        yield f"{listen.rpartition(':')[0]}:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await server.close()
