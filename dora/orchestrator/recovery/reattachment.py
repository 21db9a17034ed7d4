"""Who comes back after a restart: awaited for a while before the core is restored, so that requests stay where they
run.

Workers and pools that have outlived the service say hello as soon as they reach it. The first event of the new core
names all that have come by then, each with what it holds; who comes later joins with what it holds still.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from dora.core import events as on

log = logging.getLogger("dora.service")

Joined = on.WorkerJoined | on.PoolJoined


class Reattachment:
    """Of those ``awaited``, by their ids, and of whoever else comes meanwhile."""

    def __init__(self, expected: Iterable[str]) -> None:
        self._missing = set(expected)
        self._came: dict[str, Callable[[], Joined | None]] = {}
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._told: set[str] = set()

    @property
    def is_over(self) -> bool:
        """Whether the core is restored, so that it can be told of whoever comes."""
        return self._over.is_set()

    async def over(self) -> None:
        """Returns once it is."""
        await self._over.wait()

    async def came(self, name: str, joined: Callable[[], Joined | None]) -> bool:
        """A worker or pool has said hello; returns once the roll call is over. Whether the core was told of it then.

        ``joined``: what the core is told; None: not yet.
        """
        self._came[name] = joined
        self._missing.discard(name)
        self._changed.set()
        try:
            await self.over()
        finally:
            self._came.pop(name, None)  # one of its name may have come after it
        return name in self._told

    async def ended(self, limit_s: float) -> None:
        """Returns once all have come, or after so long."""
        try:
            async with asyncio.timeout(limit_s):
                while self._missing:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("not back after %g s: %s", limit_s, ", ".join(sorted(self._missing)))

    def completed(self, restored: on.Restored) -> on.Restored:
        """The event with those that have come. Whoever waits in ``came`` goes on after it was posted (``close``)."""
        found = {name: joined() for name, joined in self._came.items()}
        events = [event for event in found.values() if event is not None]
        self._told = {name for name, event in found.items() if event is not None}
        workers = tuple(event for event in events if isinstance(event, on.WorkerJoined))
        pools = tuple(event for event in events if isinstance(event, on.PoolJoined))
        running = sum(len(each.requests) for each in workers)
        log.warning("back: %d workers with %d requests, %d pools", len(workers), running, len(pools))
        return replace(restored, workers=tuple(without_doubles(workers)), pools=pools)

    def close(self) -> None:
        """It is over, whoever has not come."""
        self._over.set()


def without_doubles(workers: Iterable[on.WorkerJoined]) -> list[on.WorkerJoined]:
    """The same, with each request at one worker: that which has the most of it. A handoff was under way between two."""
    joined = list(workers)
    claims: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, worker in enumerate(joined):
        for request_id, tokens in worker.requests.items():
            claims[request_id].append((tokens, -index))
    for index, worker in enumerate(joined):
        kept = {name: tokens for name, tokens in worker.requests.items() if max(claims[name]) == (tokens, -index)}
        if len(kept) < len(worker.requests):
            joined[index] = replace(worker, requests=kept)
    return joined
