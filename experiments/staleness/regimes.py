"""Regimes of learning for the simulated fleet: how far the policy moves as it learns, and what staleness costs it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from dora.core.forecast.staleness import samples_factor
from dora.trainers.objectives.presets import DEFAULT
from experiments.staleness.grid import TRIED_SEEDS, Result
from experiments.staleness.report import Point, steps_to_level, weight

RECORDED: Final = {"fast": 3e-3, "slower": 1e-3, "fine-tuning": 1e-4}  # of these learning rates, as the map has them
SETTLING_STEPS: Final = 80  # of the regime whose movement falls from that of "fast" to that of "fine-tuning"
SETTLING_FLAT: Final = 1 / 4  # share of its steps at either end in which movement stays as it is


@dataclass(frozen=True, slots=True)
class Regime:
    """``movement``: of the policy in each step of a run without staleness, in nats, until its level of reward."""

    name: str
    movement: tuple[float, ...]
    staleness: tuple[float, ...]  # a rising sequence from 0
    samples: tuple[float, ...]  # to the level at each of these, relative to 0; empty: see ``weight``
    weight: float  # without ``samples``: the share of them per version of staleness and square root of movement

    @property
    def steps(self) -> int:
        """Steps to the level without staleness."""
        return len(self.movement)

    def at(self, progress: float) -> float:
        """The movement of a step that begins when ``progress`` steps' worth has been learnt."""
        return self.movement[min(int(progress), self.steps - 1)]

    def learnt(self, progress: float, staleness: float) -> float:
        """What a step at this mean staleness teaches, as a share of one without any."""
        if not self.samples:
            return 1.0 / samples_factor(staleness, self.at(progress), self.weight)
        return 1.0 / _interpolated(staleness, self.staleness, self.samples)


@dataclass(frozen=True, slots=True)
class SimStep:
    """One step of a simulated run."""

    took_min: float
    staleness: float  # mean over its groups


@dataclass(frozen=True, slots=True)
class Reached:
    """The level of reward: after how long, and after how many steps."""

    hours: float
    steps: float


def reached(regime: Regime, steps: Sequence[SimStep]) -> Reached | None:
    """None: the steps do not suffice. The last step counts by the share of it that was needed."""
    progress = minutes = 0.0
    for number, step in enumerate(steps):
        gain = regime.learnt(progress, step.staleness)
        if progress + gain >= regime.steps:
            share = (regime.steps - progress) / gain
            return Reached((minutes + share * step.took_min) / 60, number + share)
        progress, minutes = progress + gain, minutes + step.took_min
    return None


def prolonged(steps: Sequence[SimStep], count: int, repeated: int) -> list[SimStep]:
    """``count`` steps: those of a run, then again and again its last ``repeated`` ones."""
    last = steps[-repeated:]
    more = count - len(steps)
    return [*steps[:count], *(last[index % len(last)] for index in range(more))]


def regimes(results: Sequence[Result], points: Sequence[Point], seed: int) -> list[Regime]:
    """The regimes that the map's results of the default objective allow. Movement and steps are those of one seed."""
    own = [each for each in points if (each.task, each.objective) == ("tiny", DEFAULT)]
    found = {name: regime for name, rate in RECORDED.items() if (regime := _recorded(name, rate, results, own, seed))}
    if {"fast", "fine-tuning"} <= found.keys():
        ends = [median(found[name].movement) for name in ("fast", "fine-tuning")]
        settling = Regime("settling", _settling(ends[0], ends[1]), (), (), weight(own))
        found = {"fast": found.pop("fast"), "settling": settling} | found
    return list(found.values())


def _recorded(name: str, rate: float, results: Sequence[Result], points: Sequence[Point], seed: int) -> Regime | None:
    of_rate = sorted((each for each in points if each.learning_rate == rate), key=lambda each: each.lag)
    seeds = {
        each["cell"]["seed"]: each
        for each in results
        if (each["cell"]["task"], each["cell"]["objective"]) == ("tiny", DEFAULT)
        and (each["cell"]["learning_rate"], each["cell"]["lag"]) == (rate, 0)
        and each["cell"]["seed"] not in TRIED_SEEDS
    }
    if len(of_rate) < 2 or seed not in seeds:
        return None
    steps = steps_to_level(seeds[seed])
    movement = tuple(line["movement"] for line in seeds[seed]["steps"][:steps])
    lags = tuple(float(each.lag) for each in of_rate)
    # the map's modes differ by chance, and no staleness saves samples
    return Regime(name, movement, lags, tuple(max(1.0, each.samples.mean) for each in of_rate), 0.0)


def _settling(first: float, last: float) -> tuple[float, ...]:
    """Movement that stays, falls evenly in its logarithm, and stays."""
    shares = (
        min(1.0, max(0.0, (step / SETTLING_STEPS - SETTLING_FLAT) / (1.0 - 2.0 * SETTLING_FLAT)))
        for step in range(SETTLING_STEPS)
    )
    return tuple(first * (last / first) ** share for share in shares)


def _interpolated(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Linear between two places, and beyond the last one as between the last two."""
    upper = next((index for index, place in enumerate(places) if place >= at), len(places) - 1)
    upper = max(1, upper)
    low, high = places[upper - 1], places[upper]
    return values[upper - 1] + (values[upper] - values[upper - 1]) * (at - low) / (high - low)


def mean_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The geometric mean of the ratios of pairs."""
    return math.exp(fmean(math.log(one / other) for one, other in zip(above, below, strict=True)))
