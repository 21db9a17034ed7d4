"""Virtual time: what is to happen, in order of time, ties in the order in which they were put down."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

from dora.sim.ledger import Stalled


class Agenda:
    """``after`` and ``at`` put an action down, ``run_until`` lets time pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._scheduled += 1
        heappush(self._entries, (self.now_s + delay_s, self._scheduled, action, arguments))

    def at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """At that very moment, which must not be over."""
        self._scheduled += 1
        heappush(self._entries, (at_s, self._scheduled, action, arguments))

    def run_until(self, done: Callable[[], bool], limit_s: float = inf) -> None:
        """Drives until ``done``; raises Stalled where time goes past ``limit_s`` before."""
        entries = self._entries
        while not done():
            at_s, _, action, arguments = heappop(entries)
            if at_s > limit_s:
                raise Stalled(f"not done after {limit_s:.0f} s of simulated time")
            self.now_s = at_s
            action(*arguments)


class Links:
    """One link out of and one into every engine; copies over the same link wait for each other."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_s: dict[str, float] = {}

    def copy_s(self, source: str, target: str, size_bytes: float, now_s: float) -> float:
        """Seconds until so much has gone from one engine to another, behind what their links still do."""
        out, into = f"{source}>", f">{target}"
        begin_s = max(now_s, self._free_s.get(out, 0.0), self._free_s.get(into, 0.0))
        end_s = self._free_s[out] = self._free_s[into] = begin_s + size_bytes / self._bytes_per_s
        return end_s - now_s + self._latency_s
