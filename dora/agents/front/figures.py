"""A front's counters, and its page for Prometheus. Labels have bounded values: routes, statuses and reasons."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector

from dora.agents.chat.tree import BREAKS
from dora.agents.front.errors import CLIENT_LEFT, KINDS
from dora.metrics.declaration import DeclaredMetric, families
from dora.metrics.distribution import LONG_BOUNDS_S, Distribution
from dora.metrics.text import text_of

OTHER: Final = "other"  # of requests to no route
FIRST_TOKEN: Final = Distribution(
    "dora_front_first_token_seconds", "Time from a request to the first token of its turn.", LONG_BOUNDS_S
)
REQUEST: Final = Distribution("dora_front_request_seconds", "Time of a request until its last byte.", LONG_BOUNDS_S)
DISTRIBUTIONS: Final = (FIRST_TOKEN, REQUEST)


class Figures:
    """The counts of one front since its start. Belongs to the event loop."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by route and status
        self.refused: Counter[str] = Counter(dict.fromkeys(KINDS, 0))  # by the error's type
        self.received_bytes = 0
        self.sent_bytes = 0
        self.streams = 0
        self._registry = CollectorRegistry()
        self._first_token = FIRST_TOKEN.histogram(self._registry)
        self._request = REQUEST.histogram(self._registry)
        self._process = ProcessCollector(registry=None)

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    def until_first_token(self) -> Callable[[], None]:
        """Begins a request's time to the first token of each of its turns. The result ends it for one."""
        return partial(self._noted, time.monotonic())

    def _noted(self, began_s: float) -> None:
        self._first_token.observe(time.monotonic() - began_s)

    @contextmanager
    def request(self, request: web.Request) -> Iterator[Callable[[int], None]]:
        """Counts a request. The yielded function takes its status."""
        resource, began_s, statuses = request.match_info.route.resource, time.monotonic(), [CLIENT_LEFT]
        try:
            yield statuses.append
        except asyncio.CancelledError:
            raise
        except Exception:
            statuses.append(500)
            raise
        finally:
            self.requests[resource.canonical if resource is not None else OTHER, str(statuses[-1])] += 1
            self._request.observe(time.monotonic() - began_s)

    async def page(self, prefix_breaks: Counter[str], requests: int, sessions: int) -> bytes:
        """Returns the page for Prometheus, with ``requests`` in flight and open ``sessions``."""
        found = [*families(FRONT, Readings(self, prefix_breaks, requests, sessions))]
        return await asyncio.to_thread(text_of, found, (self._registry, self._process))


@dataclass(frozen=True, slots=True)
class Readings:
    figures: Figures
    prefix_breaks: Counter[str]
    requests: int
    sessions: int


Metric: TypeAlias = DeclaredMetric[Readings]


def _labelled(counted: Counter[str]) -> dict[tuple[str, ...], float]:
    return {(name,): float(count) for name, count in counted.items()}


FRONT: Final = (
    Metric(
        "dora_front_requests_total",
        f"Requests by route and status; {CLIENT_LEFT}: the client has left.",
        lambda seen: {key: float(count) for key, count in seen.figures.requests.items()},
        ("route", "status"),
    ),
    Metric("dora_front_requests_open", "Requests in flight.", lambda seen: seen.requests),
    Metric("dora_front_streams_open", "Replies that are being streamed.", lambda seen: seen.figures.streams),
    Metric("dora_front_sessions_open", "Sessions that agents have open.", lambda seen: seen.sessions),
    Metric(
        "dora_front_prefix_breaks_total",
        "Histories that a session could not continue and prefilled again, by reason.",
        lambda seen: {(reason,): float(seen.prefix_breaks[reason]) for reason in BREAKS},
        ("reason",),
    ),
    Metric(
        "dora_front_refused_total",
        "Refused requests, by the type of their error.",
        lambda seen: _labelled(seen.figures.refused),
        ("type",),
    ),
    Metric("dora_front_received_bytes_total", "Bytes of bodies.", lambda seen: seen.figures.received_bytes),
    Metric("dora_front_sent_bytes_total", "Bytes of replies.", lambda seen: seen.figures.sent_bytes),
)
