"""Predicted response lengths: running means by task. The seam for better predictors (issue: length prediction)."""

import numpy as np

from dora.orchestrator.core.table import Column


class LengthMeans:
    """Mean response length of each task, from finished responses; before the first, half of ``max_tokens``."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._mean: dict[str, float] = {}

    def observe(self, task_id: str, tokens: int) -> None:
        count = self._count.get(task_id, 0) + 1
        mean = self._mean.get(task_id, 0.0)
        self._count[task_id], self._mean[task_id] = count, mean + (tokens - mean) / count

    def mean_tokens(self, task_id: str, max_tokens: int) -> float:
        return min(self._mean.get(task_id, max_tokens / 2), float(max_tokens))


def remaining_tokens(mean: Column, tokens: Column, max_tokens: Column) -> Column:
    """Expected tokens still to come: what the mean leaves, yet never less than half a mean (long ones stay long)."""
    return np.minimum(max_tokens - tokens, np.maximum(mean - tokens, 0.5 * mean))
