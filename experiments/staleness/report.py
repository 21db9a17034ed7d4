"""The map's results: samples to the level by lag, and the rule that bounds their cost. All pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from experiments.convergence.intervals import Estimate, ratio, running_mean
from experiments.staleness.cell import LEVEL_STEPS, TASKS
from experiments.staleness.grid import TRIED_SEEDS, Result

COST_MAX: Final = 1.02  # of the rule: samples to the level, relative to lag 0
NEVER: Final = 2.0  # a run that does not reach the level counts as so many times its steps

Mode = tuple[str, str, float]  # task, objective, learning rate


@dataclass(frozen=True, slots=True)
class Point:
    """One mode at one lag, beside lag 0 of the same mode, objective and seeds."""

    task: str
    objective: str
    learning_rate: float
    lag: int
    movement: float  # nats a step: median over the steps until the level, mean over seeds, at lag 0
    steps: float  # to the level, mean over seeds
    reached: int  # seeds that reached the level
    seeds: int
    samples: Estimate  # to the level, relative to lag 0: geometric mean over seeds

    @property
    def far(self) -> float:
        """Lag times the square root of movement: the distance of the policy that samples, in its natural unit."""
        return self.lag * math.sqrt(self.movement)


def steps_to_level(result: Result) -> int | None:
    """Optimiser steps before the first version whose reward, as a mean of LEVEL_STEPS, is the level."""
    cell = result["cell"]
    rewards = [line["reward"] for line in result["steps"][cell["lag"] :]]
    level = TASKS[cell["task"]].level
    means = running_mean(rewards, LEVEL_STEPS)
    return next((step for step, mean in enumerate(means) if step + 1 >= LEVEL_STEPS and mean >= level), None)


def movement(result: Result) -> float:
    """The median over the run's steps of the policy's movement in a step, in nats."""
    return median(line["movement"] for line in result["steps"])


def points(results: Iterable[Result]) -> list[Point]:
    """One point for each mode and lag that has lag 0 beside it, over the seeds that both have."""
    by_mode: dict[Mode, dict[int, dict[int, Result]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        cell = result["cell"]
        if cell["seed"] not in TRIED_SEEDS:
            by_mode[cell["task"], cell["objective"], cell["learning_rate"]][cell["lag"]][cell["seed"]] = result
    found = []
    for mode, by_lag in sorted(by_mode.items()):
        for lag, of_lag in sorted(by_lag.items()):
            point = _point(mode, lag, of_lag, by_lag.get(0, {}))
            found += [] if point is None else [point]
    return found


def _point(mode: Mode, lag: int, of_lag: Mapping[int, Result], fresh: Mapping[int, Result]) -> Point | None:
    seeds = sorted(of_lag.keys() & fresh.keys())
    samples = ratio([counted(of_lag[seed]) for seed in seeds], [counted(fresh[seed]) for seed in seeds])
    if samples is None:
        return None
    return Point(
        *mode,
        lag,
        movement=fmean(movement(fresh[seed]) for seed in seeds),
        steps=fmean(counted(of_lag[seed]) for seed in seeds),
        reached=sum(steps_to_level(of_lag[seed]) is not None for seed in seeds),
        seeds=len(seeds),
        samples=samples,
    )


def counted(result: Result) -> float:
    """Steps to the level. Steps are samples, as every step has as many."""
    found = steps_to_level(result)
    return NEVER * result["cell"]["steps"] if found is None else float(max(1, found))


def costs(of: Sequence[Point]) -> dict[str, float]:
    """The cost of staleness by objective, see ``weight``."""
    names = sorted({each.objective for each in of})
    return {name: weight([each for each in of if each.objective == name]) for name in names}


def weight(of: Sequence[Point]) -> float:
    """The ``window.staleness_cost`` that fits best: the least squares of samples - 1 over ``far``, through 0."""
    lagged = [point for point in of if point.lag]
    squares = sum(point.far**2 for point in lagged)
    return sum(point.far * (point.samples.mean - 1.0) for point in lagged) / squares if squares else 0.0


def best_rates(results: Iterable[Result]) -> dict[tuple[str, str, int], float]:
    """Returns by task, objective and lag the learning rate with the fewest samples to the level, on the seeds of the
    trials.
    """
    steps: dict[tuple[str, str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        cell = result["cell"]
        if cell["seed"] in TRIED_SEEDS:
            steps[cell["task"], cell["objective"], cell["lag"]][cell["learning_rate"]].append(counted(result))
    return {
        mode: min(by_rate, key=lambda rate: fmean(by_rate[rate]))
        for mode, by_rate in steps.items()
        if all(len(of_rate) == len(TRIED_SEEDS) for of_rate in by_rate.values())
    }
