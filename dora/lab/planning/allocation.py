"""Allocates accelerators to generation and training: StreamRL's Algorithm 1 (section 4.2).

The time of generation is computed in generation.py; training is interpolated between measured points.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from dora.errors import InvalidValue
from dora.lab.planning.drain import streamed_s
from dora.lab.planning.generation import Generation

Ways = Callable[[int], Sequence[Generation]]
"""The ways to generate on at most so many accelerators, one for each size of an engine; none where no engine fits."""


@dataclass(frozen=True, slots=True)
class Split:
    """One division of the accelerators; a step takes as long as the slower stage, or as ``link_s``.

    ``link_s`` is the time in which new weights cross the link between two datacentres: it overlaps with a step, and no
    step can be shorter. In a window of 1 nothing overlaps: generation, the remaining training and the link follow each
    other.
    """

    generation: Generation
    train_gpus: int
    training_s: float
    link_s: float = 0.0

    @property
    def gpus(self) -> int:
        return self.generation.gpus + self.train_gpus

    @property
    def step_s(self) -> float:
        if self.generation.ready_s:
            return streamed_s(self.generation.ready_s, self.training_s) + self.link_s
        return max(self.generation.seconds, self.training_s, self.link_s)

    @property
    def rank(self) -> tuple[float, int]:
        """Orders splits, best first: by the step's time, then by accelerators."""
        return self.step_s, self.gpus


class Training(Protocol):
    @property
    def least(self) -> int:
        """The minimum number of accelerators for training."""

    def numbers(self, most: int) -> Sequence[int]:
        """Numbers of accelerators that can train, up to ``most``, ascending; step times never grow."""

    def seconds(self, gpus: int) -> float:
        """Time of one step on one of these numbers."""


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """Seconds per step by number of accelerators, from measured ``points`` (accelerators, seconds).

    One point scales linearly. Between several, the time is linear in 1 / accelerators, and extrapolated beyond the
    outermost two, unless they scale better than linearly. The accelerators of a trainer are a multiple of ``multiple``.
    If ``even``, the points are of a trainer that divides evenly on any number, such as points scaled from another
    model. Raises InvalidValue for points that are not numbers, or if more accelerators take longer.
    """

    points: tuple[tuple[int, float], ...]
    multiple: int = 4
    even: bool = False

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise InvalidValue("train_multiple", self.multiple, "1 or above")
        if not self.points:
            raise InvalidValue("train_s_at", self.points, "at least one measured point")
        for gpus, seconds in self.points:
            if gpus < 1 or not 0.0 < seconds < math.inf:
                raise InvalidValue("train_s_at", f"{gpus}={seconds}", "1 or more GPUs, and seconds finite and above 0")
        for (fewer, slower), (more, faster) in pairwise(self.points):
            if more <= fewer or faster > slower:
                raise InvalidValue("train_s_at", f"{more}={faster:g}", f"more GPUs than {fewer}, at most {slower:g} s")

    def scaled(self, factor: float) -> "TrainingTime":
        """A similar trainer with ``factor`` times the work.

        Less work takes proportionally less time. More work takes the same time on proportionally more accelerators, as
        the part that accelerators do not shorten hardly grows with it.
        """
        if factor <= 1.0:
            points = tuple((gpus, seconds * factor) for gpus, seconds in self.points)
        else:
            points = tuple((round(gpus * factor), seconds) for gpus, seconds in self.points)
        return TrainingTime(points, self.multiple, self.even)

    @property
    def least(self) -> int:
        return self.multiple

    def numbers(self, most: int) -> Sequence[int]:
        """All possible numbers of accelerators of a trainer, up to ``most``."""
        return range(self.multiple, most + 1, self.multiple)

    def seconds(self, gpus: int) -> float:
        if len(self.points) == 1:
            first, seconds = self.points[0]
            return seconds * first / gpus
        index = min(max(bisect_left([point[0] for point in self.points], gpus), 1), len(self.points) - 1)
        (fewer, slower), (more, faster) = self.points[index - 1 : index + 1]
        slope = (slower - faster) / (1 / fewer - 1 / more)
        fixed = faster - slope / more
        if fixed < 0.0 and not fewer <= gpus <= more:
            nearest, seconds = (fewer, slower) if gpus < fewer else (more, faster)
            return seconds * nearest / gpus
        return fixed + slope / gpus

    def measured(self, gpus: int) -> bool:
        """Whether ``gpus`` is within the measured points, so that its time is not extrapolated."""
        return self.points[0][0] <= gpus <= self.points[-1][0]


