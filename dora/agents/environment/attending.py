"""The sessions of one process: taken from a service, a bounded number at once, and kept while the service restarts."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, Protocol

from dora.agents.environment.calls import Ended, Fault
from dora.agents.environment.episode import RECONNECT_S, Driven
from dora.agents.environment.spec import one_line
from dora.client.connection import Patience
from dora.client.sessions import REASON_MAX
from dora.errors import Conflict, NotFound
from dora.rpc.errors import ServiceUnavailable

log = logging.getLogger("dora.environment")

WAITS_FOR_SERVICE_S: Final = RECONNECT_S


class Failing(Driven, Protocol):
    """A session that may be given up."""

    async def fail(self, reason: str, fault: Fault = "session") -> str: ...


class Attending:
    """Runs ``episode`` for each session, ``at_once`` at most. ``described`` states an error of the episode in one line.

    A session that is offered again, since its connection was lost, goes on with the environment that it has.
    """

    def __init__(
        self,
        episode: Callable[[Failing], Awaitable[None]],
        at_once: int,
        described: Callable[[BaseException], str] = one_line,
    ) -> None:
        self._episode = episode
        self._described = described
        self._room = asyncio.Semaphore(at_once)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, attend: Callable[[], AsyncGenerator[Failing]]) -> None:
        """Attends until stream and sessions have ended. Raises ServiceUnavailable if the service is gone for long."""
        patience = Patience(WAITS_FOR_SERVICE_S)
        try:
            while True:
                try:
                    async with aclosing(attend()) as sessions:
                        async for session in sessions:
                            patience.progress()
                            await self._begin(session)
                    break
                except ServiceUnavailable as error:
                    await patience.wait(error)
            await asyncio.gather(*self._running.values())
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _begin(self, session: Failing) -> None:
        if session.session_id in self._running:
            return
        await self._room.acquire()
        task = asyncio.create_task(self._driven(session))
        self._running[session.session_id] = task
        task.add_done_callback(lambda _: self._over(session.session_id))

    def _over(self, session_id: str) -> None:
        del self._running[session_id]
        self._room.release()

    async def _driven(self, session: Failing) -> None:
        try:
            await self._episode(session)
        except ServiceUnavailable as error:
            log.warning("%s: %s", session.session_id, error)
        except Exception as error:  # of the user's class, or of a session that is over
            reason = self._described(error)[:REASON_MAX]
            try:  # the service logs it
                await session.fail(reason, error.fault if isinstance(error, Ended) else "session")
            except (NotFound, Conflict, ServiceUnavailable):
                log.warning("%s: %s", session.session_id, reason)
