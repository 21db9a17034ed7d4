"""Virtual time: actions in order of time. Ties run in the order in which they were scheduled."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

from dora.lab.sim.ledger import Stalled


class Agenda:
    """The queue of actions. ``after`` and ``at`` schedule an action, and ``run_until`` advances time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heappush(self._entries, (self.now_s + delay_s, self._scheduled, action, arguments))

    def at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedules an action for this time, which must not be past."""
        self._scheduled += 1
        heappush(self._entries, (at_s, self._scheduled, action, arguments))

    def run_until(self, done: Callable[[], bool], limit_s: float = inf) -> None:
        """Runs actions until ``done``. Raises Stalled if time would pass ``limit_s`` first."""
        entries = self._entries
        while not done():
            at_s, _, action, arguments = heappop(entries)
            if at_s > limit_s:
                raise Stalled(f"not done after {limit_s:.0f} s of simulated time")
            self.now_s = at_s
            action(*arguments)


class Links:
    """One outgoing and one incoming link per engine. Copies over the same link wait for each other."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_s: dict[str, float] = {}

    def copy_s(self, source: str, target: str, size_bytes: float, now_s: float) -> float:
        """Seconds until this much data has moved between two engines, after the copies that their links still carry."""
        out, into = f"{source}>", f">{target}"
        begin_s = max(now_s, self._free_s.get(out, 0.0), self._free_s.get(into, 0.0))
        end_s = self._free_s[out] = self._free_s[into] = begin_s + size_bytes / self._bytes_per_s
        return end_s - now_s + self._latency_s
