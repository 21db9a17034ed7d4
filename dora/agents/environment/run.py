"""Runs an environment's process."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dora.agents.environment.attending import Attending
from dora.agents.environment.calls import Calls, EnvironmentFailed
from dora.agents.environment.episode import RECONNECT_S, Episodes
from dora.agents.environment.guard import Guard
from dora.agents.environment.loading import runs_elsewhere
from dora.agents.environment.pool import WarmPool
from dora.agents.environment.processes import Processes
from dora.agents.environment.spec import one_line
from dora.agents.environment.verdicts import VerdictCache
from dora.agents.environment.verifiers import harness_episodes
from dora.agents.front.model import served_model
from dora.client import Operator
from dora.client.connection import until_answered
from dora.client.sessions import Sessions
from dora.config import EnvironmentConfig
from dora.errors import InvalidValue
from dora.models import context_tokens
from dora.rewards.limits import UserLimits
from dora.system.process_tree import end_descendants

TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """Options of a driver. ``settings.spec`` names the class. If ``model`` is None, it is the service's folder."""

    service: str
    token: str = field(repr=False)
    settings: EnvironmentConfig
    model: Path | None = None


async def run_environment(options: EnvironmentOptions, ready: Callable[[], None]) -> None:
    """Drives sessions, in a limited process. Raises InvalidValue, Unauthenticated, ServiceUnavailable."""
    settings = options.settings
    is_harness = runs_elsewhere(settings.spec)
    folder = options.model or await _folder_of(options)
    if not folder.is_dir():
        raise InvalidValue("--model", str(folder), "the model's folder on this host, for its tokenizer")
    model = await asyncio.to_thread(served_model, folder)
    async with AsyncExitStack() as stack:
        sessions = await stack.enter_async_context(Sessions(options.service, options.token))
        ends: asyncio.Task[None] | None = None
        episode: Any
        described = one_line
        if is_harness:
            limits = UserLimits(settings.memory_mb, settings.open_files, settings.processes, section="environment")
            guard = Guard(limits, settings.timeout_s)
            guard.begin()
            described = guard.described
            ticking = asyncio.create_task(_tick(guard))
            stack.callback(ticking.cancel)
            tokens = context_tokens(folder) or 0
            harness = await stack.enter_async_context(harness_episodes(settings, folder, model, tokens))
            episode, ends = harness.run, harness.bridge.gone
        else:
            starting, calls, processes = asyncio.Semaphore(settings.starting), Calls(), Processes(settings)
            stack.push_async_callback(processes.stop)
            await processes.shared()  # loads the class
            pool = WarmPool(processes.make, settings.warm, starting, settings.timeout_s, calls)
            context, verdicts = (
                (await until_answered(sessions.describe, RECONNECT_S)).max_model_len_tokens,
                VerdictCache(settings.verdicts),
            )
            episodes = Episodes(
                processes.make, model, settings.timeout_s, starting, pool, verdicts, calls, settings.turns,
                processes.alone, context,
            )  # fmt: skip
            episode = episodes.run
            await stack.enter_async_context(pool.filling())
        ready()
        attend: Any = sessions.attend
        attending = Attending(episode, settings.at_once, described)
        await _unless(ends, attending.run(lambda: attend(settings.spec)))


async def _unless(ends: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work``. Raises Failed if the process that it needs ends first."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({working} if ends is None else {working, ends}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            end_descendants()  # programs of its harnesses
            raise EnvironmentFailed("the process of verifiers has ended")
        await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _tick(guard: Guard) -> None:
    while True:
        guard.tick()
        await asyncio.sleep(TICK_S)


async def _folder_of(options: EnvironmentOptions) -> Path:
    async with Operator(options.service, options.token) as operator:
        return Path((await operator.status()).model)
