"""Bodies, callers and server-sent events of HTTP requests."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from aiohttp import web

from dora.agents.front.callers import TURNS, Call
from dora.agents.front.errors import TooLarge, headers_of, openai_body, status_of
from dora.agents.front.gateway import Gateway
from dora.agents.front.replays import Kept, Named, Shared
from dora.agents.front.request import TurnRequest
from dora.agents.front.site import check_host, check_site
from dora.agents.front.turns import Chunk, RunningTurn
from dora.data.strict_json import read_json
from dora.errors import DoraError, InvalidValue, described
from dora.rpc.bearer import READS, bearer_of, check_bearer

log = logging.getLogger("dora.front")

GATEWAY: Final = web.AppKey("door", Gateway)
CALL: Final = web.RequestKey("call", Call)  # who makes a request
VERSION_HEADER: Final = "X-Policy-Version"
TINKER: Final = "/api/v1/"  # in the path of each of Tinker's routes
TINKER_KEY: Final = "tml-"  # begins each key that Tinker's client accepts: the front's key, or a session's, follows
DONE: Final = b"data: [DONE]\n\n"
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)  # dumps makes one a call
_LINES: Final = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ErrorBody = Callable[[DoraError], dict[str, Any]]


@dataclass(slots=True)
class ReceivedRequest:
    """A request that has been read. ``kept`` is it, for its retries, once its turns are asked."""

    gateway: Gateway
    call: Call
    body: Mapping[str, Any]
    named: Named
    kept: Kept | None = None
    is_delivered: bool = False

    async def turns(self, requested: Sequence[TurnRequest]) -> list[RunningTurn]:
        """Returns the turns of the request, those of its first call if it is a retry."""
        replays, now_s = self.gateway.replays, asyncio.get_running_loop().time()
        self.kept = replays.find(self.named, now_s)
        if self.kept is None:
            said = self.body.get("request_id")
            begun, request_id = (
                Shared(self.gateway.spawn(self._begun(requested))),
                said if isinstance(said, str) else "",
            )
            self.kept = Kept(self.named, request_id, now_s, begun)
            replays.keep(self.kept)
        return await self.kept.begun.result()

    async def _begun(self, requested: Sequence[TurnRequest]) -> list[RunningTurn]:
        return [turn for each in requested for turn in await self.gateway.turns(self.call, each, self.named.name)]

    def ended(self, *, failed: bool) -> None:
        """Notes the end of the reply. One that has failed is not kept for retries."""
        if self.kept is not None:
            self.gateway.replays.ended(self.kept, delivered=self.is_delivered)
            if failed:
                self.gateway.replays.forget(self.kept)


ASKED: Final = web.RequestKey("asked", ReceivedRequest)


async def read_request(request: web.Request, *, is_verdict: bool = False) -> ReceivedRequest:
    """Reads a request's body. If it ``is_verdict``, its texts are remarks: what is no Unicode in them is replaced.
    Raises InvalidValue, TooLarge.
    """
    gateway, call = request.app[GATEWAY], request[CALL]
    body = await read_body(request)
    key, retries = request.headers.get("Idempotency-Key", ""), request.headers.get("x-stainless-retry-count", "0")
    value = (
        {} if not body else read_json(_mended(body) if is_verdict else _text(body), "body", gateway.limits.body_bytes)
    )
    if not isinstance(value, dict):
        raise InvalidValue("body", body[:80], "a JSON object")
    received = request[ASKED] = ReceivedRequest(
        gateway, call, value, Named(call, request.path, sha256(body).hexdigest(), key, retries not in ("", "0"))
    )
    return received


async def caller_of(request: web.Request, method: str = TURNS) -> Call:
    """Returns who calls, by certificate, key, header and path. The path wins: clients such as verifiers send a header
    of their own. ``method`` is what the request does.

    Raises Unauthenticated, PermissionDenied, InvalidValue.
    """
    gateway = request.app[GATEWAY]
    key = bearer_of(request.headers.get("Authorization", "")) or request.headers.get("X-API-Key", "")
    header, path = request.headers.get("X-Session-ID", ""), request.match_info.get("session", "")
    if TINKER in request.path:
        key = key.removeprefix(TINKER_KEY)
    holder = None if gateway.tls is None else gateway.tls.holder(request.transport)
    return await gateway.caller(key, path or header, holder, method)


async def read_body(request: web.Request) -> bytes:
    """Returns the body. Raises TooLarge, InvalidValue for one that does not arrive in time."""
    limits, encoding = request.app[GATEWAY].limits, request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidValue("Content-Encoding", encoding, "left out, or identity")
    if (request.content_length or 0) > limits.body_bytes:
        raise TooLarge("body", request.content_length, f"at most {limits.body_bytes} bytes")
    try:
        async with asyncio.timeout(limits.body_s):
            body = await request.read()
        request.app[GATEWAY].figures.received_bytes += len(body)
        return body
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge("body", "(more)", f"at most {limits.body_bytes} bytes") from error
    except TimeoutError as error:
        raise InvalidValue("body", "(incomplete)", f"whole within {limits.body_s:g} s") from error
    except web.HTTPException:
        raise
    except Exception as error:  # of the content's encoding or its chunks
        raise InvalidValue("body", "(unreadable)", f"as its headers say ({type(error).__name__})") from error


def _mended(body: bytes) -> str:
    text = body.decode(errors="replace")
    try:
        return json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace").decode()
    except (ValueError, RecursionError):  # refused by whoever reads it
        return text


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue("body", body[:80], "JSON in UTF-8") from error


def refusing(handler: Handler, body_of: ErrorBody = openai_body, method: str = TURNS) -> Handler:
    """Returns a handler that answers refusals in a protocol's shape, and counts requests that do ``method``."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            if request.app[GATEWAY].takes_any_key:
                check_host(request)
            check_site(request)
            if method == READS:
                await check_reader(request)
                request.app[GATEWAY].crowd.prove(request.transport)
                return await handler(request)
            call = request[CALL] = await caller_of(request, method)
            request.app[GATEWAY].crowd.prove(request.transport)
            with request.app[GATEWAY].in_flight(call), _kept(request):
                return await handler(request)
        except DoraError as error:
            status, kind = status_of(error)
            request.app[GATEWAY].figures.refused[kind] += 1
            if status >= 500:
                log.warning("%s %s: %s", request.method, request.path, described(error))
            return web.json_response(body_of(error), status=status, headers=headers_of(error))

    return handle


