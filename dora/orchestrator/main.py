"""One service from start to end: model, store, gRPC, workers; then drain.

async with contexts, innermost last:  run folder ─▶ verifier ─▶ runtime + gRPC server ─▶ workers
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dora.config import Config
from dora.errors import DoraError
from dora.kvtier.chunks import chunk_tokens_of
from dora.memory import collecting_rarely, keep_freed_memory
from dora.orchestrator.core import events as on
from dora.orchestrator.core.policies import check_live
from dora.orchestrator.feed import PromptFeed
from dora.orchestrator.launcher import POOL_ID, Launcher, WorkerStartError, pool_argv, worker_argv, worker_environment
from dora.orchestrator.plugins import load_strategies
from dora.orchestrator.prompt_check import PromptCheck
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.scoring import filtering, verifying
from dora.orchestrator.services.server import serving
from dora.orchestrator.setup import (
    SNAPSHOTS_FOLDER,
    cache_of,
    check_engine,
    event_log_of,
    open_many_files,
    prepared_model,
    recorder_of,
    run_folder_of,
    store_of,
    with_context,
)
from dora.orchestrator.storage import Storage
from dora.orchestrator.tier_server import TierServer, check_tier
from dora.prompts import ChatTokenizer, resolve_prompts
from dora.rpc.roles import Role, Tokens

log = logging.getLogger("dora.service")

POLL_S = 0.1

Failures: TypeAlias = tuple[asyncio.Future[None], ...]


@dataclass(frozen=True, slots=True)
class ServiceHandle:
    """How to reach a running service."""

    address: str
    tokens: Mapping[Role, str]  # of each role
    run_folder: Path
    model: Path
    model_s: float  # when the model was prepared, by the event loop's clock

    @property
    def token(self) -> str:
        """The owner's, which may do everything that a client may."""
        return self.tokens[Role.OWNER]


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
    check_engine(config)
    await check_tier(config)
    open_many_files()
    tokens = await asyncio.to_thread(Tokens, config.service.token)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(collecting_rarely())
        keep_freed_memory()
        run_folder = stack.enter_context(run_folder_of(config))
        storage = Storage()
        tier = await _tier_of(config, run_folder, storage, stack)
        launcher = Launcher(
            config.workers,
            lambda name: (
                pool_argv(config.kv, name, address)
                if name == POOL_ID
                else worker_argv(config.workers, name, address, model, config.kv.host, tier.endpoint if tier else "")
            ),
            lambda worker_id: worker_environment(config.workers, tokens.started(worker_id)),
            run_folder / "logs",
            storage,
            [POOL_ID] if config.kv.pool_mb else [],
        )
        stack.push_async_callback(launcher.close)
        await launcher.begin()
        progress(f"preparing the model {config.model}")
        model = await prepared_model(config, progress)
        model_s = asyncio.get_running_loop().time()
        config = with_context(config, model)
        store = await asyncio.to_thread(store_of, run_folder, model)
        recorder = await recorder_of(config, store, stack)
        tokenizer = await asyncio.to_thread(ChatTokenizer, model, cache_of(config))
        check = PromptCheck(config, tokenizer=tokenizer, vocab_size=store.reference.vocab_size)
        seed = config.rollout.seed
        source = await asyncio.to_thread(
            resolve_prompts, config.prompts, tokenizer, seed, check=check.well_formed, progress=progress
        )
        verifier = await stack.enter_async_context(verifying(config, source, model))
        group_filter = await stack.enter_async_context(filtering(config))
        snapshots = run_folder / SNAPSHOTS_FOLDER
        runtime = Runtime(
            config,
            feed=PromptFeed(config, source, check),
            verifier=verifier,
            group_filter=group_filter,
            store=store,
            snapshots=snapshots,
            recorder=recorder,
            event_log=event_log_of(config, stack),
            storage=storage,
        )
        stack.push_async_callback(runtime.close)
        address = await stack.enter_async_context(serving(config, runtime, model, snapshots, tokens))
        runtime.sessions.processes = launcher
        runtime.tier = tier
        stack.push_async_callback(launcher.close)  # a second time: workers end before what they talk to
        launcher.start()
        ticking = asyncio.create_task(runtime.ticks())
        stack.callback(ticking.cancel)
        progress(f"starting {config.workers.count} workers")
        failures = (runtime.failed, launcher.failed, ticking)
        if await _until_ready(config, runtime, launcher, stop, failures):
            ready(ServiceHandle(address, tokens.of, run_folder, model, model_s))
            await _first(stop, *failures)
            progress("draining")
            await _drain(config, runtime, failures)
    return 0


async def _tier_of(
    config: Config, run_folder: Path, storage: Storage, stack: contextlib.AsyncExitStack
) -> TierServer | None:
    """The shared KV tier's server, started; None: there is to be none."""
    if config.kv.tier == "none":
        return None
    tier = TierServer(config.kv, chunk_tokens_of(config.workers.block_tokens), run_folder, storage)
    stack.push_async_callback(tier.close)
    tier.start()
    return tier


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
