"""Probes of real processes: who is alive, and who serves. A scheduler has no token."""

import asyncio
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from dora.agents.front.run import FrontOptions, front
from dora.client import Operator
from tests.e2e.agents import agent, are_ready, ended, joining
from tests.prometheus.server import free_address
from tests.service import configured, running, until

FAKE = {"workers__engine": "fake", "workers__count": 1}


async def probed(url: str, page: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/{page}") as reply:
        return reply.status, (await reply.text()).strip()


async def said(log: Path, pattern: str) -> str:
    """Waits for a line of a process."""
    async with asyncio.timeout(60):
        while (found := re.search(pattern, await asyncio.to_thread(log.read_text))) is None:  # noqa: ASYNC110  nobody tells when
            await asyncio.sleep(0.05)
    return found[1]


async def test_probes_say_who_is_alive_and_who_serves(tiny_dense: Path, tmp_path: Path) -> None:
    config = configured(tiny_dense, service__metrics="127.0.0.1:0", **FAKE)
    log = tmp_path / "h1.log"
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(running(config))
        operator = await stack.enter_async_context(Operator(handle.address, handle.token))
        options = ("--workers", "0", "--probes", "127.0.0.1:0", "--notice-s", "20")
        h1 = await stack.enter_async_context(agent(handle, "h1", log, *options))
        url = await said(log, r"probes are at (http://[\d.:]+)/live")
        await until(operator, lambda status: len(status.hosts) == 2)
        assert await probed(url, "live") == (200, "yes")
        assert await probed(url, "ready") == (503, "no worker of the host has loaded a version")
        assert (await probed(url, "metrics"))[0] == 404
        await operator.scale(1, "h1")
        await until(operator, are_ready(2))
        async with asyncio.timeout(30):
            while await probed(url, "ready") != (200, "yes"):  # noqa: ASYNC110  nobody tells when
                await asyncio.sleep(0.05)

        of_service = f"http://{handle.metrics}"
        assert await probed(of_service, "live") == await probed(of_service, "ready") == (200, "yes")
        given = FrontOptions(handle.address, handle.token, "127.0.0.1:0", model=tiny_dense)
        at = await stack.enter_async_context(front(given))
        assert [(await probed(at, page))[0] for page in ("live", "ready", "health")] == [200, 200, 200]

        h1.send_signal(signal.SIGTERM)
        await said(log, r"(leaving within 20 s)")
        assert await asyncio.wait_for(h1.wait(), 60) == 0


async def test_a_host_without_a_service_lives_and_is_not_ready(tmp_path: Path) -> None:
    log = tmp_path / "h1.log"
    options = ("--workers", "0", "--probes", "127.0.0.1:0", "--rejoin-s", "60")
    process = await joining(free_address(), "0" * 64, "h1", log, *options)
    try:
        url = await said(log, r"probes are at (http://[\d.:]+)/live")
        await said(log, r"(joining again)")
        assert await probed(url, "live") == (200, "yes")
        code, why = await probed(url, "ready")
        assert code == 503 and why.startswith("the host has not joined")
    finally:
        await ended(process)
