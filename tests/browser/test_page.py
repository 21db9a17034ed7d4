"""The operator's page in a real Chromium, of a real service with fake engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

import dora
from dora.client import Operator
from dora.rpc.roles import Role
from tests.browser.conftest import Opened
from tests.browser.front import paged, sign_in
from tests.service import configured, running, train

WORD = "<b>&amp;</b>"  # a task that would be markup if it were not escaped


def config_of(model: Path) -> Any:
    return configured(
        model,
        workers__engine="fake",
        workers__count=2,
        prompts="none",
        reward__function="dora.rewards.tiny:score",
        window__size=2,
        rollout__max_tokens=12,
    )


async def open_sessions(sessions: dora.Sessions, name: str) -> list[Any]:
    """Two sessions of two turns each, of which one goes on."""
    prompt = {"text": "abab", "prompt_id": name, "task_id": WORD}
    opened = await sessions.open(prompt, 2)
    for session in opened:
        await session.ask([5, 6, 7], name="tool")
    await opened[0].end(0.75, log="<script>alert(1)</script>")
    return opened


async def seq_of(page: Any) -> int:
    await page.wait_for_selector("html[data-seq]")
    return int(await page.evaluate("document.documentElement.dataset.seq"))


async def updated(page: Any, seq: int) -> None:
    """Returns after a later update than ``seq``."""
    await page.wait_for_selector(f"html[data-seq]:not([data-seq='{seq}'])")


async def test_a_page_is_live_and_shows_a_trajectory(tiny_dense: Path, opened: Opened) -> None:
    async with (
        running(config_of(tiny_dense)) as handle,
        paged(handle.address, handle.token, tiny_dense) as front,
        dora.Sessions(handle.address, handle.token) as sessions,
        dora.Trainer(handle.address, token=handle.token) as trainer,
    ):
        page = await opened()
        await sign_in(page, front.url, handle.tokens[Role.OPERATOR])
        seq = await seq_of(page)

        async def work() -> None:
            await (await open_sessions(sessions, "first"))[1].end(0.5)

        await asyncio.gather(train(handle, trainer, steps=1, groups=1), work())
        await open_sessions(sessions, "second")
        await updated(page, seq)
        await page.wait_for_selector("#head dd:has-text('newest v1')")
        assert await page.locator("#live").text_content() == "live"
        assert await page.locator("#versions tr").count() >= 1
        hues = await page.evaluate(
            "import(new URL('static/colours.js', location.href).href)"
            ".then((colours) => [...Array(64).keys()].map(colours.versionHue))"
        )
        assert len(hues) == 64 and all(35 <= hue <= 325 for hue in hues), "red means lost"

        await page.get_by_role("link", name="Trajectories").click()
        await page.get_by_role("row", name="second").first.get_by_role("link").click()
        await page.wait_for_selector("#text .sampled")
        assert await page.locator("#text .sampled").count() > 2
        assert await page.locator("#text .prompt").count() and await page.locator("#text .given").count()
        assert await page.locator(".track").count() == 3, "turns over time and by tokens, workers"
        assert await page.locator(".lanes-of rect").count() == 2, "turns, on the lanes of their workers"
        assert await page.locator("dd", has_text=WORD).count() == 1, "text, not markup"
        assert "w" in (await page.locator("table", has_text="arrival").locator("td").first.text_content() or "")
        await follow(page)
        await page.get_by_text("The verifier's log").click()
        assert await page.locator("pre").text_content() == "<script>alert(1)</script>"
        await sessions_end(handle)


async def follow(page: Any) -> None:
    """Goes to the workers' lanes, where a trajectory is followed, and back."""
    await page.get_by_role("link", name="show among all workers").click()
    await page.wait_for_selector("#followed:has-text('2 turns, 1 worker, 0 moves')")
    await page.wait_for_selector("#step-title:has-text('Step 0')")
    assert "training" in (await page.locator("#parts").text_content() or "")
    await page.locator("#lanes").press("Home")
    await page.wait_for_selector("#worker canvas", state="attached")
    await page.go_back()


