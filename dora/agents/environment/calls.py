"""Calls of a user's environment, each bounded in time. A call that does not end is left behind, and stalls nobody."""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar

from dora.errors import DoraError

log = logging.getLogger("dora.environment")

Result = TypeVar("Result")
Fault = Literal["session", "another", "prompt"]
GRACE_S: Final = 1.0  # for a cancelled call to end
STUCK_MAX: Final = 64  # calls left behind in one process, which then ends itself and is started again


class EnvironmentFailed(DoraError):
    """A session's environment cannot go on, for a reason in one line."""


class TimeOver(EnvironmentFailed):
    """A call of the environment took longer than it may."""


class Ended(EnvironmentFailed):
    """The process of a session's environment has ended. ``fault`` says whose fault that is."""

    def __init__(self, said: str, fault: Fault) -> None:
        self.fault = fault
        super().__init__(said)


class Calls:
    """Runs calls of environments. ``stuck`` has those that go on although they were cancelled."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._left: set[asyncio.Future[Any]] = set()

    @property
    def stuck(self) -> int:
        return len(self._left)

    async def run(self, call: Awaitable[Result], limit_s: float) -> Result:
        """Awaits a call for ``limit_s`` at most. Raises TimeOver then, and what the call raises."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            await self.end(task)
            raise
        if not task.done():
            await self.end(task)
            raise TimeOver(f"a call took longer than {limit_s:g} s")
        if task.cancelled():
            raise EnvironmentFailed("the environment cancelled its own call")
        return task.result()

    async def end(self, task: asyncio.Future[Any]) -> None:
        """Cancels a call. One that ignores this is left behind."""
        task.cancel()
        await asyncio.wait({task}, timeout=self._grace_s)
        if not task.done():
            log.warning("a call of the environment goes on although it was cancelled: it is left behind")
            self._left.add(task)
            task.add_done_callback(self._ended)
        elif not task.cancelled():
            task.exception()  # it is of no interest, and asyncio would log it

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()


class TimeLeft:
    """The time that the code of one session's environment may take in all. The policy's turns do not count."""

    def __init__(self, limit_s: float, calls: Calls) -> None:
        self._limit_s = limit_s
        self._left_s = limit_s
        self._calls = calls

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began_s = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._left_s -= asyncio.get_running_loop().time() - began_s

    async def run(self, call: Awaitable[Result]) -> Result:
        """Awaits a call of the environment. Raises Failed when the time is over."""
        with self._counted():
            try:
                return await self._calls.run(call, max(self._left_s, 0.0))
            except TimeOver:
                said = f"the environment took longer than environment.timeout_s = {self._limit_s:g}"
                raise EnvironmentFailed(said) from None
