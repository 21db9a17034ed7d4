"""The routes of the page, below ``page/``: every address in it is relative, so that a proxy may add a prefix."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

from aiohttp import web

from dora.agents.front.app import Mount
from dora.agents.front.errors import TooLarge, status_of
from dora.agents.front.http import GATEWAY
from dora.agents.front.site import check_site
from dora.client import Operator
from dora.client.connection import COUNT_MAX
from dora.data.strict_json import read_json
from dora.errors import DoraError, InvalidValue, LimitExceeded, NotFound
from dora.ops.page import views
from dora.ops.page.actions import act
from dora.ops.page.browsers import IDLE_S, Browser, Browsers, is_same
from dora.ops.page.feed import StatusFeed, encoded
from dora.ops.page.track import track_of
from dora.rpc.channel import is_loopback
from dora.rpc.dora_pb2 import ShownTrajectory
from dora.rpc.errors import PermissionDenied, Unauthenticated
from dora.tls import Tls

FEED: Final = web.AppKey("page_feed", StatusFeed)
BROWSERS: Final = web.AppKey("page_browsers", Browsers)
STATIC: Final = Path(__file__).parent / "static"
COOKIE: Final = "dora_page"
CSRF: Final = "X-Dora-Csrf"
BODY_MAX: Final = 16384
BODY_S: Final = 10.0
TRACKS: Final = 8  # trajectories of one worker, the oldest
WRITE_S: Final = 30.0  # for a browser to read what was sent to it
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain"}
Handler = Callable[[web.Request, Browser], Awaitable[web.StreamResponse]]


def mounted(service: str, token: str, tls: Tls | None = None) -> Mount:
    """Returns a mount that adds the page of a service to a front. ``token``, of the role metrics, operator or owner,
    follows the status. ``tls`` protects the connections to the service; if it is None, they are not encrypted.
    """

    def mount(app: web.Application) -> None:
        operator = Operator(service, token, tls=tls)
        app[BROWSERS], app[FEED] = Browsers(service, tls), StatusFeed(operator)
        app.router.add_get("/", _to_page)
        app.router.add_get("/page", _to_page)
        app.router.add_get("/page/", _signed_in(_overview))
        app.router.add_post("/page/sign-in", _sign_in)
        app.router.add_post("/page/sign-out", _signed_in(_sign_out))
        app.router.add_get("/page/history", _signed_in(_history))
        app.router.add_get("/page/events", _signed_in(_events))
        app.router.add_get("/page/trajectories", _signed_in(_trajectories))
        app.router.add_get("/page/trajectory", _signed_in(_trajectory))
        app.router.add_get("/page/tracks", _signed_in(_tracks))
        app.router.add_post("/page/act/{action}", _signed_in(_act))
        app.router.add_get("/page/static/{name}", _static)
        app.on_shutdown.append(_end_viewers)
        app.cleanup_ctx.append(partial(_feeding, operator))

    return mount


async def _end_viewers(app: web.Application) -> None:
    app[FEED].viewers.close()


async def _feeding(operator: Operator, app: web.Application) -> AsyncIterator[None]:
    async with operator:
        task = asyncio.create_task(app[FEED].run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await app[BROWSERS].close()


def _signed_in(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            browser = await request.app[BROWSERS].find(request.cookies.get(COOKIE, ""))
            if browser is not None:
                request.app[GATEWAY].crowd.prove(request.transport)
                found = await handler(request, browser)
                await request.app[BROWSERS].trim()
                return found
            if request.method == "GET" and _wants_html(request):
                return _html(views.sign_in(is_clear=_is_clear(request)), 401)
            raise Unauthenticated("cookie", "(none that is known)", "that of a browser that has signed in")
        except DoraError as error:
            return _refused(request, error)

    return handle


def _refused(request: web.Request, error: DoraError) -> web.Response:
    status = _status_of(error)
    if _wants_html(request):
        return _html(views.refusal(str(error)), status)
    return web.Response(text=f"{error}\n", status=status, headers=HEADERS)


def _status_of(error: DoraError) -> int:
    """Tells a browser whose token has another role so; agents' clients read 401."""
    if isinstance(error, PermissionDenied):
        return 403
    if isinstance(error, LimitExceeded) and not isinstance(error, TooLarge):
        return 503
    return int(status_of(error)[0])


async def _to_page(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={**HEADERS, "Location": "page/"})


async def _sign_in(request: web.Request) -> web.Response:
    try:
        check_site(request, form=True)
        form = parse_qs((await _body(request)).decode("ascii", "replace"), max_num_fields=8)
        cookie = await request.app[BROWSERS].sign_in(form.get("token", [""])[0].strip())
    except DoraError as error:
        return _html(views.sign_in(str(error), is_clear=_is_clear(request)), _status_of(error))
    # Without a path the cookie is sent to what lies beside this route only, whatever prefix a proxy has added.
    secure = "; Secure" if _is_secure(request) else ""
    told = f"{COOKIE}={cookie}; Max-Age={int(IDLE_S)}; HttpOnly; SameSite=Strict{secure}"
    return web.Response(status=303, headers={**HEADERS, "Location": "./", "Set-Cookie": told})


async def _sign_out(request: web.Request, browser: Browser) -> web.Response:
    check_site(request, form=True)
    form = parse_qs((await _body(request)).decode("ascii", "replace"), max_num_fields=8)
    _check_csrf(form.get("csrf", [""])[0], browser)
    request.app[BROWSERS].forget(request.cookies[COOKIE])
    return web.Response(status=303, headers={**HEADERS, "Location": "./"})


