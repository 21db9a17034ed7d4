"""A real Chromium, or a skip with the reason."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.browser.fetch import chromium

OF_THE_NETWORK = ("status of 40", "status of 503", "net::ERR_")  # refusals that tests ask for, and a front that ends
Opened = Callable[..., Awaitable[Any]]


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    """Opens a page of a browser of its own: ``opened(width, scheme)``. Fails in the end if any had a script's error or
    was refused something by its Content-Security-Policy.
    """
    found, reason = chromium()
    if found is None:
        pytest.skip(reason)
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed: `make setup` installs it")
    faults: list[str] = []

    def told(message: Any) -> None:
        if message.type == "error" and not any(each in message.text for each in OF_THE_NETWORK):
            faults.append(message.text)

    async with AsyncExitStack() as stack:
        playwright = await stack.enter_async_context(api.async_playwright())
        browser = await playwright.chromium.launch(executable_path=found)
        stack.push_async_callback(browser.close)

        async def page_of(width: int = 1280, scheme: str = "light") -> Any:
            context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = await context.new_page()
            page.set_default_timeout(60_000)
            page.on("console", told)
            page.on("pageerror", lambda error: faults.append(str(error)))
            return page

        yield page_of
    assert not faults
