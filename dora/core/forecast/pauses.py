"""Measured pauses of sessions: the time that their tools take between two turns, by task."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import exp, log, sqrt
from typing import Any, Final

TASKS_MAX: Final = 1024  # the first known is forgotten for another
WEIGHT: Final = 0.02  # of one pause or session in its task's running means, once there are many
PAUSE_LEAST_S: Final = 1e-3
TTL_FIRST_S: Final = 5.0  # while no pause of the task is known
TTL_SDS: Final = 1.2816  # standard deviations of the logarithm: nine of ten pauses are shorter
TTL_MOST_S: Final = 600.0


@dataclass(slots=True)
class _Task:
    pauses: int = 0
    log_mean: float = 0.0  # of the logarithm of a pause
    log_square: float = 0.0
    sessions: int = 0
    paused_s: float = 0.0  # of a whole session
    tokens: float = 0.0  # of its response

    def paused(self, pause_s: float) -> None:
        self.pauses += 1
        weight, of_log = max(1.0 / self.pauses, WEIGHT), log(max(pause_s, PAUSE_LEAST_S))
        self.log_mean += weight * (of_log - self.log_mean)
        self.log_square += weight * (of_log * of_log - self.log_square)

    def ended(self, paused_s: float, tokens: int) -> None:
        self.sessions += 1
        weight = max(1.0 / self.sessions, WEIGHT)
        self.paused_s += weight * (paused_s - self.paused_s)
        self.tokens += weight * (tokens - self.tokens)


class Pauses:
    """Estimates of pauses. No promise depends on them: they say how long KV stays on a worker, and how much of a
    session's time its tools take.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}
        self._all = _Task()

    def observe(self, task_id: str, pause_s: float) -> None:
        """Records the time from the end of a turn until the next was requested."""
        self._task(task_id).paused(pause_s)

    def ended(self, task_id: str, paused_s: float, tokens: int) -> None:
        for task in (self._task(task_id), self._all):
            task.ended(paused_s, tokens)

    def _task(self, task_id: str) -> _Task:
        if task_id not in self._tasks and len(self._tasks) >= TASKS_MAX:
            del self._tasks[next(iter(self._tasks))]
        return self._tasks.setdefault(task_id, _Task())

    def ttl_s(self, task_id: str) -> float:
        """The time after which nine of ten pauses of this task have ended."""
        task = self._tasks.get(task_id)
        if task is None or not task.pauses:
            return TTL_FIRST_S
        sd = sqrt(max(0.0, task.log_square - task.log_mean**2))
        return min(TTL_MOST_S, exp(min(task.log_mean + TTL_SDS * sd, log(TTL_MOST_S))))

    def token_s(self, task_id: str | None = None) -> float:
        """The pauses of a session, of this task if given, for each token of its response, or 0 if unknown."""
        task = self._all if task_id is None else self._tasks.get(task_id, self._all)
        return task.paused_s / task.tokens if task.tokens else 0.0

    def snapshot(self) -> dict[str, Any]:
        """The state that survives a crash, as plain values."""
        return {"all": astuple(self._all), "tasks": {name: astuple(task) for name, task in self._tasks.items()}}

    def restore(self, values: Mapping[str, Any]) -> None:
        self._all = _Task(*values["all"])
        self._tasks = {name: _Task(*task) for name, task in values["tasks"].items()}
