"""Samples under way, and those that a client has yet to fetch. A request that comes again gets its first one."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from dora.agents.front.errors import RETRY_AFTER_S
from dora.agents.front.gateway import FrontLimits
from dora.agents.front.turns import RunningTurn
from dora.errors import Conflict, DoraError, LimitExceeded
from dora.rpc.errors import ServiceUnavailable

log = logging.getLogger("dora.front")

SWEEP_S: Final = 5.0
FINISH_REASONS: Final = ("stop", "length")
NO_ROOM: Final = "branches"  # the field of a refusal that waiting does not help
Begin = Callable[[], Awaitable[list[RunningTurn]]]


@dataclass(slots=True, eq=False)
class Future:
    """One sample. ``turns`` is empty until the window has admitted it; ``waits`` says why it has not."""

    name: str
    holder: str  # whose it is
    digest: bytes
    used_s: float  # when its client has last asked for it
    scored: int = 0  # last tokens of the prompt whose logprobs it has
    turns: Sequence[RunningTurn] = ()
    waits: str = ""
    error: DoraError | None = None
    is_fetched: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def ended(self, most_s: float) -> bool:
        """Waits for the end, but no longer than this. Returns whether it has come."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.has_ended.wait(), most_s)
        return self.has_ended.is_set()

    def cancel(self) -> None:
        """Gives the sample up. Its group is withdrawn."""
        if self.has_ended.is_set():
            return
        self.error = DoraError("the sample was cancelled")
        self.has_ended.set()  # a task that has not begun sets nothing
        if self.task is not None:
            self.task.cancel()
        for turn in self.turns:
            turn.abort()


class Futures:
    """At most ``limits.futures`` samples. One that its client does not ask for is given up, or forgotten, after
    ``limits.future_s``; a fetched one makes room earlier.
    """

    def __init__(self, limits: FrontLimits) -> None:
        self._limits = limits
        self._futures: dict[str, Future] = {}

    def begin(self, name: str, holder: str, digest: bytes, begin: Begin, *, scored: int = 0) -> Future:
        """Begins a sample, or returns the one of the same request. ``scored`` is the future's. Raises Conflict for a
        name that another request has, LimitExceeded.
        """
        known = self._futures.get(name)
        if known is not None:
            if (known.holder, known.digest) != (holder, digest):
                why = "has been used for another request"
                raise Conflict("seq_id", int(name.rpartition(".")[2]), "another number for each request", why=why)
            known.used_s = time.monotonic()
            return known
        self._make_room()
        future = self._futures[name] = Future(name, holder, digest, time.monotonic(), scored)
        future.task = asyncio.create_task(_sample(future, begin))
        return future

    def find(self, name: str, holder: str) -> Future | None:
        future = self._futures.get(name)
        if future is None or future.holder != holder:
            return None
        future.used_s = time.monotonic()
        return future

    def __contains__(self, name: str) -> bool:
        return name in self._futures

    def finish(self, session_id: str, holder: str) -> None:
        """Gives up what a client's session has under way."""
        for future in self._futures.values():
            if future.holder == holder and future.name.startswith(f"{session_id}."):
                future.cancel()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        oldest_s = time.monotonic() - self._limits.future_s
        for future in [each for each in self._futures.values() if each.used_s < oldest_s]:
            if not future.has_ended.is_set():
                log.info("%s: given up, as no client has asked for it for %g s", future.name, self._limits.future_s)
            future.cancel()
            del self._futures[future.name]

    async def stop(self) -> None:
        tasks = [future.task for future in self._futures.values() if future.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_room(self) -> None:
        if len(self._futures) < self._limits.futures:
            return
        fetched = next((future for future in self._futures.values() if future.is_fetched), None)
        if fetched is None:
            raise LimitExceeded(
                "samples", len(self._futures), f"at most {self._limits.futures} that are not yet fetched"
            )
        del self._futures[fetched.name]


async def _sample(future: Future, begin: Begin) -> None:
    try:
        while not future.turns:
            try:
                future.turns = await begin()
            except (LimitExceeded, ServiceUnavailable) as error:
                if error.field == NO_ROOM:
                    raise
                future.waits = str(error)
                await asyncio.sleep(RETRY_AFTER_S)
        future.waits = ""
        for turn in future.turns:
            await turn.ended()
    except DoraError as error:
        future.error = future.error or error
    finally:
        if future.error is None and not all(turn.finish_reason in FINISH_REASONS for turn in future.turns):
            future.error = DoraError("the sample was broken off")
        future.has_ended.set()
