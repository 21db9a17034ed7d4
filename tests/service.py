"""A whole service for tests: real orchestrator, gRPC and workers, in one ``async with``."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from dora.client import Operator, Trainer
from dora.config import Config, load_config
from dora.data.trajectory import TrajectoryGroup
from dora.errors import Conflict, NotFound
from dora.host.command import LaunchContext, worker_argv
from dora.host.launcher import worker_name
from dora.orchestrator.guard import tls_of
from dora.orchestrator.main import ServiceHandle, serve
from dora.orchestrator.setup import with_context
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.roles import Role
from dora.session.linked import Address
from dora.tls import Tls
from dora.worker import __main__ as worker_process

Result = TypeVar("Result")


def configured(model: Path, **fields: Any) -> Config:
    """A small service on a free port, without a pool. ``fields`` are dotted names with ``__`` for the dot."""
    tree = {
        "model": str(model),
        "prompts": "tiny",
        "service.listen": "127.0.0.1:0",
        "service.tick_s": 0.1,
        "service.drain_timeout_s": 20,
        "kv.pool_mb": 0,  # a process that most tests do not need
        "workers.slots": 8,
        "workers.kv_tokens": 4096,
        "workers.max_model_len_tokens": 256,
        "rollout.group_size": 4,
        "rollout.max_tokens": 48,
        **{name.replace("__", "."): value for name, value in fields.items()},
    }
    return load_config(None, [f"{key}={_toml(value)}" for key, value in tree.items()])


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


@asynccontextmanager
async def running(config: Config, *, processes: bool = False) -> AsyncIterator[ServiceHandle]:
    """The service, ready; stopped and drained at the end. Raises what ``serve`` raises.

    Workers with a fake engine run as threads of this process, over the same gRPC and data plane: a process takes longer
    to start than most tests to run. ``processes``: they are processes all the same, which the test kills, say.
    """
    if processes or config.workers.engine != "fake" or not config.workers.count:
        async with _served(config) as handle:
            yield handle
        return
    alone = config.model_copy(update={"workers": config.workers.model_copy(update={"count": 0})})
    threads = _WorkerThreads(config)
    try:
        async with _served(alone) as handle:
            await threads.begin(handle)
            yield handle
    finally:
        await threads.end()


@asynccontextmanager
async def _served(config: Config) -> AsyncIterator[ServiceHandle]:
    stop = asyncio.Event()
    ready: asyncio.Future[ServiceHandle] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(config, ready=ready.set_result, stop=stop, progress=lambda _: None))
    try:
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield ready.result()
    finally:
        stop.set()
        await task


class _WorkerThreads:
    """The workers of a service, each in a thread of this process. They end with the service, which lets them go."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tls = tls_of(config)  # theirs, too
        self._stop = threading.Event()
        self._running: asyncio.Future[Any] | None = None  # until the last of them has ended, or one has failed

    async def begin(self, handle: ServiceHandle) -> None:
        """Returns once each hosts a version."""
        names = [worker_name("", index) for index in range(self._config.workers.count)]
        pool, loop = ThreadPoolExecutor(len(names), "worker"), asyncio.get_running_loop()
        self._running = asyncio.gather(*(loop.run_in_executor(pool, self._serve, handle, name) for name in names))
        pool.shutdown(wait=False)
        tls = None if self._tls is None else Tls.of_folder(Path(self._tls.cert).parents[1] / "operator")
        async with Operator(handle.address, handle.token, tls=tls) as operator:
            are_ready = until(operator, lambda status: sum(each.version >= 0 for each in status.workers) == len(names))
            await during(self._running, are_ready)

    async def end(self) -> None:
        self._stop.set()
        if self._running is not None:
            await self._running

    def _serve(self, handle: ServiceHandle, name: str) -> None:
        workers = with_context(self._config, handle.model).workers
        _, _, *argv = worker_argv(
            workers, name, LaunchContext(handle.address, handle.model, kv_host=self._config.kv.host)
        )
        options = worker_process._parser().parse_args(argv)
        address = Address(
            handle.address, handle.tokens[Role.WORKER], name, options.kv_host, options.host, tls=self._tls
        )
        with contextlib.closing(worker_process.make_engine(options)) as engine:
            member = worker_process.WorkerMember(address, engine, self._stop)
            with contextlib.closing(member), contextlib.suppress(ServiceUnavailable):
                member.serve()


