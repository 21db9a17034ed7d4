"""Reattaches workers after a restart: the core is restored only after a wait for them, so that requests stay in place.

Workers and pools of an earlier incarnation connect as soon as they reach the service. The first event of the new core
names all that have connected by then, with the requests that they hold; later ones join with what they still hold.
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
    """Waits for the ``expected`` workers and pools (ids), and accepts others."""

    def __init__(self, expected: Iterable[str]) -> None:
        self._missing = set(expected)
        self._came: dict[str, Callable[[], Joined | None]] = {}
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._told: set[str] = set()

    @property
    def is_over(self) -> bool:
        """Returns whether the core is restored and can accept new workers."""
        return self._over.is_set()

    async def over(self) -> None:
        await self._over.wait()

    async def came(self, name: str, joined: Callable[[], Joined | None]) -> bool:
        """Registers a worker or pool; returns once the core is restored, and whether its first event named the worker.

        ``joined`` makes the core's event, or returns None while it cannot.
        """
        self._came[name] = joined
        self._missing.discard(name)
        self._changed.set()
        try:
            await self.over()
        finally:
            self._came.pop(name, None)  # a later process of the same name may have replaced it
        return name in self._told

    async def ended(self, limit_s: float) -> None:
        """Returns once all expected ones have connected, or after the limit."""
        try:
            async with asyncio.timeout(limit_s):
                while self._missing:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("not back after %g s: %s", limit_s, ", ".join(sorted(self._missing)))

    def completed(self, restored: on.Restored) -> on.Restored:
        """Adds the connected workers and pools to the event. Callers of ``came`` continue after it was posted
        (``close``).
        """
        found = {name: joined() for name, joined in self._came.items()}
        events = [event for event in found.values() if event is not None]
        self._told = {name for name, event in found.items() if event is not None}
        workers = tuple(event for event in events if isinstance(event, on.WorkerJoined))
        pools = tuple(event for event in events if isinstance(event, on.PoolJoined))
        running = sum(len(each.requests) for each in workers)
        log.warning("reattached: %d workers with %d requests, %d pools", len(workers), running, len(pools))
        return replace(restored, workers=tuple(without_doubles(workers)), pools=pools)

    def close(self) -> None:
        self._over.set()


def without_doubles(workers: Iterable[on.WorkerJoined]) -> list[on.WorkerJoined]:
    """Keeps each request at the one worker that has most of it, because a handoff was running between two."""
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
