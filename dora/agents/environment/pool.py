"""Environments that are made and prepared before a session needs them, such as a sandbox that has booted."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from dora.agents.environment.calls import Calls
from dora.agents.environment.protocol import Environment
from dora.agents.environment.spec import one_line

log = logging.getLogger("dora.environment")

CLOSE_S: Final = 10.0
AGAIN_S: Final = 5.0  # after a preparation that failed


class WarmPool:
    """``size`` environments that wait for a session; a taken one is replaced by another.

    ``starting`` may start up at once, with the sessions' own. A preparation that fails or takes longer than
    ``timeout_s`` is begun again after a pause, and no session notices.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        size: int,
        starting: asyncio.Semaphore,
        timeout_s: float,
        calls: Calls,
        again_s: float = AGAIN_S,
    ) -> None:
        self._make = make
        self._starting = starting
        self._timeout_s = timeout_s
        self._calls = calls
        self._again_s = again_s
        self._size = size
        self._missing = asyncio.Semaphore(size)
        self._ready: deque[Environment] = deque()

    @property
    def ready(self) -> int:
        return len(self._ready)

    def take(self) -> Environment | None:
        """Returns a prepared environment; None if none is ready. One whose process has ended is replaced."""
        while self._ready:
            self._missing.release()
            environment = self._ready.popleft()
            if not getattr(environment, "is_lost", False):
                return environment
        return None

    @asynccontextmanager
    async def filling(self) -> AsyncIterator[None]:
        """Keeps the pool full within the block, and closes what is left in it at the end."""
        fillers = [asyncio.create_task(self._fill()) for _ in range(self._size)]
        try:
            yield
        finally:
            for each in fillers:
                each.cancel()
            await asyncio.gather(*fillers, return_exceptions=True)
            await asyncio.gather(*(closed(each, self._calls) for each in self._ready))
            self._ready.clear()

    async def _fill(self) -> None:
        while True:
            await self._missing.acquire()
            async with self._starting:
                environment = await self._prepared()
            if environment is not None:
                self._ready.append(environment)
                continue
            await asyncio.sleep(self._again_s)
            self._missing.release()

    async def _prepared(self) -> Environment | None:
        made: list[Environment] = []

        async def start() -> None:
            made.append(self._make())
            await prepare(made[0])

        try:
            await self._calls.run(start(), self._timeout_s)
        except Exception as error:  # of the user's class
            log.warning("an environment could not be prepared: %s", one_line(error))
        except asyncio.CancelledError:
            for each in made:
                await closed(each, self._calls)
            raise
        else:
            return made[0]
        for each in made:
            await closed(each, self._calls)
        return None


async def prepare(environment: Environment) -> None:
    call = getattr(environment, "prepare", None)
    if call is not None:
        await call()


async def closed(environment: Any, calls: Calls) -> None:
    """Closes an environment, if it can be closed. Its session is over: an error changes nothing."""
    close = getattr(environment, "close", None)
    if close is not None:
        with suppress(Exception):
            await calls.run(close(), CLOSE_S)
