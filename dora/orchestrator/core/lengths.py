"""Predicted response lengths: running means by task. The seam for better predictors (issue: length prediction)."""

import numpy as np

from dora.orchestrator.core.table import Column

TASKS_MAX = 65536  # the task first seen is forgotten beyond that: task ids are the user's


class LengthMeans:
    """Mean response length of each task, from finished responses; before the first, half of ``max_tokens``."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._mean: dict[str, float] = {}

    def observe(self, task_id: str, tokens: int) -> None:
        if task_id not in self._count and len(self._count) >= TASKS_MAX:
            oldest = next(iter(self._count))
            del self._count[oldest], self._mean[oldest]
        count = self._count.get(task_id, 0) + 1
        mean = self._mean.get(task_id, 0.0)
        self._count[task_id], self._mean[task_id] = count, mean + (tokens - mean) / count

    def mean_tokens(self, task_id: str, max_tokens: int) -> float:
        return min(self._mean.get(task_id, max_tokens / 2), float(max_tokens))


def remaining_tokens(mean: Column, tokens: Column, max_tokens: Column) -> Column:
    """Expected tokens still to come: what the mean leaves, yet never less than half a mean (long ones stay long)."""
    return np.minimum(max_tokens - tokens, np.maximum(mean - tokens, 0.5 * mean))
