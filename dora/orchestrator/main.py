"""Runs one service from start to drain: model, store, gRPC, workers.

async with contexts, innermost last:  run folder ─▶ verifier ─▶ runtime + gRPC server ─▶ workers
"""

import asyncio
import contextlib
from collections.abc import Callable

from dora.config import Config
from dora.core.policies import check_live
from dora.journal.log import Sizes
from dora.orchestrator.guard import check_tls
from dora.orchestrator.hosts.tier_server import check_tier
from dora.orchestrator.plugins import load_strategies
from dora.orchestrator.recording.storage import Storage
from dora.orchestrator.recovery.begin_from import begun_from
from dora.orchestrator.recovery.state_folder import SETTING as STATE_SETTING
from dora.orchestrator.recovery.state_folder import state_folder_of
from dora.orchestrator.rotation import with_token
from dora.orchestrator.setup import check_engine, open_many_files, run_folder_of, writable
from dora.orchestrator.starting import ServiceHandle, ServiceStart, tier_of
from dora.orchestrator.tracing.export import check_traces
from dora.orchestrator.waiting import drain, failed_alone, opened, until_ready, until_stopped
from dora.rpc.roles import ServiceTokens
from dora.system.memory import collecting_rarely, keep_freed_memory
from dora.system.private import private_files


async def serve(
    config: Config,
    *,
    ready: Callable[[ServiceHandle], None],
    stop: asyncio.Event,
    progress: Callable[[str], None],
    listening: Callable[[ServiceHandle], None] = lambda handle: None,
    rotated: Callable[[ServiceHandle], None] = lambda handle: None,
) -> int:
    """Runs a service until ``stop`` is set, then drains it. Calls ``listening`` once clients can connect, while the
    workers start, ``ready`` once all workers answer, and ``rotated`` once the owner's token has been replaced.

    While draining, the service admits nothing. An attached trainer gets the admitted groups and has
    ``service.drain_timeout_s`` to commit them; then the workers end. Returns 0. Raises InvalidValue for a bad
    configuration, WorkerStartError if the workers do not start.
    """
    config = await _checked(config, progress)
    open_many_files()
    tokens = await asyncio.to_thread(ServiceTokens, config.service.token)
    async with contextlib.AsyncExitStack() as stack:
        umask = stack.enter_context(private_files())
        state = stack.enter_context(state_folder_of(config, Sizes(compacts=not config.service.keep_events)))
        config = await asyncio.to_thread(begun_from, config, state)
        if state is not None:
            config = state.carried_on(config)
            tokens = await asyncio.to_thread(ServiceTokens, config.service.token)
            with writable(STATE_SETTING, state.folder):
                state.remember()  # the run folder's name follows from its secret
        stack.enter_context(collecting_rarely())
        keep_freed_memory()
        secret = "" if state is None else state.identity.kv_secret
        run_folder = stack.enter_context(run_folder_of(config, secret))
        storage = Storage()
        tier = await tier_of(config, run_folder, storage, stack)
        start = ServiceStart(config, tokens, state, run_folder, storage, tier, stack, progress, umask)
        launcher = await start.launch()
        await start.prepare()
        config = start.config
        runtime = await start.build()
        if not await opened(start.open(runtime, launcher), stop, runtime.core.failed):
            return 0
        listening(start.handle)
        ticking = asyncio.create_task(runtime.ticks())
        stack.callback(ticking.cancel)
        if config.service.token_file:
            following = start.follow_token(rotated)
            stack.callback(following.cancel)
        progress(f"starting {config.workers.count} workers")
        failures = (runtime.core.failed, launcher.failed, ticking)
        if await until_ready(config, runtime, launcher, stop, failures, progress):
            ready(start.handle)
            failures = (runtime.core.failed, failed_alone(launcher, runtime), ticking)
            await until_stopped(stop, *failures)
            if state is None:
                progress("draining")
                await drain(config, runtime, failures)
            else:
                progress(f"stopping; the next start with service.state = {state.folder} carries on")
    return 0


async def _checked(config: Config, progress: Callable[[str], None]) -> Config:
    """Returns the configuration with its token. Raises InvalidValue for a bad one."""
    load_strategies()
    config = await asyncio.to_thread(with_token, config)
    check_live(config.balance, config.window)
    check_engine(config)
    check_traces(config.service)
    progress(f"TLS: {await asyncio.to_thread(check_tls, config)}")
    await check_tier(config)
    return config


__all__ = ["ServiceHandle", "serve"]
