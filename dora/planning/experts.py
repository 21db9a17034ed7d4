"""What is particular to a mixture of experts: how uneven random choices are, and how its cost is fitted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, inf, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np

from dora.core.forecast.cost import CostModel, read_share
from dora.planning.least_squares import Matrix, non_negative_least_squares
from dora.planning.samples import Experts

ROUNDING: Final = 1e-12  # of a loss: what is gained below it is none
FRACTIONS: Final = 17  # tried between one expert and all, evenly spaced by ratio
GOLDEN: Final = (sqrt(5.0) - 1.0) / 2.0
PRECISION: Final = 1e-5  # of a fraction, relative
CURVE_TERMS: Final = 3  # k2, k3 and k4: what a dense model's step says of the number of requests


def fullest_rank(ranks: int, experts_per_token: float) -> float:
    """How far the fullest of ``ranks`` is above the mean, a share, when a token chooses ``experts_per_token`` experts.

    For ``n`` tokens it is this over sqrt(n), as ``CostModel.imbalance`` has it. Each rank gets ``m = n k / ranks`` of
    the choices on average, with a standard deviation of nearly sqrt(m) where they are even and independent; the
    largest of that many normal deviations is on average near the quantile of Blom (Statistical Estimates and
    Transformed Beta-Variables, 1958): 1.43 of 8, 2.07 of 32. (The limit for many ranks, sqrt(2 ln ranks), is 2.04 and
    2.63, far too much for so few.) 0 for one rank, and for a dense model, whose tokens choose nothing.
    """
    if ranks < 2 or not experts_per_token:
        return 0.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return largest * sqrt(ranks / experts_per_token)


@dataclass(frozen=True, slots=True)
class Steps:
    """Timed decode steps, one entry a step."""

    running: Matrix
    kv: Matrix
    times_s: Matrix

    def loss(self, cost: CostModel) -> float:
        """Squared relative error of ``cost``, summed over the steps."""
        read_s = cost.weights_s * read_share(cost.expert_fraction, cost.shared_fraction, self.running)
        compute_s = cost.request_s * self.running * (1.0 + cost.imbalance / np.sqrt(self.running))
        steps_s = cost.kv_token_s * self.kv + np.maximum(read_s, compute_s) + cost.step_s
        return float(np.square(steps_s / self.times_s - 1.0).sum())


def fit_mixture(steps: Steps, experts: Experts, dense: CostModel) -> CostModel:
    """``dense``, or the same with an ``expert_fraction``, an ``imbalance`` or both, where the steps support them.

    Each of the two must at least halve the squared error that is left without it, and there must be more sampled
    numbers of requests than terms that depend on them. A token reads one expert at least, and no rank is fuller than
    where each expert has a rank of its own: so neither can be wild. What every token reads cannot be told from ``k4``
    by step times, and is part of it: ``shared_fraction`` stays 0.
    """
    even = _best(steps, np.ones(1), 0.0)  # its kink is found exactly, that of ``dense`` as near as it was looked for
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
    """Fractions to be tried and the largest imbalance: of the one term, the other, and both."""
    fractions = np.geomspace(1.0 / experts.total, 1.0, FRACTIONS)
    most = fullest_rank(experts.total, experts.per_token)
    yield fractions, 0.0
    yield np.ones(1), most
    yield fractions, most


def _best(steps: Steps, fractions: Matrix, most: float) -> CostModel:
    """Of least loss over all fractions from the first to the last: near the best one tried, by golden section."""

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


def _with_fraction(steps: Steps, fraction: float, most: float) -> CostModel:
    """The other coefficients of least loss: linear, once it is known up to how many requests weights bound a step."""
    running, relative = steps.running, 1.0 / steps.times_s[:, None]
    sizes = np.unique(running).tolist()
    best, least = CostModel(0.0, 0.0, 0.0, 0.0), inf
    for bound in (0.0, sizes[-1], *sizes[:-1]):  # of equals the simplest, where all is read or all computed
        reads = running <= bound
        read = np.where(reads, read_share(fraction, 0.0, running), 0.0)
        even, uneven = np.where(reads, 0.0, running), np.where(reads, 0.0, running + most * np.sqrt(running))
        columns = [steps.kv, read, even, uneven, np.ones_like(running)]
        weighted, target = np.stack(columns, axis=1) * relative, np.ones_like(running)
        solution = np.linalg.lstsq(weighted, target, rcond=None)[0]
        if solution.min() < 0.0:  # seldom: what follows takes 31 times as long
            solution, _ = non_negative_least_squares(weighted, target)
        k1, k2, k3_even, k3_uneven, k4 = solution.tolist()
        k3 = k3_even + k3_uneven
        cost = CostModel(k1, k2, k3, k4)
        cost = replace(cost, expert_fraction=fraction if k2 else 1.0, imbalance=most * k3_uneven / k3 if k3 else 0.0)
        if (loss := steps.loss(cost)) < least - ROUNDING:
            best, least = cost, loss
    return best
