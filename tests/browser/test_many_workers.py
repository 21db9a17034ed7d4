"""The page at 1,024 workers and 100,000 trajectories, in a real Chromium.

DORA_TEST_PICTURES=FOLDER keeps pictures of every width in light and dark.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from dora.agents.front.model import served_model
from dora.rpc.roles import Role, ServiceTokens
from tests.browser.conftest import Opened
from tests.browser.front import Paged, fill, paged, sign_in
from tests.browser.many import World, simulated
from tests.owner_token import owner_token

WORKERS = 1024
SECONDS = 120
PICTURED_SECONDS = 600
UPDATES = 8
NODES_MAX = 3000
WIDTHS = (360, 1280, 2560)
SCHEMES = ("light", "dark")
TOLD = (
    "Let us look at the maze again. The exit is to the east, two rooms away, and the door in between is locked: we "
    "need the key from the cellar first.\n\nSo I go down, take the key, come back and open the door. "
)
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


async def updates_ms(page: Any, count: int) -> list[float]:
    """What the next updates take in the browser: to read, apply and draw them."""
    found = []
    for _ in range(count):
        seq = await page.evaluate("document.documentElement.dataset.seq")
        await page.wait_for_selector(f"html[data-seq]:not([data-seq='{seq}'])")
        found.append(float(await page.evaluate("document.documentElement.dataset.updateMs")))
    return found


@pytest.fixture
def world(tiny_dense: Path) -> World:
    text = served_model(tiny_dense).tokenizer.encode(TOLD, special_tokens=False)
    return World(WORKERS, text=tuple(text))


async def shown(page: Any, front: Paged, token: str) -> None:
    await sign_in(page, front.url, token)
    await page.wait_for_selector("html[data-seq]")


async def test_1024_workers_and_100000_trajectories(tiny_dense: Path, world: World, opened: Opened) -> None:
    tokens = ServiceTokens(owner_token("simulation"))
    async with (
        simulated(world, tokens, SECONDS, period_s=0.5) as address,
        paged(address, tokens.of[Role.OWNER], tiny_dense, lambda history: fill(history, world, SECONDS)) as front,
    ):
        page = await opened()
        await shown(page, front, tokens.of[Role.OPERATOR])
        print(f"\nfirst paint {await page.evaluate(FIRST_PAINT):.0f} ms", end="")
        found = await updates_ms(page, UPDATES)
        print(f", an update {sorted(found)[len(found) // 2]:.1f} ms, at most {max(found):.1f} ms", end="")
        await page.get_by_label("Follow").fill("g0.0")
        await page.locator("#lanes").press("Home")
        await page.wait_for_selector("#followed:has-text('4 turns, 3 workers, 2 moves')")
        found = await updates_ms(page, UPDATES)
        print(f", with a trajectory and a worker followed at most {max(found):.1f} ms", end="")
        steps = page.locator("#steps canvas")
        await steps.press("Home")
        assert await page.locator("#step-title").text_content() == "Step 0: 24 s", "chosen by keys"
        assert await page.locator("#parts tr").count() == 11, "the parts that occur, and the trainer's own waiting"
        nodes = await page.evaluate("document.querySelectorAll('*').length")
        assert nodes < NODES_MAX, "workers are drawn, not nodes"
        assert await page.evaluate("document.documentElement.scrollWidth") <= 1280

        await page.get_by_label("Find").fill("w1023")
        await page.locator("#lanes").press("Home")
        assert "lost" in (await page.locator("#worker").text_content() or "")
        await page.get_by_label("Find").fill("")
        await page.locator("#lanes").press("End")
        assert await page.locator("#worker strong").text_content() == "w1023", "in the order of numbers"

        await page.goto(f"{front.url}/page/trajectories?offset=99900")
        assert await page.locator("tbody tr").count() == 100
        assert "99,901 to 100,000 of 100,000" in (await page.locator("main").text_content() or "")
        await page.get_by_role("link", name="first").click()
        async with page.expect_navigation():
            await page.get_by_role("link", name="g0.0").click()
        assert 100 < await page.locator("#text .sampled").count() < 2048
        async with page.expect_navigation():
            await page.get_by_role("link", name="next").click()
        assert await page.locator("#text .sampled").count() > 100
        await page.get_by_label("Move to").select_option(index=0)


@pytest.mark.skipif("DORA_TEST_PICTURES" not in os.environ, reason="DORA_TEST_PICTURES names no folder for pictures")
async def test_pictures(tiny_dense: Path, world: World, opened: Opened) -> None:
    folder, tokens = Path(os.environ["DORA_TEST_PICTURES"]), ServiceTokens(owner_token("simulation"))
    for workers in (24, WORKERS):
        world.workers = workers
        async with (
            simulated(world, tokens, PICTURED_SECONDS) as address,
            paged(
                address, tokens.of[Role.OWNER], tiny_dense, lambda history: fill(history, world, PICTURED_SECONDS)
            ) as front,
        ):
            for width in WIDTHS:
                for scheme in SCHEMES:
                    page = await opened(width, scheme)
                    await shown(page, front, tokens.of[Role.OPERATOR])
                    await updates_ms(page, 1)
                    await page.locator("#lanes").press("Home")
                    await page.screenshot(path=folder / f"overview-{workers}-{width}-{scheme}.png", full_page=True)
                    for name, route in (("list", "trajectories"), ("one", "trajectory?id=g0.0")):
                        await page.goto(f"{front.url}/page/{route}")
                        await page.screenshot(path=folder / f"{name}-{workers}-{width}-{scheme}.png", full_page=True)
                    await page.context.close()
