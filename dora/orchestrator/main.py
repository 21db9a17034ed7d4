"""One service from start to end: model, store, gRPC, workers; then drain.

async with contexts, innermost last:  run folder ─▶ verifier ─▶ runtime + gRPC server ─▶ workers
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from dora.config import Config
from dora.errors import DoraError, InvalidValue
from dora.kvtransfer.shm import ShmTransport
from dora.memory import collecting_rarely, keep_freed_memory
from dora.models import context_tokens, default_cache, resolve_model
from dora.orchestrator.core import events as on
from dora.orchestrator.core.policies import check_live
from dora.orchestrator.eventlog import EventLogWriter
from dora.orchestrator.feed import PromptFeed
from dora.orchestrator.launcher import Launcher, WorkerStartError
from dora.orchestrator.plugins import load_strategies
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.scoring import filtering, verifying
from dora.orchestrator.service import OperatorService, PromptService, TrainerService, WorkerService
from dora.prompts import ChatTokenizer, resolve_prompts
from dora.record import TRAJECTORIES_FILE, Recorder
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.channel import server_interceptors, server_options
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

POLL_S = 0.1
STREAM_END_S = 1.0

Failures: TypeAlias = tuple[asyncio.Future[None], ...]


@dataclass(frozen=True, slots=True)
class ServiceHandle:
    """How to reach a running service."""

    address: str
    token: str
    run_folder: Path
    model: Path


async def serve(
    config: Config,
    *,
    ready: Callable[[ServiceHandle], None],
    stop: asyncio.Event,
    progress: Callable[[str], None],
) -> int:
    """Runs a service until ``stop`` is set, then drains it. ``ready`` is called once all workers answer.

    Draining: nothing new is admitted; a trainer that is attached gets what was admitted, and
    ``service.drain_timeout_s`` to commit it; then workers end. Returns 0. Raises InvalidValue for a bad
    configuration, WorkerStartError where the workers do not start.
    """
    load_strategies()
    check_live(config.balance, config.window.size)
    progress(f"preparing the model {config.model}")
    model = await _prepared(config, progress)
    check_context(config, model)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(collecting_rarely())
        keep_freed_memory()
        run_folder = stack.enter_context(_run_folder(config))
        store = await asyncio.to_thread(WeightStore, run_folder / "weights", model)
        recorder = await _recorder(config, store, stack)
        source = await asyncio.to_thread(
            lambda: resolve_prompts(config.prompts, ChatTokenizer(model), config.rollout.seed)
        )
        verifier = await stack.enter_async_context(verifying(config, source, model))
        group_filter = await stack.enter_async_context(filtering(config))
        snapshots = run_folder / "kv"
        snapshots.mkdir(exist_ok=True)
        runtime = Runtime(
            config,
            feed=PromptFeed(config, iter(source)),
            verifier=verifier,
            group_filter=group_filter,
            store=store,
            transport=ShmTransport(snapshots),
            recorder=recorder,
            event_log=_event_log(config, stack),
        )
        stack.push_async_callback(runtime.close)
        token = config.service.token or secrets.token_urlsafe(24)
        address = await stack.enter_async_context(_server(config, runtime, model, snapshots, token))
        launcher = Launcher(
            config.workers,
            lambda worker_id: _worker_argv(config, worker_id, address, model),
            {"DORA_TOKEN": token, **_worker_environment(config)},
            run_folder / "logs",
        )
        runtime.sessions.processes = launcher
        stack.push_async_callback(launcher.close)
        launcher.start()
        ticking = asyncio.create_task(runtime.ticks())
        stack.callback(ticking.cancel)
        progress(f"starting {config.workers.count} workers")
        failures = (runtime.failed, launcher.failed, ticking)
        if await _until_ready(config, runtime, launcher, stop, failures):
            ready(ServiceHandle(address, token, run_folder, model))
            await _first(stop, *failures)
            progress("draining")
            await _drain(config, runtime, failures)
    return 0


async def _prepared(config: Config, progress: Callable[[str], None]) -> Path:
    """The model's folder. A named model is made by a process of its own: the service itself loads no torch."""
    cache = Path(config.cache) if config.cache else default_cache()
    if not (Path(config.model) / "config.json").is_file():
        argv = [sys.executable, "-m", "dora.models", config.model, str(cache)]
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**os.environ, "TQDM_DISABLE": "1"},  # lines for people, not bars
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        last = "a model that can be made"
        async for line in process.stderr:
            last = line.decode(errors="replace").strip() or last
            progress(last)
        if await process.wait():
            raise InvalidValue("--model", config.model, last)
    return resolve_model(config.model, cache)


def check_context(config: Config, model: Path) -> None:
    """Raises InvalidValue where engines would be asked for longer contexts than the model has: they would not start."""
    most = context_tokens(model)
    asked = config.workers.max_model_len_tokens
    if config.workers.count and config.workers.engine == "vllm" and most is not None and asked > most:
        raise InvalidValue("workers.max_model_len_tokens", asked, f"at most {most}, which is what {config.model} takes")


