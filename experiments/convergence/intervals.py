"""Means over seeds with 95% intervals, and when a curve reaches a level. All pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

# Student's t, two-sided 95%, by degrees of freedom; above the last one the normal distribution's is used.
T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL_95: Final = 1.960


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with half the width of its 95% interval. ``half`` None: one value alone has no interval."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


def estimate(values: Sequence[float]) -> Estimate | None:
    """None of nothing. Values are taken as normal: with few seeds the interval is wide, as it should be."""
    count = len(values)
    if not count:
        return None
    if count == 1:
        return Estimate(values[0], None, 1)
    quantile = T_95[count - 2] if count - 2 < len(T_95) else NORMAL_95
    return Estimate(fmean(values), quantile * stdev(values) / math.sqrt(count), count)


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate | None:
    """The geometric mean of ``above[i] / below[i]``; ``half`` is of the wider side. Pairs with a 0 do not count."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True) if a > 0.0 and b > 0.0]
    found = estimate(logs)
    if found is None:
        return None
    mean = math.exp(found.mean)
    return Estimate(mean, None if found.half is None else mean * (math.exp(found.half) - 1), found.count)


def running_mean(values: Sequence[float], width: int, weights: Sequence[float] | None = None) -> list[float]:
    """Returns the mean of the last ``width`` values at each; of fewer at the beginning."""
    weights = [1.0] * len(values) if weights is None else weights
    means = []
    for end in range(1, len(values) + 1):
        part = slice(max(0, end - width), end)
        total = sum(weights[part])
        means.append(sum(v * w for v, w in zip(values[part], weights[part], strict=True)) / total if total else 0.0)
    return means


def end_mean(values: Sequence[float]) -> float:
    """The mean of the last quarter."""
    return fmean(values[-max(1, len(values) // 4) :])


def mean(values: Iterable[float]) -> float:
    """Without NaN: a step without a learning signal has no ratios. 0 of nothing."""
    found = [each for each in values if each == each]
    return fmean(found) if found else 0.0


def first_at(values: Sequence[float], level: float) -> int | None:
    """The first index whose value is ``level`` or more; None: there is none."""
    return next((index for index, value in enumerate(values) if value >= level), None)
