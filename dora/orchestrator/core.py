"""The core of a running service: events in, commands carried out. It makes no decision of its own.

    gRPC, timers ──▶ post(event) ──▶ machine.handle ──▶ commands ──▶ executor ──▶ handlers of prompts, workers, ...
                      ▲   │                                              │                   │
                      │   └──▶ journal ◀─────────────────────────────────┘                   │
                      └───────────────────────── one outcome event each ◀────────────────────┘

``post`` runs in the event loop and never waits, so the response buffer and the core always agree.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.state import State
from dora.errors import InvalidValue
from dora.journal import records
from dora.orchestrator.executor import Executor
from dora.orchestrator.rollout import distributions as of
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.system.awake import awake_s

log = logging.getLogger("dora.service")


class Traces(Protocol):
    """Follows a service's events for its traces (``tracing/spans.py``)."""

    def came(self, event: on.Event, commands: Sequence[do.Command]) -> None:
        """Follows an event that the core has handled, and its commands."""

    def submitted(self, prompt_ids: Sequence[str], trace: Mapping[str, str]) -> None:
        """Notes the span of the client that submitted these prompts. ``trace`` has W3C's fields."""

    def published(self, step: int, version: int, took_s: float) -> None:
        """Enters the publication that a step's commit has just made."""


@dataclass(eq=False, repr=False)
class ServiceCore:
    """Runs the machine, and the tasks in the background. ``executor`` gets its handlers after this is built."""

    machine: Machine
    executor: Executor
    _journal: Journal
    _telemetry: Telemetry
    _buffer: ResponseBuffer

    def __post_init__(self) -> None:
        self.traces: Traces | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._posting = False
        if self._journal.log is not None:
            self._journal.log.failed.add_done_callback(self._ended)
            self._journal.log.synced = functools.partial(self._telemetry.observe, of.SYNC)

    @property
    def state(self) -> State:
        return self.machine.state

    def now(self) -> float:
        return time.time()

    def post(self, event: on.Event, accepted: Callable[[], records.LogRecord | None] | None = None) -> None:
        """Hands an event to the core and carries out its commands. If the core refuses the event, this raises and
        changes nothing.

        ``accepted`` is called once the core has accepted the event, before its commands: it changes what the shell has
        of the matter, and returns the log record, if there is one. Any other exception leaves an event half done: a
        bug, which ends the service. The journal has the event before the core does, so a replay meets the same refusal
        or the same bug.
        """
        assert not self._posting, "an event was posted while another is handled; use soon"
        self._posting, handled = True, False
        try:
            now_s = awake_s()
            self._journal.event(event, now_s)
            self._telemetry.comes(event, self.state, now_s)
            commands = self.machine.handle(event, now_s)
            handled = True
            if accepted is not None and (record := accepted()) is not None:
                self._journal.note(record)
            for command in commands:
                self.executor.carry_out(command)
            if not commands and isinstance(event, on.TokensReported | on.CommandDone) and self.traces is None:
                return  # no step, window or trainer changes
            groups = self.state.window.groups_per_step
            self._telemetry.step_times.came(event, commands, self._buffer, groups, now_s, time.time())
            self._journal.window(self.state)
            self._journal.trainer(self.state)
            if self.traces is not None:
                self.traces.came(event, commands)
        except Exception as error:
            if handled or not isinstance(error, InvalidValue):
                self._fail(error)
            raise
        finally:
            self._posting = False

    def soon(self, action: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(action)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine in the background. A failure there is a bug and ends the service."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancels background work."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, work: asyncio.Future[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.critical("the service failed: %r", error, exc_info=error)
        if not self.failed.done():
            self.failed.set_exception(error)

    @functools.cached_property
    def failed(self) -> asyncio.Future[None]:
        """Resolves with the bug that ends the service."""
        return asyncio.get_running_loop().create_future()
