"""Mixtures of experts: the imbalance of random choices, and how their cost is fitted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, inf, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np

from dora.core.forecast.cost import CostModel, read_share
from dora.data.engine_samples import Experts
from dora.lab.planning.least_squares import Matrix, non_negative_least_squares

ROUNDING: Final = 1e-12  # smaller improvements of a loss are ignored
FRACTIONS: Final = 17  # tried between one expert and all, evenly spaced by ratio
GOLDEN: Final = (sqrt(5.0) - 1.0) / 2.0
PRECISION: Final = 1e-5  # relative, of a fraction
CURVE_TERMS: Final = 3  # k2, k3 and k4: the terms of a dense model's step that depend on the number of requests


def fullest_rank(ranks: int, experts_per_token: float) -> float:
    """The excess of the fullest of ``ranks`` over the mean, as a share, if a token chooses ``experts_per_token``.

    For ``n`` tokens it is this over sqrt(n), as in ``CostModel.imbalance``. Each rank gets ``m = n k / ranks`` of the
    choices on average. If choices are even and independent, the standard deviation is nearly sqrt(m); the mean of the
    largest of that many normal deviations is near the quantile of Blom (Statistical Estimates and Transformed
    Beta-Variables, 1958): 1.43 of 8, 2.07 of 32. (The limit for many ranks, sqrt(2 ln ranks), is 2.04 and 2.63, far too
    much for so few.) 0 for one rank, and for a dense model, whose tokens choose nothing.
    """
    if ranks < 2 or not experts_per_token:
        return 0.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return largest * sqrt(ranks / experts_per_token)


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    running: Matrix
    kv: Matrix
    times_s: Matrix

    def loss(self, cost: CostModel) -> float:
        """The squared relative error of ``cost``, summed over the steps."""
        read_s = cost.weights_s * read_share(cost.expert_fraction, cost.shared_fraction, self.running)
        compute_s = cost.request_s * self.running * (1.0 + cost.imbalance / np.sqrt(self.running))
        steps_s = cost.kv_token_s * self.kv + np.maximum(read_s, compute_s) + cost.step_s
        return float(np.square(steps_s / self.times_s - 1.0).sum())


def fit_mixture(steps: DecodeSteps, experts: Experts, dense: CostModel) -> CostModel:
    """Adds to ``dense`` an ``expert_fraction``, an ``imbalance`` or both, if the steps support them.

    Each of the two must at least halve the squared error that remains without it, and the sampled numbers of requests
    must outnumber the terms that depend on them. Both are limited: a token reads at least one expert, and no rank is
    fuller than with one expert per rank. Step times cannot separate the weights that every token reads from ``k4``,
    which includes them: ``shared_fraction`` stays 0.
    """
    even = _best(steps, np.ones(1), 0.0)  # its kink is exact, that of ``dense`` is limited by its search grid
    best, least = dense, min(steps.loss(dense), steps.loss(even)) + ROUNDING
    sizes = len(np.unique(steps.running))
    for fractions, most in _searches(experts):
        terms = (len(fractions) > 1) + (most > 0.0)
        if sizes <= CURVE_TERMS + terms:
            continue
        found = _best(steps, fractions, most)
        loss = (steps.loss(found) + ROUNDING) * 2.0**terms
        if loss < least:
            best, least = found, loss
    return best


def _searches(experts: Experts) -> Iterator[tuple[Matrix, float]]:
    fractions = np.geomspace(1.0 / experts.total, 1.0, FRACTIONS)
    most = fullest_rank(experts.total, experts.per_token)
    yield fractions, 0.0
    yield np.ones(1), most
    yield fractions, most


def _best(steps: DecodeSteps, fractions: Matrix, most: float) -> CostModel:
    """The model of least loss over the whole range of ``fractions``, by golden section near the best one tried."""

    def at(log_fraction: float) -> tuple[float, CostModel]:
        cost = _with_fraction(steps, exp(log_fraction), most)
        return steps.loss(cost), cost

    places = np.log(fractions).tolist()
    tried = [at(place) for place in places]
    nearest = min(range(len(tried)), key=lambda index: tried[index][0])
    low, high = places[max(nearest - 1, 0)], places[min(nearest + 1, len(places) - 1)]
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    below, above = at(left), at(right)
    while high - low > PRECISION:
        tried += [below, above]
        if below[0] <= above[0]:
            high, right, above = right, left, below
            left = high - GOLDEN * (high - low)
            below = at(left)
        else:
            low, left, below = left, right, above
            right = low + GOLDEN * (high - low)
            above = at(right)
    return min(tried, key=lambda pair: pair[0])[1]


def _with_fraction(steps: DecodeSteps, fraction: float, most: float) -> CostModel:
    """Finds the other coefficients of least loss. These are linear, given how many requests are bound by weights."""
    running, relative = steps.running, 1.0 / steps.times_s[:, None]
    sizes = np.unique(running).tolist()
    best, least = CostModel(0.0, 0.0, 0.0, 0.0), inf
    for bound in (0.0, sizes[-1], *sizes[:-1]):  # for ties, the simplest first: all is read, or all is computed
        reads = running <= bound
        read = np.where(reads, read_share(fraction, 0.0, running), 0.0)
        even, uneven = np.where(reads, 0.0, running), np.where(reads, 0.0, running + most * np.sqrt(running))
        columns = [steps.kv, read, even, uneven, np.ones_like(running)]
        weighted, target = np.stack(columns, axis=1) * relative, np.ones_like(running)
        solution = np.linalg.lstsq(weighted, target, rcond=None)[0]
        if solution.min() < 0.0:  # rare: the next line takes 31 times as long
            solution, _ = non_negative_least_squares(weighted, target)
        k1, k2, k3_even, k3_uneven, k4 = solution.tolist()
        k3 = k3_even + k3_uneven
        cost = CostModel(k1, k2, k3, k4)
        cost = replace(cost, expert_fraction=fraction if k2 else 1.0, imbalance=most * k3_uneven / k3 if k3 else 0.0)
        if (loss := steps.loss(cost)) < least - ROUNDING:
            best, least = cost, loss
    return best
