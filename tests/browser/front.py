"""A front with its page, as `dora front` makes it, and how a browser signs in."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from dora.agents.front.app import serving
from dora.agents.front.gateway import Gateway
from dora.agents.front.listening import listening_socket
from dora.agents.front.model import served_model
from dora.agents.front.service import Service
from dora.ops.page import mounted
from dora.ops.page.history import History
from dora.ops.page.routes import FEED
from tests.browser.many import World


@dataclass
class Paged:
    url: str
    app: web.Application

    @property
    def history(self) -> History:
        return self.app[FEED].history


@asynccontextmanager
async def paged(
    address: str, token: str, model: Path, before: Callable[[History], None] = lambda _: None
) -> AsyncIterator[Paged]:
    """``before``: is given the history before the front follows the service."""
    apps: list[web.Application] = []

    def mount(app: web.Application) -> None:
        mounted(address, token)(app)
        before(app[FEED].history)
        apps.append(app)

    async with Service(address, token) as service:
        door = Gateway(service, served_model(model))
        with closing(listening_socket("127.0.0.1:0", has_key=False)) as listening:
            async with serving(door, listening, mount) as url:
                yield Paged(url, apps[0])


def fill(history: History, world: World, seconds: int) -> None:
    """Enters so many seconds of the past."""
    world.now = time.time()
    for second in range(seconds):
        history.add(world.status(second, seconds - second), world.now - (seconds - second))


async def sign_in(page: Any, url: str, token: str) -> None:
    await page.goto(f"{url}/")
    await page.get_by_label("Token of the service").fill(token)
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_url("**/page/")
