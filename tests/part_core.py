"""The core as the parts of a service use it, for tests of parts alone: events are kept, and nothing decides."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from dora.core import events as on


class PartCore:
    """``rows``: of requests, those of evaluations included."""

    def __init__(self, rows: dict[str, int]) -> None:
        evaluations = SimpleNamespace(row_of=rows)
        self.state: Any = SimpleNamespace(request_row=rows, evaluations=evaluations, pending={}, leased=())
        self.posted: list[on.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    def post(self, event: on.Event) -> None:
        self.posted.append(event)

    def soon(self, action: Callable[[], None]) -> None:
        action()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(coroutine))
        return self.tasks[-1]

    def now(self) -> float:
        return 1.0