@contextlib.contextmanager
def _run_folder(config: Config) -> Iterator[Path]:
    """Shared memory of this service: weights, KV snapshots, logs. Removed at the end if we made it."""
    if config.service.run_folder:
        folder = Path(config.service.run_folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidValue("service.run_folder", str(folder), f"a folder to write in ({error.strerror})") from error
        yield folder
        return
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="dora-", dir=shared if os.access(shared, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _recorder(config: Config, store: WeightStore, stack: contextlib.AsyncExitStack) -> Recorder | None:
    if not config.record:
        return None
    folder = Path(config.record)
    if (folder / TRAJECTORIES_FILE).exists():  # ids begin anew with each service
        raise InvalidValue("record", config.record, "a folder without an earlier record")
    recorder = await asyncio.to_thread(Recorder, folder)
    stack.callback(recorder.close)
    await asyncio.to_thread(recorder.keep_version, 0, store.folder(0))
    return recorder


def _event_log(config: Config, stack: contextlib.AsyncExitStack) -> EventLogWriter | None:
    """The log, closed after the runtime has handled its last event."""
    if not config.service.event_log:
        return None
    return stack.enter_context(EventLogWriter(Path(config.service.event_log), config, now_s=time.monotonic()))


@contextlib.asynccontextmanager
async def _server(config: Config, runtime: Runtime, model: Path, snapshots: Path, token: str) -> AsyncIterator[str]:
    """The gRPC server; yields the address it really listens at (port 0 takes a free one)."""
    server = grpc.aio.server(
        interceptors=server_interceptors(token), options=server_options(config.service.max_message_bytes)
    )
    stubs.add_TrainerServicer_to_server(TrainerService(runtime, model), server)
    stubs.add_PromptsServicer_to_server(PromptService(runtime), server)
    stubs.add_OperatorServicer_to_server(OperatorService(runtime, model), server)
    stubs.add_WorkerServicer_to_server(WorkerService(runtime, snapshots), server)
    host, _, port = config.service.listen.rpartition(":")
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise InvalidValue("--listen", config.service.listen, "a free address of this host") from error
    await server.start()
    try:
        yield f"{host}:{bound}"
    finally:
        await server.stop(grace=STREAM_END_S)


def _worker_argv(config: Config, worker_id: str, address: str, model: Path) -> list[str]:
    workers = config.workers
    options = {
        "--orchestrator": address,
        "--worker-id": worker_id,
        "--engine": workers.engine,
        "--model": str(model),
        "--slots": workers.slots,
        "--kv-tokens": workers.kv_tokens,
        "--block-tokens": workers.block_tokens,
        "--max-model-len-tokens": workers.max_model_len_tokens,
        "--dtype": workers.dtype,
    }
    return ["-m", "dora.worker", *(str(part) for option in options.items() for part in option)]


def _worker_environment(config: Config) -> dict[str, str]:
    """Threads are fixed before numpy and torch load."""
    threads = str(config.workers.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}


async def _until_ready(
    config: Config, runtime: Runtime, launcher: Launcher, stop: asyncio.Event, failures: Failures
) -> bool:
    """Whether all workers hold version 0 (False: stopped before). Raises where they die at start or take too long."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + config.workers.start_timeout_s
    while not stop.is_set():
        ready = sum(worker.hosts >= 0 for worker in runtime.machine.state.workers.values())
        if ready >= config.workers.count:
            return True
        reason = launcher.early_death()
        if reason is None and loop.time() > ends_s:
            reason = f"{ready} of {config.workers.count} workers answered in {config.workers.start_timeout_s:g} s"
        if reason is not None:
            raise WorkerStartError(reason)
        await asyncio.wait(failures, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        _raise_failure(failures)
    return False


async def _first(stop: asyncio.Event, *failures: asyncio.Future[None]) -> None:
    """Waits for the stop; raises the first failure."""
    stopping = asyncio.create_task(stop.wait())
    try:
        ends: list[asyncio.Future[Any]] = [stopping, *failures]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    _raise_failure(failures)


async def _drain(config: Config, runtime: Runtime, failures: Failures) -> None:
    """Admits no more; an attached trainer may take and commit what is open, within the time limit, and sees the end."""
    runtime.feed.close()
    runtime.post(on.AdmissionEnded())
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + config.service.drain_timeout_s
    while runtime.trainer_present() and loop.time() < ends_s:
        await asyncio.wait(failures, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        _raise_failure(failures)
    left = len(runtime.machine.state.group_row)
    log.info("drained; %d groups were not taken by a trainer", left)


def _raise_failure(failures: Failures) -> None:
    for failure in failures:
        if failure.done() and not failure.cancelled() and (error := failure.exception()) is not None:
            if isinstance(error, DoraError):
                raise error
            raise RuntimeError("the service failed; this is a bug") from error


__all__ = ["ServiceHandle", "serve"]
