"""Runs an environment's process."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dora.client import Operator
from dora.client.sessions import Sessions
from dora.config import EnvironmentConfig
from dora.environment.attending import Attending
from dora.environment.calls import Calls
from dora.environment.episode import Episodes
from dora.environment.guard import Guard
from dora.environment.loading import load_environment
from dora.environment.pool import WarmPool
from dora.environment.verdicts import VerdictCache
from dora.errors import InvalidValue
from dora.front.model import served_model
from dora.rewards.limits import UserLimits

TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class EnvironmentOptions:
    """``settings.spec`` names the class. ``model`` None: the service's folder."""

    service: str
    token: str = field(repr=False)
    settings: EnvironmentConfig
    model: Path | None = None


async def run_environment(options: EnvironmentOptions, ready: Callable[[], None]) -> None:
    """Drives sessions until the service ends, in a process with limits. Raises InvalidValue, Unauthenticated,
    ServiceUnavailable.
    """
    settings = options.settings
    make = load_environment(settings.spec)
    folder = options.model or await _folder_of(options)
    if not folder.is_dir():
        raise InvalidValue("--model", str(folder), "the model's folder on this host, for its tokenizer")
    model = await asyncio.to_thread(served_model, folder)
    limits = UserLimits(settings.memory_mb, settings.open_files, settings.processes, section="environment")
    calls, starting = Calls(), asyncio.Semaphore(settings.starting)
    guard = Guard(limits, settings.timeout_s, calls)
    pool = WarmPool(make, settings.warm, starting, settings.timeout_s, calls)
    verdicts = VerdictCache(settings.verdicts)
    episodes = Episodes(make, model, settings.timeout_s, starting, pool, verdicts, calls)
    attending = Attending(episodes.run, settings.at_once, guard.described)
    guard.begin()
    async with Sessions(options.service, options.token) as sessions, pool.filling():
        ticking = asyncio.create_task(_tick(guard))
        try:
            ready()
            attend: Any = sessions.attend
            await attending.run(lambda: attend(settings.spec))
        finally:
            ticking.cancel()


async def _tick(guard: Guard) -> None:
    while True:
        guard.tick()
        await asyncio.sleep(TICK_S)


async def _folder_of(options: EnvironmentOptions) -> Path:
    async with Operator(options.service, options.token) as operator:
        return Path((await operator.status()).model)