async def sessions_end(handle: Any) -> None:
    """Takes back what is open, so that the service need not wait for it."""
    async with dora.Prompts(handle.address, handle.token) as prompts:
        await prompts.cancel(["second"])


async def test_actions_need_the_operators_role(tiny_dense: Path, opened: Opened) -> None:
    async with (
        running(config_of(tiny_dense)) as handle,
        paged(handle.address, handle.token, tiny_dense) as front,
    ):
        page = await opened()
        await sign_in(page, front.url, handle.tokens[Role.OPERATOR])
        await seq_of(page)
        await page.get_by_role("button", name="Re-balance").click()
        await page.get_by_role("button", name="Cancel").click()
        assert await page.locator("#reply").is_hidden(), "nothing was done"
        await page.get_by_role("button", name="Re-balance").click()
        await page.get_by_role("button", name="Confirm").click()
        await page.wait_for_selector("#reply:not([hidden])")
        assert "a re-balancing cycle was run" in (await page.locator("#reply").text_content() or "")

        await page.locator("#lanes").focus()
        await page.keyboard.press("Home")
        await page.get_by_role("button", name="Drain").click()
        await page.get_by_role("button", name="Confirm").click()
        async with Operator(handle.address, handle.token) as operator:
            async for status in operator.watch(50):
                if any(worker.state in ("draining", "drained") for worker in status.workers):
                    break

        reader = await opened()
        await sign_in(reader, front.url, handle.tokens[Role.METRICS])
        await seq_of(reader)
        assert await reader.get_by_role("button", name="Re-balance").count() == 0
        status, told = await reader.evaluate(POST, {"csrf": True})
        assert status == 403 and "operator" in told
        assert (await page.evaluate(POST, {"csrf": False}))[0] == 403, "without the page's own mark"
        stranger = await opened()
        await stranger.goto(f"{front.url}/")
        await stranger.get_by_label("Token of the service").fill("wrong")
        await stranger.get_by_role("button", name="Sign in").click()
        await stranger.wait_for_selector("[role=alert]")
        assert "not accepted" in (await stranger.locator("[role=alert]").text_content() or "")


POST = """async ({csrf}) => {
    const mark = csrf ? document.querySelector('meta[name="csrf"]').content : "other";
    const headers = {"X-Dora-Csrf": mark, "Accept": "application/json"};
    const reply = await fetch("act/rebalance", {method: "POST", headers, body: "{}"});
    return [reply.status, await reply.text()];
}"""


@asynccontextmanager
async def proxied(url: str, prefix: str) -> AsyncIterator[str]:
    """A proxy that serves a front below a prefix."""

    async def forward(request: web.Request) -> web.StreamResponse:
        path = request.raw_path.removeprefix(prefix)
        kept = {name: value for name, value in request.headers.items() if name not in ("Host", "Accept-Encoding")}
        body = await request.read()
        async with http.request(request.method, url + path, headers=kept, data=body, allow_redirects=False) as reply:
            headers = {name: value for name, value in reply.headers.items() if name in PASSED}
            response = web.StreamResponse(status=reply.status, headers=headers)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            return response

    app = web.Application()
    app.router.add_route("*", f"{prefix}/{{path:.*}}", forward)
    runner = web.AppRunner(app, handler_cancellation=True)
    async with ClientSession(auto_decompress=False) as http:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}"
        finally:
            await runner.cleanup()


PASSED = (
    "Content-Type",
    "Content-Security-Policy",
    "Location",
    "Set-Cookie",
    "Cache-Control",
    "Content-Encoding",
    "ETag",
)


@pytest.mark.full
async def test_a_page_behind_a_prefix(tiny_dense: Path, opened: Opened) -> None:
    async with (
        running(config_of(tiny_dense)) as handle,
        paged(handle.address, handle.token, tiny_dense) as front,
        proxied(front.url, "/ops/dora") as url,
    ):
        page = await opened()
        await sign_in(page, url, handle.tokens[Role.OPERATOR])
        seq = await seq_of(page)
        await updated(page, seq)
        await page.get_by_role("link", name="Trajectories").click()
        assert page.url.startswith(f"{url}/page/trajectories")
        await page.get_by_role("button", name="Sign out").click()
        await page.wait_for_selector("#token")
