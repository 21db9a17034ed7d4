"""The writes to a run's record: in the order in which they were asked for, one at a time, in a thread."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dora.record import CancelledGroup, Recorder
from dora.trajectory import TrajectoryGroup


class RecordQueue:
    """Without a recorder nothing is written. ``spawn`` runs a coroutine as a task; a failed write fails that task."""

    def __init__(
        self, recorder: Recorder | None, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        self._recorder = recorder
        self._spawn = spawn
        self._last: asyncio.Task[None] | None = None

    def delivered(self, group: TrajectoryGroup) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.append, group.trajectories))

    def cancelled(self, group: CancelledGroup) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.append_cancelled, group))

    def published(self, version: int, folder: Path) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.keep_version, version, folder))

    def withdrawn(self, version: int) -> None:
        if self._recorder is not None:
            self._queue(functools.partial(self._recorder.drop_version, version))

    def afterwards(self, action: Callable[[], None]) -> None:
        """Runs ``action`` after the writes asked for so far; at once where there is no record."""
        if self._recorder is not None:
            self._queue(action)
        else:
            action()

    async def written(self) -> None:
        """Waits until all that was asked for is on disk."""
        if self._last is not None:
            await self._last

    def _queue(self, write: Callable[[], Any]) -> None:
        self._last = self._spawn(self._after(self._last, write))

    @staticmethod
    async def _after(before: asyncio.Task[None] | None, write: Callable[[], Any]) -> None:
        if before is not None:
            await before
        await asyncio.to_thread(write)
