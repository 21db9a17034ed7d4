"""What the orchestrator costs a token and a trajectory, with many workers, against gRPC alone in the same run.

    python perf/orchestrator.py --json
    python perf/orchestrator.py --workers 16 128 1024 --tokens-per-s-most 1000000
    python perf/orchestrator.py --workers 1024 --only trajectories --profile  # where the time goes, instead of rates

The service is the real one, in a process of its own, without workers of its own. A swarm of synthetic workers, one
process that speaks for all of them over loopback, and a trainer load it. Seconds of a core are those of the service's
own process: the verifiers', swarm's and trainer's do not count.

tokens_per_core_s            tokens taken into the book, where no response ends
trajectories_per_core_s      responses of --length tokens, from their start to their verdict and to the trainer
vs_raw_grpc                  of the first, by what a server does with the same messages that drops them
loop_lag_ms_p99              how late the event loop comes back to a sleeper of 5 ms, the worse of both
rss_bytes_per_token_in_flight   what the service's memory grows by while the book takes tokens
restart_s                    from the process's start until every worker hosts a version again

The service keeps its state on the disk of temporary files (--no-journal: nowhere). perf/journal.py measures what the
journal costs by itself, and what a restart with requests in flight takes.
"""

import argparse
import asyncio
import contextlib
import cProfile
import gc
import json
import pstats
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table
from swarm import Load, Swarm

from dora.client import Operator, Trainer
from dora.config import Config, load_config
from dora.data.types import EngineCapability
from dora.orchestrator.main import ServiceHandle, serve
from dora.orchestrator.setup import open_many_files
from dora.rpc.roles import Role
from dora.system.memory import give_back_memory

GROUP_SIZE: Final = 8
LAG_S: Final = 0.005
PROFILED: Final = 60  # functions that --profile prints, by each order
PAGE_BYTES: Final = resource.getpagesize()
COLUMNS: Final = (
    "workers",
    "tokens_per_core_s",
    "trajectories_per_core_s",
    "vs_raw_grpc",
    "loop_lag_ms_p99",
    "rss_bytes_per_token_in_flight",
    "restart_s",
)


