"""The aiohttp application of a front."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from aiohttp import ClientConnectionResetError, web
from aiohttp.http_exceptions import HttpProcessingError

from dora.agents.front import control
from dora.agents.front.callers import ENDS, OPENS, TURNS
from dora.agents.front.errors import TooLarge, anthropic_body, openai_body, status_of
from dora.agents.front.gateway import Gateway
from dora.agents.front.http import GATEWAY, ErrorBody, Handler, refusing
from dora.agents.front.listening import BACKLOG, url_of
from dora.agents.front.protocols import anthropic, chat, completions, responses, tokens
from dora.agents.front.protocols.tinker.routes import add_routes
from dora.data.strict_json import check_text
from dora.errors import DoraError, InvalidValue, NotFound
from dora.rpc.bearer import READS
from dora.system.crowd import Crowd
from dora.system.memory import collecting_rarely

log = logging.getLogger("dora.front")

SWEEP_S: Final = 5.0
HEADER_BYTES_MAX: Final = 16384
_NO_ROOM: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
Mount = Callable[[web.Application], None]
SESSION: Final = "/sessions/{session}"


@dataclass(frozen=True, slots=True)
class Route:
    """One route. ``does`` is what its requests do, as a method of the service; roles of certificates follow from it."""

    verb: str
    path: str
    handler: Handler
    does: str = TURNS
    body_of: ErrorBody = openai_body


AGENTS: Final = (
    Route("GET", "/v1/models", control.models),
    Route("POST", "/v1/chat/completions", chat.chat_completions),
    Route("POST", "/v1/responses", responses.responses),
    Route("POST", "/v1/messages", anthropic.messages, body_of=anthropic_body),
    Route("POST", "/v1/messages/count_tokens", anthropic.count_tokens, body_of=anthropic_body),
    Route("POST", "/v1/completions", completions.completions),
    Route("POST", "/inference/v1/generate", tokens.generate),
    Route("POST", "/inference/v1/abort_requests", tokens.abort_requests),
)  # also within a session
OWN: Final = (
    Route("GET", "/health", control.health),
    Route("GET", "/prefix_breaks", control.breaks),
    Route("GET", "/metrics", control.metrics, READS),
    Route("POST", "/sessions", control.open_sessions, OPENS),
    Route("GET", SESSION, control.show_session),
    Route("POST", f"{SESSION}/reward", control.reward, ENDS),
    Route("POST", f"{SESSION}/close", control.close, ENDS),
)
PROBES: Final[Mapping[str, Handler]] = {"/live": control.live, "/ready": control.ready}  # without a key
ROUTES: Final = (*OWN, *AGENTS, *(replace(each, path=f"{SESSION}{each.path}") for each in AGENTS))


def application(gateway: Gateway, mount: Mount | None = None) -> web.Application:
    """Returns the application. It begins no connection and no task before it is run. ``mount`` adds routes to it."""
    app = web.Application(
        client_max_size=gateway.limits.body_bytes,
        middlewares=[_counted, _shaped],
        handler_args={"max_field_size": HEADER_BYTES_MAX},
    )
    app[GATEWAY] = gateway
    for each in ROUTES:
        add = app.router.add_get if each.verb == "GET" else app.router.add_post
        add(each.path, refusing(each.handler, each.body_of, each.does))
    for path, handler in PROBES.items():
        app.router.add_get(path, handler)
    app.cleanup_ctx.append(_sweeping)
    add_routes(app, gateway)
    if mount is not None:
        mount(app)
    return app


async def _sweeping(app: web.Application) -> AsyncIterator[None]:
    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await app[GATEWAY].sweep()

    task = asyncio.create_task(sweep())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await app[GATEWAY].stop()


@web.middleware
async def _counted(request: web.Request, handler: Any) -> web.StreamResponse:
    figures = request.app[GATEWAY].figures
    with figures.request(request) as ended:
        response: web.StreamResponse = await handler(request)
        ended(response.status)
        figures.sent_bytes += response.body_length if response.prepared else len(getattr(response, "body", b"") or b"")
        return response


@web.middleware
async def _shaped(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        for name, value in request.headers.items():
            check_text(value, name)
        return await handler(request)
    except InvalidValue as error:  # bytes that are no text
        return web.json_response(openai_body(error), status=status_of(error)[0])
    except web.HTTPException as error:
        if error.status < 400:
            raise
        found: DoraError
        if error.status == 404:
            found = NotFound("path", request.path, "one of the routes that the documentation lists")
        elif error.status == 413:
            found = TooLarge("body", "(more)", f"at most {request.app[GATEWAY].limits.body_bytes} bytes")
        else:
            found = InvalidValue("request", f"{request.method} {request.path}", error.reason or "valid HTTP")
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        status = error.status if error.status == 405 else status_of(found)[0]
        return web.json_response(openai_body(found), status=status, headers=allow)


@asynccontextmanager
async def serving(gateway: Gateway, listening: socket.socket, mount: Mount | None = None) -> AsyncIterator[str]:
    """Serves a front at a listening socket, and yields its URL. If there are too many connections, those that have made
    no request make room for others.
    """
    runner = web.AppRunner(
        application(gateway, mount),
        handler_cancellation=True,
        access_log=None,
        logger=_WithoutClientsFaults(log),
        auto_decompress=False,
        # aiohttp counts from the connection's beginning or the last reply to the end of the next head, however it comes
        keepalive_timeout=gateway.limits.connection_idle_s,
    )
    await runner.setup()
    server = runner.server
    assert server is not None

    def connected() -> asyncio.BaseProtocol:
        return _Entering(server, gateway.crowd)

    try:
        connect = connected if gateway.tls is None else gateway.tls.connecting(connected)
        url = url_of(listening, secure=gateway.tls is not None)
        server_of = asyncio.get_running_loop().create_server(connect, sock=listening, backlog=BACKLOG)
        with collecting_rarely():  # the chunks of streams live long
            async with await server_of:
                yield url
    finally:
        if gateway.tls is not None:
            await gateway.tls.close()
        await runner.cleanup()


class _WithoutClientsFaults(logging.LoggerAdapter[logging.Logger]):
    """Leaves out malformed requests, which any stranger may send, and clients that leave before the end of a reply."""

    def log(self, level: int, msg: object, *args: object, **about: Any) -> None:
        if not isinstance(about.get("exc_info"), HttpProcessingError | ClientConnectionResetError):
            super().log(level, msg, *args, **about)


class _Entering(asyncio.Protocol):
    def __init__(self, make: Callable[[], asyncio.Protocol], crowd: Crowd) -> None:
        self._make = make
        self._crowd = crowd
        self._protocol: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._crowd.enter(transport):
            transport.write(_NO_ROOM)
            transport.close()
            return
        self._protocol = self._make()
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Passes on what came with the end of a TLS handshake."""
        if self._protocol is not None:
            self._protocol.data_received(data)
