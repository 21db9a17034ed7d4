"""The duration of steps as a multiple of their training time, which is independent of the amount of training."""

from collections import deque
from dataclasses import dataclass
from math import sqrt
from typing import Final

CLEAR: Final = 2.0  # standard errors, for many steps


@dataclass(frozen=True, slots=True)
class Pace:
    """Duration of steps as a multiple of their training time, at least 1, with its standard error."""

    mean: float
    error: float  # 0 if all steps are equal
    steps: int

    @classmethod
    def of(cls, steps: deque[tuple[float, float]]) -> "Pace":
        """From (duration, training time) of each step: the ratio of the sums, with the error of such a ratio."""
        took_s, trained_s = (sum(parts) for parts in zip(*steps, strict=True))
        mean = took_s / trained_s
        residual = sum((took - mean * trained) ** 2 for took, trained in steps)
        return cls(mean, sqrt(residual * len(steps) / max(1, len(steps) - 1)) / trained_s, len(steps))

    @property
    def waited(self) -> float:
        """Share of the steps' time without training."""
        return 1.0 - 1.0 / self.mean


def clear(steps: int) -> float:
    """Standard errors that make a difference clear, for errors estimated from ``steps`` steps (Student's t)."""
    return CLEAR * (1.0 + 2.0 / max(1, steps - 1))