def main() -> None:
    if sys.argv[1:2] == ["service"]:
        asyncio.run(be_service(sys.argv[2]))
        return
    if sys.argv[1:2] == ["trainer"]:
        asyncio.run(be_trainer(*sys.argv[2:]))
        return
    if sys.argv[1:2] == ["sink"]:
        asyncio.run(be_sink())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[16], help="sizes of the swarm")
    parser.add_argument("--requests", type=int, default=128, help="that each worker decodes at once")
    parser.add_argument("--length", type=int, default=500, help="tokens of a response, where responses end")
    parser.add_argument("--request-tokens-per-s", type=float, default=30.0)
    parser.add_argument("--tokens-per-s-most", type=float, default=1e6, help="of all workers together")
    parser.add_argument("--seconds", type=float, default=5.0, help="that are measured, of each part")
    parser.add_argument("--only", choices=("tokens", "trajectories"), help="one of the two parts")
    parser.add_argument("--set", action="append", default=[], help="a setting of the service: section.field=value")
    parser.add_argument("--no-journal", action="store_true", help="the service keeps no state")
    parser.add_argument("--profile", action="store_true", help="print the functions with most of the event loop's time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    open_many_files()
    rows = [asyncio.run(measured(options, workers)) for workers in options.workers]
    if options.json:
        print(json.dumps({"length": options.length, "requests": options.requests, "rows": rows}))
    else:
        show(rows)


async def measured(options: argparse.Namespace, workers: int) -> dict[str, Any]:
    """One row: both parts with so many workers."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row["workers"] = workers
    rate = min(options.request_tokens_per_s, options.tokens_per_s_most / (workers * options.requests))
    for part in ("tokens", "trajectories"):
        if options.only in (None, part):
            length = options.length if part == "trajectories" else 0
            found = await part_of(options, workers, Load(options.requests, length, rate))
            row[part] = found
            row["loop_lag_ms_p99"] = max(row["loop_lag_ms_p99"] or 0.0, found["loop_lag_ms_p99"])
            row["restart_s"] = found["start_s"]
    if "tokens" in row:
        names = ("tokens_per_core_s", "vs_raw_grpc", "rss_bytes_per_token_in_flight")
        row |= {name: row["tokens"][name] for name in names}
    if "trajectories" in row:
        row["trajectories_per_core_s"] = row["trajectories"]["trajectories_per_core_s"]
    return row


async def part_of(options: argparse.Namespace, workers: int, load: Load) -> dict[str, Any]:
    """One service from start to end under one load."""
    began_s = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        kept = [] if options.no_journal else [f'service.state="{stack.enter_context(TemporaryDirectory())}"']
        config = configured(workers, load, [*kept, *options.set])
        swarming: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stack.callback(lambda: swarming.cancel())  # after the service has ended: it does not count its workers as lost
        service = await stack.enter_async_context(Child.of("service", config.model_dump_json()))
        told = await service.hear()
        operator = await stack.enter_async_context(Operator(told["address"], told["token"]))
        await operator.status()  # connects, which a service that is busy takes long to answer
        swarm = Swarm(told["address"], told["tokens"][Role.WORKER], capability(config), load, workers)
        swarming = asyncio.create_task(swarm.run())
        await first(swarm.ready(), swarming)
        start_s = time.monotonic() - began_s
        groups = workers * load.requests // GROUP_SIZE
        await stack.enter_async_context(Child.of("trainer", told["address"], told["token"], told["model"], str(groups)))
        while swarm.sent.started < workers * load.requests:
            await first(asyncio.sleep(0.1), swarming)
        await first(asyncio.sleep(min(2.0, options.seconds)), swarming)
        before, counted = await service.ask("mark"), (await operator.status()).counters
        if options.profile:
            await service.ask("profile")
        swarm.sent.keeps = not load.length
        sent = (swarm.sent.tokens, swarm.sent.reports, swarm.sent.report_bytes)
        await first(asyncio.sleep(options.seconds), swarming)
        after = await service.ask("mark")
        now = (await operator.status()).counters
        swarm.sent.keeps = False
    grown = {name: now[name] - counted[name] for name in ("tokens_generated", "trajectories_finished", "groups_taken")}
    cpu_s = after["cpu_s"] - before["cpu_s"]
    trajectories = grown["trajectories_finished"]
    found = {
        "start_s": start_s,
        "cpu_s": cpu_s,
        "seconds": after["at_s"] - before["at_s"],
        "tokens": grown["tokens_generated"],
        "trajectories": trajectories,
        "groups_taken": grown["groups_taken"],
        "reports": swarm.sent.reports - sent[1],
        "report_bytes_per_token": (swarm.sent.report_bytes - sent[2]) / max(1, swarm.sent.tokens - sent[0]),
        "loop_lag_ms_p99": after["lag_ms_p99"],
        "tokens_per_core_s": grown["tokens_generated"] / cpu_s,
        "trajectories_per_core_s": trajectories / cpu_s,
    }
    if not load.length:
        raw = await raw_tokens_per_core_s(swarm)
        found["raw_tokens_per_core_s"], found["vs_raw_grpc"] = raw, found["tokens_per_core_s"] / raw
        found["rss_bytes_per_token_in_flight"] = (after["rss_bytes"] - before["rss_bytes"]) / grown["tokens_generated"]
    return found


def configured(workers: int, load: Load, chosen: list[str]) -> Config:
    context = 32768
    settings = {
        "model": '"tiny"',
        "prompts": '"tiny"',
        "service.listen": '"127.0.0.1:0"',
        "service.drain_timeout_s": 0.1,
        "kv.pool_mb": 0,
        "workers.count": 0,
        "workers.slots": load.requests,
        "workers.kv_tokens": context,
        "workers.max_model_len_tokens": context,
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_tokens": load.length or context // 2,
    }
    return load_config(None, [*(f"{name}={value}" for name, value in settings.items()), *chosen])


def capability(config: Config) -> EngineCapability:
    """All of a swarm's engines: room for whatever it is given."""
    kv_tokens = config.workers.slots * config.workers.kv_tokens
    return EngineCapability("f" * 64, config.workers.slots, kv_tokens, 32, config.workers.context_tokens, 64, "float32")


async def first(awaited: Any, other: asyncio.Task[None]) -> None:
    """Waits for the one; raises what ends the other."""
    waiting = asyncio.ensure_future(awaited)
    await asyncio.wait({waiting, other}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        await other
    await waiting


# ---------------------------------------------------------------------------------------------------------- processes


class Child:
    """Another process of this program, or of ``program``; asked in lines, it answers in JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, *arguments: str, program: str = __file__) -> AsyncIterator["Child"]:
        """The process; ended at the end, by the end of its stdin."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, program, *arguments)
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
        try:
            yield cls(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()

    async def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of the measurement has ended")
        told: dict[str, Any] = json.loads(line)
        return told

    async def ask(self, question: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n".encode())
        return await self.hear()


async def be_service(config: str, also: Callable[[], dict[str, float]] = dict) -> None:
    """The real service, with one sleeper in its event loop. At each line of stdin it says what it has used, and what
    ``also`` returns; at the line ``memory`` what it holds after it has returned free memory.
    """
    stop, lags, profile = asyncio.Event(), Lags(), cProfile.Profile()
    handle: asyncio.Future[ServiceHandle] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(Config.model_validate_json(config), ready=handle.set_result, stop=stop, progress=lambda _: None)
    )
    await first(asyncio.shield(handle), serving)
    made = handle.result()
    tell(
        {
            "address": made.address,
            "token": made.token,
            "tokens": made.tokens,
            "model": str(made.model),
            "metrics": made.metrics,
        }
    )
    sleeping = asyncio.create_task(lags.watch())
    async for line in stdin_lines():
        if line.strip() == b"memory":
            gc.collect()
            give_back_memory()
            tell({"rss_bytes": rss_bytes()})
            continue
        if line.strip() == b"profile":
            profile.enable()
            tell({})
            continue
        profile.disable()
        if profile.getstats():
            for order in ("tottime", "cumulative"):
                pstats.Stats(profile, stream=sys.stderr).sort_stats(order).print_stats(PROFILED)
        used = {"cpu_s": time.process_time(), "at_s": time.monotonic(), "rss_bytes": rss_bytes()}
        tell({**used, **lags.taken(), **also()})
    sleeping.cancel()
    stop.set()
    await serving


async def be_trainer(address: str, token: str, model: str, groups: str) -> None:
    """Takes every group and commits the model itself, step after step."""

    async def train() -> None:
        async with Trainer(address, token=token) as trainer:
            async for step in trainer.steps(groups=int(groups)):
                async for _ in step:
                    pass
                await step.commit(weights=Path(model))

    training = asyncio.create_task(train())
    async for _ in stdin_lines():
        pass
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)


async def stdin_lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield line


def tell(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Lags:
    """The delays with which a sleeper is woken."""

    def __init__(self) -> None:
        self._ms: list[float] = []

    async def watch(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(LAG_S)
            self._ms.append((time.monotonic() - began_s - LAG_S) * 1000)

    def taken(self) -> dict[str, float]:
        """Since the last time."""
        found, self._ms = self._ms or [0.0], []
        p50, p99 = np.percentile(found, (50, 99)).tolist()
        return {"lag_ms_p50": p50, "lag_ms_p99": p99, "lag_ms_max": max(found)}


# ----------------------------------------------------------------------------------------------------------- gRPC alone


async def be_sink() -> None:
    """A server that reads messages and drops them."""

    async def drop(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass

    handler = grpc.stream_stream_rpc_method_handler(drop)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw.Sink", {"Drop": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tell({"address": f"127.0.0.1:{port}"})
    async for _ in stdin_lines():
        tell({"cpu_s": time.process_time()})
    await server.stop(grace=None)


async def raw_tokens_per_core_s(swarm: Swarm) -> float:
    """The swarm's own messages, sent once more by as many connections to a server that drops them."""
    kept = list(swarm.sent.kept)
    connections = min(len(swarm.workers), len(kept))

    async with Child.of("sink") as sink:
        address = (await sink.hear())["address"]

        async def send(number: int) -> None:
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                call: Any = channel.stream_stream("/raw.Sink/Drop")()
                for content, _ in kept[number::connections]:
                    await call.write(content)
                await call.done_writing()
                await call.code()

        await send(0)  # once, for what is made only once
        before = await sink.ask("mark")
        await asyncio.gather(*(send(number) for number in range(connections)))
        after = await sink.ask("mark")
    return sum(tokens for _, tokens in kept) / (after["cpu_s"] - before["cpu_s"])


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="The orchestrator's process, for each second of a core")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(shown(row[name]) for name in COLUMNS))
    Console().print(table)


def shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