def allocate(gpus: int, ways: Ways, training: Training) -> tuple[Split, tuple[Split, ...]]:
    """Returns the split of one datacentre's ``gpus`` with the shortest step, or fewer accelerators; and all candidates.

    Candidates are ordered by rollout accelerators, each with the fewest for training that do not lengthen its step.
    Raises InvalidValue if the budget has no room for an engine and a trainer.
    """
    trainers = training.numbers(gpus)
    candidates = _best_of_each(
        [_with_fewest(way, trainers, gpus - way.gpus, training) for way in ways(rollout_gpus)]
        for rollout_gpus in range(1, gpus - training.least + 1)
    )
    if not candidates:
        raise InvalidValue("gpus", gpus, f"enough for one engine and a trainer of {training.least}")
    return min(candidates, key=lambda split: split.rank), candidates


def allocate_across(
    rollout_gpus: int, train_gpus: int, ways: Ways, training: Training, link_s: float = 0.0
) -> tuple[Split, tuple[Split, ...]]:
    """Releases accelerators of the faster datacentre until both times differ least. Returns the split and all
    candidates.

    In a window of 1 neither the stages nor the ``link_s`` of weights overlap: the shortest step is the best, with the
    fewest engines that reach it. Raises InvalidValue if a budget has no room for an engine or a trainer.
    """
    whole = min(ways(rollout_gpus), key=lambda way: (way.seconds, way.gpus), default=None)
    if whole is None:
        raise InvalidValue("rollout_gpus", rollout_gpus, "enough for one engine")
    trainers = training.numbers(train_gpus)
    if not trainers:
        raise InvalidValue("train_gpus", train_gpus, f"enough for a trainer of {training.least}")
    training_s, on_policy = training.seconds(trainers[-1]), bool(whole.ready_s)
    if on_policy or whole.seconds < training_s:
        candidates = _best_of_each(
            [Split(way, trainers[-1], training_s, link_s) for way in ways(gpus)] for gpus in range(1, rollout_gpus + 1)
        )
    else:
        candidates = tuple(Split(whole, gpus, training.seconds(gpus), link_s) for gpus in trainers)
    if on_policy:
        return min(candidates, key=lambda split: split.rank), candidates
    best = min(candidates, key=lambda split: (abs(split.generation.seconds - split.training_s), split.gpus))
    return best, candidates


def transfer_s(weights_bytes: float, link_bits_per_s: float) -> float:
    """Returns seconds for a version's weights to cross the link of two datacentres to one engine, which passes them on.

    Asynchronous training overlaps this with the next step, if that takes as long. By this formula Qwen2.5-72B in bf16
    takes 14.5 s on 80 Gb/s; the "less than 10 seconds" of StreamRL section 7.3 needs fewer bytes or a faster link than
    the paper states.
    """
    if not 0.0 < link_bits_per_s < math.inf:
        raise InvalidValue("link_gbps", link_bits_per_s / 1e9, "a finite number above 0")
    return weights_bytes * 8 / link_bits_per_s


def _best_of_each(budgets: Iterable[Sequence[Split]]) -> tuple[Split, ...]:
    best: dict[int, Split] = {}
    for splits in budgets:
        if splits:
            found = min(splits, key=lambda split: (split.rank, split.generation.seconds))
            best.setdefault(found.generation.gpus, found)
    return tuple(best[gpus] for gpus in sorted(best))


def _with_fewest(way: Generation, trainers: Sequence[int], most: int, training: Training) -> Split:
    def step_s(gpus: int) -> float:
        return Split(way, gpus, training.seconds(gpus)).step_s

    last = bisect_right(trainers, most) - 1
    fewest = bisect_left(trainers, -step_s(trainers[last]), hi=last, key=lambda gpus: -step_s(gpus))
    return Split(way, trainers[fewest], training.seconds(trainers[fewest]))
