"""How many workers a version is to have at each age, and when the steps to come are expected to end.

Of E workers the newest and the due version share E / (W - 1) (all, at W = 2); docs/strategy.md draws it. By age:

    W = 3, E = 10                            newest 2 3 | middle 5 5   | due 3 2     | 0
    W = 3, E = 6, every second version       newest 2 4 | middle 6 6   | due 4 2     | 0
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dora.core.dispatcher import Dispatcher
from dora.core.forecast.lognormal import expected_remaining
from dora.core.policies.laxity.reserved import Haste
from dora.core.policies.laxity.tuning import TUNING
from dora.core.table import Column


@dataclass(frozen=True, slots=True)
class Schedule:
    """As of one moment."""

    workers: int  # of all versions
    window: int  # steps that a version is hosted for: the window, or fewer where workers are
    newest: int
    leader: int  # the version that new work goes to first
    stride: int  # versions from one that is taken up to the next
    published_s: float  # when the newest version was published
    next_s: float  # when the next one is expected
    step_s: float  # from there on, between publishes
    hurried: bool = False  # the longest responses cannot end in time on full workers,
    reserved_fill: float = 1.0  # but on those that use this share of their KV
    least_end_s: Mapping[int, float] = field(default_factory=dict)  # version -> before that it cannot end, even hurried

    def end_s(self, version: int) -> float:
        """When the last response of a version should have ended."""
        steps = version + self.window - 1 - self.newest
        return max(self.next_s + (steps - TUNING.margin_step) * self.step_s, self.least_end_s.get(version, 0.0))

    def due(self, version: int) -> bool:
        """Whether this version is to end with the step of the newest."""
        return version <= self.newest - self.window + 1

    def taken_up(self, version: int) -> bool:
        """Whether this version is one of those that workers take up."""
        return (self.leader - version) % self.stride == 0

    def age(self, version: int, at_s: Column | float) -> Column:
        """Steps since a version was published, at these times."""
        at = np.asarray(at_s, dtype=np.float64)
        now_on = np.minimum((at - self.published_s) / max(self.next_s - self.published_s, 1e-9), 0.999)
        later = 1.0 + (at - self.next_s) / self.step_s
        age: Column = self.newest - version + np.where(at < self.next_s, now_on, later)
        return age

    def share(self, version: int, at_s: Column | float) -> Column:
        """Workers that a version is to have at these times; of floats, as a middle version's share may be broken."""
        at = np.asarray(at_s, dtype=np.float64)
        if not self.taken_up(version):
            return np.zeros_like(at)
        age = np.minimum(self.age(version, at), self.window - 0.001)
        share: Column = np.where(at < self.end_s(version), self._by_age(age), 0.0)
        if version == self.newest and self.window > 1:
            # the due version ends before the next publish: until then its last workers are the newest's
            over = (at >= self.end_s(version - self.window + 1)) & (at < self.next_s)
            share = share + np.where(over, self._by_age(age + self.window - 1.0), 0.0)
        return share

    def _by_age(self, age: Column) -> Column:
        if self.window == 1:
            return np.full_like(age, float(self.workers))
        shared = max(2, round(self.workers * self.stride / (self.window - 1)))
        head, tail = (max(1, round(part * shared)) for part in (TUNING.head_share, TUNING.tail_share))
        steps = np.floor(age)
        part = np.round(age - steps, 9)  # the same for all versions: what one takes another gives
        newest = np.minimum(head + np.floor(part * (shared - head - tail + 1)), shared - tail)
        old = (self.window - 1) // self.stride  # versions older than the one that grows; the oldest shrinks meanwhile
        middle = np.where(steps % self.stride, self.workers / old, (self.workers - shared) / max(1, old - 1))
        by_age: Column = np.where(steps == 0, newest, np.where(steps == self.window - 1, shared - newest, middle))
        return by_age


def stride_of(workers: int, window: int) -> int:
    """Versions from one that is taken up to the next, for so many workers: a divisor of ``window - 1``, so that as one
    version comes another one is due. One worker alone takes up every version: two could not share it."""
    if workers >= TUNING.least_workers * (window - 1) or workers < 2 or (window - 1) % TUNING.longest_stride:
        return 1
    return TUNING.longest_stride


def lifetime_of(workers: int, window: int) -> int:
    """Steps that a version is hosted for: the window, or fewer where its versions are more than workers."""
    return max(1, min(window, stride_of(workers, window) * (workers - 1) + 1))


