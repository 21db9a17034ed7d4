"""The aiohttp application of a front."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from aiohttp import web

from dora.errors import DoraError, InvalidValue, NotFound
from dora.front import anthropic, chat, completions, control, responses, tokens
from dora.front.door import Door
from dora.front.errors import TooLarge, anthropic_body, openai_body, status_of
from dora.front.http import DOOR, refusing
from dora.front.listening import BACKLOG, url_of
from dora.front.tinker.routes import add_routes

SWEEP_S: Final = 5.0
HEADER_BYTES_MAX: Final = 16384
_SESSION: Final = "/sessions/{session}"
Mount = Callable[[web.Application], None]


def application(door: Door, mount: Mount | None = None) -> web.Application:
    """Returns the application. It begins no connection and no task before it is run. ``mount`` adds routes to it."""
    app = web.Application(
        client_max_size=door.limits.body_bytes, middlewares=[_shaped], handler_args={"max_field_size": HEADER_BYTES_MAX}
    )
    app[DOOR] = door
    app.router.add_get("/health", refusing(control.health))
    app.router.add_get("/prefix_breaks", refusing(control.breaks))
    app.router.add_post("/sessions", refusing(control.open_sessions))
    app.router.add_get(_SESSION, refusing(control.show_session))
    app.router.add_post(f"{_SESSION}/reward", refusing(control.reward))
    app.router.add_post(f"{_SESSION}/close", refusing(control.close))
    for base in ("", _SESSION):
        app.router.add_get(f"{base}/v1/models", refusing(control.models))
        app.router.add_post(f"{base}/v1/chat/completions", refusing(chat.chat_completions))
        app.router.add_post(f"{base}/v1/responses", refusing(responses.responses))
        app.router.add_post(f"{base}/v1/messages", refusing(anthropic.messages, anthropic_body))
        app.router.add_post(f"{base}/v1/messages/count_tokens", refusing(anthropic.count_tokens, anthropic_body))
        app.router.add_post(f"{base}/v1/completions", refusing(completions.completions))
        app.router.add_post(f"{base}/inference/v1/generate", refusing(tokens.generate))
    app.router.add_post("/inference/v1/abort_requests", refusing(tokens.abort_requests))
    app.cleanup_ctx.append(_sweeping)
    add_routes(app, door)
    if mount is not None:
        mount(app)
    return app


async def _sweeping(app: web.Application) -> AsyncIterator[None]:
    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await app[DOOR].sweep()

    task = asyncio.create_task(sweep())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await app[DOOR].stop()


@web.middleware
async def _shaped(request: web.Request, handler: Any) -> web.StreamResponse:
    """Gives aiohttp's own refusals the shape that clients read."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        found: DoraError
        if error.status == 404:
            found = NotFound("path", request.path, "one of the routes that the documentation lists")
        elif error.status == 413:
            found = TooLarge("body", "(more)", f"at most {request.app[DOOR].limits.body_bytes} bytes")
        else:
            found = InvalidValue("request", f"{request.method} {request.path}", error.reason or "valid HTTP")
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        status = error.status if error.status == 405 else status_of(found)[0]
        return web.json_response(openai_body(found), status=status, headers=allow)


@asynccontextmanager
async def serving(door: Door, listening: socket.socket, mount: Mount | None = None) -> AsyncIterator[str]:
    """Serves a front at a listening socket, and yields its URL. Connections beyond the limit are closed at once."""
    runner = web.AppRunner(application(door, mount), handler_cancellation=True, access_log=None, auto_decompress=False)
    await runner.setup()
    server = runner.server
    assert server is not None

    def connected() -> asyncio.BaseProtocol:
        return server() if len(server.connections) < door.limits.connections else _Refused()

    try:
        url = url_of(listening)
        async with await asyncio.get_running_loop().create_server(connected, sock=listening, backlog=BACKLOG):
            yield url
    finally:
        await runner.cleanup()


class _Refused(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        transport.close()
