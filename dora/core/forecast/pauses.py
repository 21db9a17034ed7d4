"""Measured pauses of sessions: the time that their tools take between two turns, by task."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Any, Final

TASKS_MAX: Final = 1024  # the first known is forgotten for another
WEIGHT: Final = 0.02  # of one pause in its task's running moments, once there are many
PAUSE_LEAST_S: Final = 1e-3
TTL_FIRST_S: Final = 5.0  # while no pause of the task is known
TTL_SDS: Final = 1.2816  # standard deviations of the logarithm: nine of ten pauses are shorter
TTL_MOST_S: Final = 600.0


@dataclass(slots=True)
class _Task:
    """Running moments of one task: of the logarithm of a pause, of the pause, and of the pauses of a whole session."""

    pauses: int = 0
    log_mean: float = 0.0
    log_square: float = 0.0
    mean_s: float = 0.0
    sessions: int = 0
    pauses_each: float = 0.0


class Pauses:
    """Estimates of pauses. No promise depends on them: they say how long KV stays on a worker, and how much of a
    session's time its tools take.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}

    def observe(self, task_id: str, pause_s: float) -> None:
        """Records the time from the end of a turn until the next was asked."""
        task = self._task(task_id)
        task.pauses += 1
        weight, of_log = max(1.0 / task.pauses, WEIGHT), log(max(pause_s, PAUSE_LEAST_S))
        task.log_mean += weight * (of_log - task.log_mean)
        task.log_square += weight * (of_log * of_log - task.log_square)
        task.mean_s += weight * (pause_s - task.mean_s)

    def ended(self, task_id: str, pauses: int) -> None:
        """Records the number of pauses of a session that has ended."""
        task = self._task(task_id)
        task.sessions += 1
        task.pauses_each += max(1.0 / task.sessions, WEIGHT) * (pauses - task.pauses_each)

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

    def session_s(self, task_id: str) -> float:
        """The time that the tools of one session of this task take in total."""
        task = self._tasks.get(task_id)
        return task.mean_s * task.pauses_each if task is not None else 0.0

    def learnt(self) -> dict[str, list[float]]:
        """The state that survives a crash, as plain values."""
        return {
            name: [task.pauses, task.log_mean, task.log_square, task.mean_s, task.sessions, task.pauses_each]
            for name, task in self._tasks.items()
        }

    def learn_again(self, values: Mapping[str, Any]) -> None:
        """Restores the state from ``learnt``."""
        for name, (pauses, log_mean, log_square, mean_s, sessions, pauses_each) in values.items():
            self._tasks[name] = _Task(int(pauses), log_mean, log_square, mean_s, int(sessions), pauses_each)
