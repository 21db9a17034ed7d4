"""The duration of steps, and the share of it in which the trainer waits."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final, Self

CLEAR: Final = 2.0  # standard errors, for many steps


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two sums over steps, with its standard error."""

    mean: float
    error: float  # 0 if all steps are equal
    steps: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> Self:
        """From each step's numerator and denominator."""
        steps = list(pairs)
        above, below = (sum(parts) for parts in zip(*steps, strict=True))
        mean = above / below
        residual = sum((one - mean * other) ** 2 for one, other in steps)
        return cls(mean, sqrt(residual * len(steps) / max(1, len(steps) - 1)) / below, len(steps))

    def over(self, other: "Ratio") -> "Ratio":
        """Returns the quotient of two independent ratios."""
        mean = self.mean / other.mean
        error = mean * sqrt((self.error / self.mean) ** 2 + (other.error / other.mean) ** 2)
        return Ratio(mean, error, min(self.steps, other.steps))


@dataclass(frozen=True, slots=True)
class Pace:
    """The duration of some steps of one window.

    The training time is no measure of two windows' steps: training is slower beside generation if both share cores, and
    shorter if groups with equal rewards are left out. So only the wait is a share of it.
    """

    trained: Ratio  # duration over training time, at least 1
    step_s: Ratio  # seconds a step
    token_s: Ratio  # seconds a token of the step's groups

    @classmethod
    def of(cls, steps: Iterable[tuple[float, float, float]]) -> Self:
        """From duration, training time and tokens of each step, all above 0."""
        seen = list(steps)
        return cls(
            Ratio.of((took_s, trained_s) for took_s, trained_s, _ in seen),
            Ratio.of((took_s, 1.0) for took_s, _, _ in seen),
            Ratio.of((took_s, tokens) for took_s, _, tokens in seen),
        )

    @classmethod
    def restored(cls, values: Iterable[Iterable[Any]]) -> Self:
        """From ``dataclasses.astuple``, as JSON has it."""
        return cls(*(Ratio(*each) for each in values))

    @property
    def waited(self) -> float:
        """Share of the steps' time without training."""
        return 1.0 - 1.0 / self.trained.mean

    @property
    def steps(self) -> int:
        return self.step_s.steps

    def over(self, other: "Pace") -> Ratio:
        """Returns the duration of these steps relative to that of others: by the step or by the token, whichever varies
        less. Tokens tell the amount of work if lengths differ; steps differ least if the longest response limits them.
        """
        return min(
            self.step_s.over(other.step_s), self.token_s.over(other.token_s), key=lambda each: each.error / each.mean
        )


def clear(steps: int) -> float:
    """Standard errors that make a difference clear, for errors estimated from ``steps`` steps (Student's t)."""
    return CLEAR * (1.0 + 2.0 / max(1, steps - 1))