def leading(newest: int, targets: Sequence[int], window: int, admits: Callable[[int], bool]) -> int:
    """The version that new work goes to first, and that workers without a version get. ``targets``: of the workers."""
    hosted = max(targets, default=-1)
    if hosted >= 0 and newest - hosted < stride_of(len(targets), window) and admits(hosted):
        return hosted
    return newest


def schedule_of(dispatcher: Dispatcher) -> Schedule:
    """The schedule as of now. Only once the times of a step and of a token are known.

    Steps are as short as the KV allows, so that stragglers do not set their length; but not much shorter than of late,
    nor, where the cost of an engine is known, so short that the longest responses could not end in time (reserved.py).
    """
    rates, window, workers = dispatcher.rates, dispatcher.window, dispatcher.groups()
    haste = _haste(dispatcher, workers)
    step_s = max(
        TUNING.loss * rates.kv_step_s(window.groups_per_step, dispatcher.kv_tokens()),
        TUNING.shortest_step * rates.step_s,
        TUNING.loss * haste.step_s if haste is not None else 0.0,
    )
    hurried, fill, pace_s = False, TUNING.reserved_fill, rates.pace_s
    if haste is not None:
        hurried, fill, pace_s = haste.at(step_s, dispatcher.kv_tokens() / workers)
    longest = _longest_remaining(dispatcher)
    least_end_s = {version: dispatcher.now_s + TUNING.safety * pace_s * tokens for version, tokens in longest.items()}
    due = dispatcher.newest - window.size + 1
    tail_s = min(rates.tail_s, TUNING.tail_step * step_s)  # training goes on for so long after a step's last group
    next_s = _next_s(dispatcher, step_s, tail_s, longest.get(due, 0.0))
    if due in least_end_s:
        next_s = max(next_s, least_end_s[due] + tail_s)
    targets = [worker.target for worker in dispatcher.workers() if not worker.draining]
    leader = leading(dispatcher.newest, targets, window.size, lambda version: window.admissible(version) >= 1)
    lifetime, stride = lifetime_of(workers, window.size), stride_of(workers, window.size)
    times = (rates.published_s, next_s, step_s)
    return Schedule(workers, lifetime, dispatcher.newest, leader, stride, *times, hurried, fill, least_end_s)


def _next_s(dispatcher: Dispatcher, step_s: float, tail_s: float, due_tokens: float) -> float:
    """When the next version is published: as planned; earlier, where the due version ends early; or later.

    The groups that a step lacks finish at the rate of a step's in a step; then the last are trained on, for ``tail_s``.
    No step is shorter than one that the trainer had in full. ``due_tokens``: to come of the longest due response.
    """
    rates = dispatcher.rates
    if dispatcher.window.step > dispatcher.newest:  # the step is full
        return max(rates.filled_s + rates.tail_s, dispatcher.now_s + 1.0)
    lacking_s = dispatcher.lacking() * step_s
    full_s = dispatcher.now_s + max(lacking_s, TUNING.safety * rates.pace_s * due_tokens)
    trained_s = rates.published_s + min(rates.took_s, default=step_s)
    next_s = min(rates.published_s + step_s, max(full_s + tail_s, trained_s))
    return max(next_s, dispatcher.now_s + 1.0 + lacking_s + tail_s)


def _haste(dispatcher: Dispatcher, workers: int) -> Haste | None:
    """None where the cost of an engine or what prompts ask for is not known."""
    worker, mix = next(iter(dispatcher.workers()), None), dispatcher.rates.mix
    if dispatcher.cost is None or worker is None or not workers or not len(mix.classes()):
        return None
    most, lifetime_steps = (
        (worker.slots, TUNING.fill * dispatcher.kv_tokens() / workers),
        dispatcher.window.size - TUNING.margin_step,
    )
    return Haste(mix, dispatcher.cost, most, workers, dispatcher.window.groups_per_step, lifetime_steps)


def _longest_remaining(dispatcher: Dispatcher) -> dict[int, float]:
    """By version: tokens to come of its longest response."""
    rows, requests = dispatcher.unfinished(), dispatcher.requests
    columns = (requests[name][rows] for name in ("expected", "log_mean", "log_sd", "tokens", "max_tokens"))
    versions, tokens = requests["version"][rows], expected_remaining(*columns)
    return {int(version): float(tokens[versions == version].max()) for version in np.unique(versions)}
