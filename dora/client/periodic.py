"""Evaluates every N-th version on the same prompts while training continues."""

import asyncio
from collections.abc import Callable
from typing import Final

from dora.client.evaluation import Evaluation
from dora.errors import InvalidValue

RUNNING_MAX: Final = 4  # evaluations of one series at the same time: a later version waits for the earliest


class EvaluationSeries:
    """The evaluations of one :meth:`dora.Prompts.every`. ``done`` has those that have ended, by version."""

    def __init__(self, every: int, begin: Callable[[int], Evaluation]) -> None:
        """``begin`` starts the evaluation of a version."""
        if type(every) is not int or every < 1:
            raise InvalidValue("every", every, "a number of steps, at least 1")
        self.done: dict[int, Evaluation] = {}
        self._every = every
        self._begin = begin
        self._begun: set[int] = set()
        self._running: dict[int, asyncio.Task[Evaluation]] = {}

    async def at(self, step: int) -> None:
        """Starts the evaluation of version ``step``, the newest while step ``step`` is trained, if it is the turn of
        that version. Call it once a step. It returns once the service keeps the version for the evaluation.

        Raises as :meth:`dora.Prompts.evaluate`, also for an earlier evaluation of the series that has failed.
        """
        self._collect()
        if step % self._every or step in self._begun:
            return
        while len(self._running) >= RUNNING_MAX:
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            self._collect()
        evaluation = await self._begin(step).begun()
        self._begun.add(step)
        self._running[step] = asyncio.ensure_future(evaluation.whole())

    async def finish(self) -> dict[int, Evaluation]:
        """Waits for all evaluations that have begun. Returns ``done``, by version."""
        while self._running:
            await asyncio.wait(self._running.values())
            self._collect()
        return dict(sorted(self.done.items()))

    def _collect(self) -> None:
        for version in [version for version, task in self._running.items() if task.done()]:
            self.done[version] = self._running.pop(version).result()
