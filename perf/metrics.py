"""What a scrape costs: its time, and the orchestrator's share of a core, with many workers.

    python perf/metrics.py --json
    python perf/metrics.py --workers 16 1024

The service is the real one, in a process of its own; a swarm of synthetic workers and a trainer load it.

scrape_ms_p50, scrape_ms_max       of /metrics and of the page of the host, one after the other, until the last byte
cpu_ms                             CPU time of the threads that make both pages, without their other work
core_share                         of a core, if both are scraped every 15 s
scrape_bytes, samples              of both pages
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import aiohttp
import numpy as np
from orchestrator import GROUP_SIZE, Child, be_service, capability, configured, first
from rich.console import Console
from rich.table import Table
from swarm import Load, Swarm

from dora.orchestrator.metrics import exporter
from dora.orchestrator.setup import open_many_files
from dora.rpc.roles import Role

PERIOD_S: Final = 15.0
PAGES: Final = ("/metrics", "/hosts/local/metrics")
COLUMNS: Final = ("workers", "scrape_ms_p50", "scrape_ms_max", "cpu_ms", "core_share", "scrape_bytes", "samples")


def main() -> None:
    if sys.argv[1:2] == ["service"]:
        meter = Meter()
        asyncio.run(be_service(sys.argv[2], lambda: {"scrape_cpu_s": meter.spent_s}))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1024], help="sizes of the swarm")
    parser.add_argument("--requests", type=int, default=32, help="that each worker decodes at once")
    parser.add_argument("--tokens-per-s", type=float, default=20000.0, help="of all workers together")
    parser.add_argument("--scrapes", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    open_many_files()
    rows = [asyncio.run(measured(options, workers)) for workers in options.workers]
    if options.json:
        print(json.dumps({"requests": options.requests, "rows": rows}))
        return
    table = Table(title="One scrape of a service and of its host")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{row[name]:,.4g}" for name in COLUMNS))
    Console().print(table)


async def measured(options: argparse.Namespace, workers: int) -> dict[str, Any]:
    """One row: a service with so many workers."""
    load = Load(options.requests, 0, options.tokens_per_s / (workers * options.requests))
    async with contextlib.AsyncExitStack() as stack:
        config = configured(workers, load, ['service.metrics="127.0.0.1:0"'])
        service = await stack.enter_async_context(Child.of("service", config.model_dump_json(), program=__file__))
        told = await service.hear()
        swarm = Swarm(told["address"], told["tokens"][Role.WORKER], capability(config), load, workers)
        swarming = asyncio.create_task(swarm.run())
        stack.callback(swarming.cancel)
        await first(swarm.ready(), swarming)
        groups = workers * load.requests // GROUP_SIZE
        await stack.enter_async_context(Child.of("trainer", told["address"], told["token"], told["model"], str(groups)))
        while swarm.sent.started < workers * load.requests:
            await first(asyncio.sleep(0.1), swarming)
        session = await stack.enter_async_context(aiohttp.ClientSession(f"http://{told['metrics']}"))
        return {"workers": workers, **await scraped(options.scrapes, service, session, swarming)}


async def scraped(
    scrapes: int, service: Child, session: aiohttp.ClientSession, swarming: asyncio.Task[None]
) -> dict[str, Any]:
    """The figures of so many scrapes, before as long a time without any."""
    times_ms, sizes, samples = [], 0, 0
    await scrape(session)
    before, began_s = await service.ask("mark"), time.monotonic()
    for _ in range(scrapes):
        scraped_s = time.monotonic()
        pages = await scrape(session)
        times_ms.append((time.monotonic() - scraped_s) * 1000)
        sizes, samples = (
            sum(map(len, pages)),
            sum(not line.startswith("#") for page in pages for line in page.splitlines()),
        )
        await first(asyncio.sleep(0.1), swarming)
    seconds = time.monotonic() - began_s
    after = await service.ask("mark")
    await first(asyncio.sleep(seconds), swarming)
    quiet = await service.ask("mark")
    cpu_s = after["scrape_cpu_s"] - before["scrape_cpu_s"]
    return {
        "scrape_ms_p50": float(np.percentile(times_ms, 50)),
        "scrape_ms_max": max(times_ms),
        "cpu_ms": 1000 * cpu_s / scrapes,
        "core_share": cpu_s / scrapes / PERIOD_S,
        "loop_lag_ms_max": after["lag_ms_max"],
        "quiet_loop_lag_ms_max": quiet["lag_ms_max"],
        "quiet_core_share": (quiet["cpu_s"] - after["cpu_s"]) / seconds,
        "scrape_bytes": sizes,
        "samples": samples,
    }


class Meter:
    """Adds up the CPU time of making pages: of the event loop's thread, and of the thread that writes them."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        kind: Any = exporter.Exporter
        kind.service, kind.host = self._metered(kind.service), self._metered(kind.host)
        meter = self

        class Pool(ThreadPoolExecutor):
            def submit(self, function: Any, /, *given: Any, **named: Any) -> Future[Any]:
                def timed() -> Any:
                    with meter.spending():
                        return function(*given, **named)

                return super().submit(timed)

        exporter.ThreadPoolExecutor = Pool  # type: ignore[misc]

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.spent_s += time.thread_time() - began_s

    def _metered(self, function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def page(*given: Any) -> Any:
            return await Steps(self, function(*given))

        return page


class Steps:
    """An awaitable whose steps, each from one suspension to the next, are metered."""

    def __init__(self, meter: Meter, awaited: Awaitable[Any]) -> None:
        self._meter, self._steps = meter, awaited.__await__()

    def __await__(self) -> Generator[Any, Any, Any]:
        while True:
            try:
                with self._meter.spending():
                    waits_for = next(self._steps)
            except StopIteration as end:
                return end.value
            yield waits_for


async def scrape(session: aiohttp.ClientSession) -> list[str]:
    """Both pages."""
    pages = []
    for path in PAGES:
        async with session.get(path) as reply:
            assert reply.status == 200, await reply.text()
            pages.append(await reply.text())
    return pages


if __name__ == "__main__":
    main()
