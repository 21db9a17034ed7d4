"""Browsers that nobody wants: strangers, other sites, too many, ones that do not read. None disturbs another."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import aiohttp
import pytest

from dora.ops.page import mounted
from dora.ops.page.actions import ACTIONS
from dora.ops.page.routes import BODY_MAX, COOKIE, CSRF
from dora.ops.page.viewers import VIEWERS
from dora.rpc.roles import Role, ServiceTokens
from tests.browser.many import World, simulated
from tests.owner_token import owner_token
from tests.unit.front_service import front

READ: Final = ("page/", "page/history", "page/events", "page/trajectories", "page/trajectory?id=g0.0")
WRONG: Final[tuple[tuple[str, Any], ...]] = (
    ("rebalance", {"x": 1}),
    ("drain", {}),
    ("drain", {"worker": 5}),
    ("drain", []),
    ("scale", {"workers": -1}),
    ("scale", {"workers": True}),
    ("migrate", {"trajectory": "g"}),
    ("other", {}),
)


@asynccontextmanager
async def page(world: World | None = None, period_s: float = 0.05) -> AsyncIterator[tuple[str, ServiceTokens]]:
    tokens = ServiceTokens(owner_token("simulation"))
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(simulated(world or World(2), tokens, period_s=period_s))
        url, _, _ = await stack.enter_async_context(front(mount=mounted(address, tokens.of[Role.OWNER])))
        yield f"{url}/", tokens


@asynccontextmanager
async def browser(url: str, token: str = "") -> AsyncIterator[aiohttp.ClientSession]:
    """One that has signed in, if it has a token."""
    connector, jar = aiohttp.TCPConnector(limit=0), aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(url, connector=connector, cookie_jar=jar) as http:
        if token:
            async with http.post("page/sign-in", data={"token": token}) as reply:
                assert reply.status == 200 and str(reply.url).endswith("/page/")
        yield http


async def csrf_of(http: aiohttp.ClientSession) -> str:
    async with http.get("page/") as reply:
        return (await reply.text()).partition('name="csrf" content="')[2].partition('"')[0]


async def test_a_stranger_sees_nothing_and_does_nothing() -> None:
    world = World(2)
    async with page(world) as (url, tokens), browser(url) as http:
        for path in READ:
            async with http.get(path) as reply:
                assert reply.status == 401, path
                assert "simulated" not in await reply.text()
        for name in ACTIONS:
            async with http.post(f"page/act/{name}", json={}) as reply:
                assert reply.status == 401
        for token in ("", "wrong", tokens.of[Role.TRAINER], "é\n", "x" * BODY_MAX * 2):
            async with http.post("page/sign-in", data={"token": token}) as reply:
                assert reply.status in (400, 401, 403, 413), token[:9]
            assert not list(http.cookie_jar)
        async with http.get("page/", headers={"Cookie": f"{COOKIE}=guessed"}) as reply:
            assert reply.status == 401
        async with http.get("page/static/..%2froutes.py") as reply:
            assert reply.status == 404
    assert not world.asked


async def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites() -> None:
    async with page() as (url, tokens), browser(url) as http:
        form = {"token": tokens.of[Role.OPERATOR]}
        async with http.post("page/sign-in", data=form, allow_redirects=False) as reply:
            told = reply.headers["Set-Cookie"]
            assert "HttpOnly" in told and "SameSite=Strict" in told and "Path" not in told
            assert form["token"] not in told
        async with http.post("page/sign-in", data=form, headers={"Sec-Fetch-Site": "cross-site"}) as reply:
            assert reply.status == 403
        async with http.get("page/") as reply:
            policy = reply.headers["Content-Security-Policy"]
            assert "unsafe" not in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


async def test_an_action_needs_the_role_and_the_pages_own_mark() -> None:
    world = World(2)
    async with page(world) as (url, tokens), AsyncExitStack() as stack:
        operator = await stack.enter_async_context(browser(url, tokens.of[Role.OPERATOR]))
        reader = await stack.enter_async_context(browser(url, tokens.of[Role.METRICS]))
        own, others = {CSRF: await csrf_of(operator)}, {CSRF: await csrf_of(reader)}
        for http, headers in (
            (operator, {}),
            (operator, others),
            (operator, {**own, "Sec-Fetch-Site": "cross-site"}),
            (reader, others),
        ):
            async with http.post("page/act/rebalance", json={}, headers=headers) as reply:
                assert reply.status == 403 and len((await reply.text()).splitlines()) == 1
        for name, body in WRONG:
            async with operator.post(f"page/act/{name}", json=body, headers=own) as reply:
                assert reply.status == 400, (name, body)
        for content in (b"[" * 9000, b"\xff", b"{", b"x" * (BODY_MAX + 1)):
            async with operator.post("page/act/drain", data=content, headers=own) as reply:
                assert reply.status in (400, 413)
        assert not world.asked
        async with operator.post("page/act/drain", json={"worker": "w1"}, headers=own) as reply:
            assert reply.status == 200 and (await reply.json())["moves"] == 4
        async with operator.post("page/sign-out", data={"csrf": "wrong"}) as reply:
            assert reply.status == 403
        async with operator.post("page/sign-out", data={"csrf": own[CSRF]}) as reply:
            assert reply.status == 401, "the page of one who has not signed in"
    assert world.asked == ["drain w1"]


async def test_values_of_any_kind_are_refused_without_a_failure() -> None:
    values = ("", "-1", "1e9", "9" * 40, "²", "\0", "<script>", "g0.0'", "é", "x" * 5000, "../..", "%00")
    random_ = random.Random(3)
    async with page() as (url, tokens), browser(url, tokens.of[Role.OPERATOR]) as http:
        for path in ("page/trajectories", "page/trajectory", "page/events"):
            for value in values:
                asked = {random_.choice(("state", "worker", "offset", "id", "first", "after")): value for _ in range(3)}
                if path == "page/events":
                    asked["after"] = "x"
                async with http.get(path, params=asked, headers={"Accept": "text/html"}) as reply:
                    assert reply.status < 500, (path, asked)
                    assert "<script>" not in (await reply.text()).replace('<script src="static/', "")


async def one_update(reply: aiohttp.ClientResponse) -> None:
    async for line in reply.content:
        if line.startswith(b"data: "):
            return
    raise AssertionError("the events have ended")


@pytest.mark.full
async def test_500_browsers_one_too_many_and_one_that_does_not_read() -> None:
    async with page(period_s=1.0) as (url, tokens), AsyncExitStack() as stack:
        http = await stack.enter_async_context(browser(url, tokens.of[Role.OPERATOR]))
        deaf = await stack.enter_async_context(silent(url, http))
        open_ = [await stack.enter_async_context(http.get("page/events")) for _ in range(VIEWERS - 1)]
        async with http.get("page/events") as reply:
            assert reply.status == 503 and len((await reply.text()).splitlines()) == 1
        await asyncio.gather(*map(one_update, open_))
        async with http.get("page/") as reply:
            assert reply.status == 200, "the limit is of those that follow"
        open_[0].close()
        deaf.close()
        status = 503
        while status == 503:  # until the front has noticed that one has left
            async with http.get("page/events") as reply:
                status = reply.status
                if status == 200:
                    await one_update(reply)
        assert status == 200


@asynccontextmanager
async def silent(url: str, http: aiohttp.ClientSession) -> AsyncIterator[Any]:
    """A browser that asks for events and reads none."""
    where = aiohttp.client.URL(url)
    cookies = "; ".join(f"{each.key}={each.value}" for each in http.cookie_jar)
    _, writer = await asyncio.open_connection(where.host, where.port, limit=1)
    writer.write(f"GET /page/events HTTP/1.1\r\nHost: x\r\nCookie: {cookies}\r\n\r\n".encode())
    await writer.drain()
    try:
        yield writer
    finally:
        writer.close()