async def _overview(request: web.Request, browser: Browser) -> web.Response:
    feed = request.app[FEED]
    return _html(views.overview(feed.history, feed.trouble, browser))


async def _history(request: web.Request, browser: Browser) -> web.Response:
    response = web.Response(body=request.app[FEED].whole(), content_type="application/json", headers=HEADERS)
    response.enable_compression()
    return response


async def _events(request: web.Request, browser: Browser) -> web.StreamResponse:
    viewers, browsers, cookie = request.app[FEED].viewers, request.app[BROWSERS], request.cookies[COOKIE]
    after = _number(request, "after")
    with viewers.one():
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        with suppress(TimeoutError, ConnectionError):
            await response.prepare(request)
            async with aclosing(viewers.follow(after)) as updates:
                async for update in updates:
                    async with asyncio.timeout(WRITE_S):
                        await response.write(update)
                    if await browsers.find(cookie) is None:
                        break
            return response
        if request.transport is not None:
            request.transport.abort()
        return response


async def _trajectories(request: web.Request, browser: Browser) -> web.Response:
    state, worker, offset = request.query.get("state", ""), request.query.get("worker", ""), _number(request, "offset")
    operator = request.app[BROWSERS].operator(browser)
    reply = await operator.trajectories(state, views.LISTED, offset=offset, worker=worker)
    return _html(views.trajectories(reply, state=state, worker=worker, offset=offset, browser=browser))


async def _trajectory(request: web.Request, browser: Browser) -> web.Response:
    trajectory_id, first = request.query.get("id", ""), _number(request, "first")
    shown = await request.app[BROWSERS].operator(browser).trajectory(trajectory_id, first, views.TOKENS)
    tokenizer = request.app[GATEWAY].model.tokenizer

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, special_tokens=True)

    status = request.app[FEED].history.status
    return _html(await asyncio.to_thread(views.trajectory, shown, decode, status, browser))


async def _tracks(request: web.Request, browser: Browser) -> web.Response:
    operator = request.app[BROWSERS].operator(browser)
    if trajectory_id := request.query.get("id", ""):
        shown = [await operator.trajectory(trajectory_id, 0, 1)]
    else:
        rows = (await operator.trajectories("", TRACKS, worker=request.query.get("worker", ""))).trajectories
        found = await asyncio.gather(*(_shown(operator, row.trajectory_id) for row in rows))
        shown = [each for each in found if each is not None]
    now = time.time()
    body = encoded([track_of(each, now).to_json_list() for each in shown])
    return web.Response(body=body, content_type="application/json", headers=HEADERS)


async def _shown(operator: Operator, trajectory_id: str) -> ShownTrajectory | None:
    try:
        return await operator.trajectory(trajectory_id, 0, 1)
    except NotFound:
        return None


async def _act(request: web.Request, browser: Browser) -> web.Response:
    _check_csrf(request.headers.get(CSRF, ""), browser)
    check_site(request)
    body = await _body(request)
    try:
        arguments = read_json(body.decode(), "body", BODY_MAX)
    except UnicodeDecodeError as error:
        raise InvalidValue("body", body[:80], "JSON in UTF-8") from error
    reply = await act(request.match_info["action"], request.app[BROWSERS].operator(browser), arguments)
    return web.json_response(reply, headers=HEADERS)


async def _static(request: web.Request) -> web.Response:
    """Sends a file of the page. These hold no secret."""
    found = FILES.get(request.match_info["name"])
    if found is None:
        return web.Response(text="there is no such file\n", status=404, headers=HEADERS)
    content, kind, tag = found
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": tag}
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    response = web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)
    response.enable_compression()
    return response


def _files() -> dict[str, tuple[bytes, str, str]]:
    contents = {file.name: (file.read_bytes(), TYPES[file.suffix]) for file in STATIC.iterdir()}
    return {
        name: (content, kind, f'"{sha256(content).hexdigest()[:16]}"') for name, (content, kind) in contents.items()
    }


FILES: Final = _files()


async def _body(request: web.Request) -> bytes:
    content = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_chunked(BODY_MAX):
                content += chunk
                if len(content) > BODY_MAX:
                    raise TooLarge("body", "(more)", f"at most {BODY_MAX} bytes")
    except TimeoutError as error:
        raise InvalidValue("body", "(incomplete)", f"whole within {BODY_S:g} s") from error
    return content


def _number(request: web.Request, name: str) -> int:
    value = request.query.get(name, "0")
    if not value.isascii() or not value.isdecimal() or int(value) > COUNT_MAX:
        raise InvalidValue(name, value, f"a whole number from 0 to {COUNT_MAX}")
    return int(value)


def _check_csrf(token: str, browser: Browser) -> None:
    if not is_same(token, browser.csrf):
        raise PermissionDenied("request", "(from elsewhere)", f"one of the page itself, with its {CSRF}")


def _wants_html(request: web.Request) -> bool:
    return "text/html" in request.headers.get("Accept", "")


def _is_secure(request: web.Request) -> bool:
    return request.secure or request.headers.get("X-Forwarded-Proto", "") == "https"


def _is_clear(request: web.Request) -> bool:
    host = request.url.host or ""
    return not _is_secure(request) and host != "localhost" and not is_loopback(host)


def _html(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, content_type="text/html", status=status, headers=HEADERS)