async def train(
    handle: ServiceHandle,
    trainer: Trainer,
    steps: int,
    groups: int,
    weights: Any = None,
    enough: asyncio.Event | None = None,
) -> list[list[TrajectoryGroup]]:
    """Takes and commits ``steps`` steps; each commit publishes ``weights`` (default: the model's own files).

    ``enough``: goes on until it is set, for a test that awaits something that takes a slow machine longer.
    """
    taken = []
    async for step in trainer.steps(groups=groups):
        taken.append([group async for group in step])
        await step.commit(weights=weights if weights is not None else handle.model, wait=True)
        if len(taken) >= steps and (enough is None or enough.is_set()):
            break
    return taken


async def train_beside(
    handle: ServiceHandle, trainer: Trainer, steps: int, groups: int, awaited: Coroutine[Any, Any, Any]
) -> list[list[TrajectoryGroup]]:
    """Takes and commits ``steps`` steps, or more until ``awaited`` has returned."""
    enough = asyncio.Event()
    training = asyncio.create_task(train(handle, trainer, steps, groups, enough=enough))
    await during(training, awaited)
    enough.set()
    return await training


async def until(operator: Operator, condition: Any) -> Any:
    """The first watched status for which ``condition`` holds."""
    async for status in operator.watch(period_ms=50):
        if condition(status):
            return status
    raise AssertionError("the service stopped being watched")


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Does work beside the block, and ends it with the block, whatever becomes of it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def during(work: asyncio.Future[Any], awaited: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of ``awaited``. Fails at once if ``work`` ends first, as it would then be awaited for ever."""
    waiting = asyncio.create_task(awaited)
    await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        work.result()
        raise AssertionError("the work ended before what was awaited happened")
    return await waiting


async def ask_move(operator: Operator, status: pb.Status, near: Collection[str] = ()) -> bool:
    """Asks for the move of the running request that has the most before it; whether there was one that can move.
    ``near``: it moves between these workers and the others.
    """
    hosts = [worker for worker in status.workers if worker.state == "ready"]
    listed = (await operator.trajectories("running", limit=1000)).trajectories
    for request in sorted(listed, key=lambda request: request.tokens):
        for target in hosts:
            crosses = not near or (target.worker_id in near) != (request.worker in near)
            if target.version == request.version and target.worker_id != request.worker and crosses:
                try:
                    await operator.migrate(request.trajectory_id, target.worker_id)
                except (Conflict, NotFound):  # it has ended or changed hands since
                    continue
                return True
    return False


async def move_one(operator: Operator, *, and_begin_another: bool = False) -> None:
    """Moves requests as an operator does until one has moved with its KV, and on demand until a further move begins.

    A strategy moves what it must, which depends on how fast the machine happens to be; a test that needs a move asks
    for it. Begun before the first commit, when every worker hosts the one version there is, it finds requests to move.
    """
    async for status in operator.watch(period_ms=50):
        moved = status.counters["migrations_kv"] > 0
        if moved and not and_begin_another:
            return
        if await ask_move(operator, status) and moved:
            return


def check_promises(steps: list[list[TrajectoryGroup]], window: int, groups: int, first: int = 0) -> None:
    """C1-C3 as a trainer sees them. ``first``: the number of the first of these steps."""
    seen: set[str] = set()
    for number, step in enumerate(steps, first):
        assert len(step) == groups
        for group in step:
            assert group.group_id not in seen
            seen.add(group.group_id)
            assert len(group) == group.trajectories[0].group_size
            for trajectory in group.trajectories:
                assert trajectory.trained_step == number
                assert trajectory.staleness == number - trajectory.behaviour_version
                assert 0 <= trajectory.staleness <= window - 1
                assert {segment.version for segment in trajectory.worker_history} == {trajectory.behaviour_version}
                edges = [(segment.first_token, segment.last_token) for segment in trajectory.worker_history]
                assert edges[0][0] == 0 and edges[-1][1] == trajectory.length_tokens - 1
                assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(edges))


async def park(operator: Operator, count: int, worker_id: str = "") -> None:
    """Parks requests, of this worker or any, as an operator does, until so many went into the pool and one is back."""
    async for status in operator.watch(period_ms=50):
        if status.counters["requests_parked"] >= count and status.counters["requests_resumed"]:
            return
        if not status.pools or status.pools[0].state != "ready":
            continue
        listed = (await operator.trajectories("running", limit=1000)).trajectories
        chosen = [request for request in listed if worker_id in ("", request.worker)]
        for request in sorted(chosen, key=lambda request: request.tokens)[:2]:
            try:
                await operator.migrate(request.trajectory_id, "pool-0")
            except (Conflict, NotFound):  # it has ended or changed hands since
                continue