@contextmanager
def _kept(request: web.Request) -> Iterator[None]:
    failed = True
    try:
        yield
        failed = False
    except (asyncio.CancelledError, ConnectionError):  # its client has left
        failed = False
        raise
    finally:
        if (received := request.get(ASKED)) is not None:
            received.ended(failed=failed)


async def check_reader(request: web.Request) -> None:
    """Raises Unauthenticated and PermissionDenied for a caller that may not read the metrics. Under TLS it needs a
    role, by certificate or token, otherwise the key of agents.
    """
    gateway = request.app[GATEWAY]
    key = bearer_of(request.headers.get("Authorization", ""))
    if gateway.tls is None:
        await gateway.caller(key, "")
    else:
        check_bearer(READS, gateway.tls.holder(request.transport), key, gateway.tokens)


def encoded(value: Any) -> bytes:
    """Returns JSON on one line, for clients too that end lines wherever Unicode does."""
    text = _ENCODER.encode(value)
    return (text if text.isascii() else text.translate(_LINES)).encode()


def event(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encoded(value) + b"\n\n"


async def whole(
    request: web.Request, received: ReceivedRequest, version: int, body: Mapping[str, Any]
) -> web.StreamResponse:
    headers = {VERSION_HEADER: str(version)}
    response = web.Response(body=encoded(body), content_type="application/json", headers=headers)
    await response.prepare(request)
    await response.write_eof()
    if request.transport is not None and not request.transport.is_closing():
        received.is_delivered = True
    return response


async def streamed(
    request: web.Request,
    received: ReceivedRequest,
    version: int,
    events: AsyncIterator[bytes],
    body_of: ErrorBody = openai_body,
) -> web.StreamResponse:
    """Sends events as they come. A refusal before the first one is an HTTP status, a later one is the last event."""
    async with aclosing(events):  # type: ignore[type-var]
        first = await anext(events)
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", VERSION_HEADER: str(version)}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        with received.gateway.figures.stream():
            try:
                await response.write(first)
                async for each in events:
                    await response.write(each)
                received.is_delivered = True
            except DoraError as error:
                await response.write(event(body_of(error)))
            await response.write_eof()
    return response


async def merged(turns: Sequence[RunningTurn]) -> AsyncIterator[tuple[int, Chunk]]:
    """Yields the chunks of several turns as they come, with the turns' numbers. Raises the first failure."""
    if len(turns) == 1:
        async for chunk in turns[0].chunks():
            yield 0, chunk
        return
    ready: asyncio.Queue[tuple[int, Chunk | DoraError]] = asyncio.Queue(2 * len(turns))

    async def follow(number: int) -> None:
        try:
            async for chunk in turns[number].chunks():
                await ready.put((number, chunk))
        except DoraError as error:
            await ready.put((number, error))

    tasks = [asyncio.create_task(follow(number)) for number in range(len(turns))]
    try:
        left = len(turns)
        while left:
            number, found = await ready.get()
            if isinstance(found, DoraError):
                raise found
            left -= found.is_last
            yield number, found
    finally:
        for task in tasks:
            task.cancel()
