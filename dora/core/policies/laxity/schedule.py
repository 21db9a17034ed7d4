"""The number of workers for a version at each age, and the expected ends of future steps.

The newest and the due version share E / (W - 1) of E workers (all, at W = 2); docs/strategy.md draws it. By age:

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
    workers: int  # of all versions
    window: int  # steps that a version is hosted for: the window, or fewer if there are few workers
    newest: int
    leader: int  # the version that gets new work first
    stride: int  # distance between versions that workers take up
    published_s: float  # time of the newest version's publish
    next_s: float  # expected time of the next publish
    step_s: float  # expected time between later publishes
    hurried: bool = False  # the longest responses cannot end in time on full workers
    reserved_fill: float = 1.0  # share of KV in use at which they can
    # version -> its earliest possible end, with hurried responses
    least_end_s: Mapping[int, float] = field(default_factory=dict)

    def end_s(self, version: int) -> float:
        steps = version + self.window - 1 - self.newest
        return max(self.next_s + (steps - TUNING.margin_step) * self.step_s, self.least_end_s.get(version, 0.0))

    def due(self, version: int) -> bool:
        return version <= self.newest - self.window + 1

    def taken_up(self, version: int) -> bool:
        return (self.leader - version) % self.stride == 0

    def age(self, version: int, at_s: Column | float) -> Column:
        """The version's age at these times, in steps since its publish."""
        at = np.asarray(at_s, dtype=np.float64)
        now_on = np.minimum((at - self.published_s) / max(self.next_s - self.published_s, 1e-9), 0.999)
        later = 1.0 + (at - self.next_s) / self.step_s
        age: Column = self.newest - version + np.where(at < self.next_s, now_on, later)
        return age

    def share(self, version: int, at_s: Column | float) -> Column:
        """The version's workers at these times. It is a float, as a middle version's share may be a fraction."""
        at = np.asarray(at_s, dtype=np.float64)
        if not self.taken_up(version):
            return np.zeros_like(at)
        age = np.minimum(self.age(version, at), self.window - 0.001)
        share: Column = np.where(at < self.end_s(version), self._by_age(age), 0.0)
        if version == self.newest and self.window > 1:
            # the due version ends before the next publish; until then its last workers belong to the newest
            over = (at >= self.end_s(version - self.window + 1)) & (at < self.next_s)
            share = share + np.where(over, self._by_age(age + self.window - 1.0), 0.0)
        return share

    def _by_age(self, age: Column) -> Column:
        if self.window == 1:
            return np.full_like(age, float(self.workers))
        shared = max(2, round(self.workers * self.stride / (self.window - 1)))
        head, tail = (max(1, round(part * shared)) for part in (TUNING.head_share, TUNING.tail_share))
        steps = np.floor(age)
        part = np.round(age - steps, 9)  # the same for all versions, so that one takes the workers that another gives
        newest = np.minimum(head + np.floor(part * (shared - head - tail + 1)), shared - tail)
        old = (self.window - 1) // self.stride  # versions older than the growing one; the oldest of them shrinks
        middle = np.where(steps % self.stride, self.workers / old, (self.workers - shared) / max(1, old - 1))
        by_age: Column = np.where(steps == 0, newest, np.where(steps == self.window - 1, shared - newest, middle))
        return by_age


def stride_of(workers: int, window: int) -> int:
    """The distance between versions that this many workers take up. It divides ``window - 1``, so that one version is
    due when another begins. A single worker takes up every version, as two versions could not share it.
    """
    if workers >= TUNING.least_workers * (window - 1) or workers < 2 or (window - 1) % TUNING.longest_stride:
        return 1
    return TUNING.longest_stride


def lifetime_of(workers: int, window: int) -> int:
    """Steps that a version is hosted for: the window, or fewer if there would be more versions than workers."""
    return max(1, min(window, stride_of(workers, window) * (workers - 1) + 1))


def leading(newest: int, targets: Sequence[int], window: int, admits: Callable[[int], bool]) -> int:
    """The version that gets new work first and workers without a version. ``targets`` are the workers'."""
    hosted = max(targets, default=-1)
    if hosted >= 0 and newest - hosted < stride_of(len(targets), window) and admits(hosted):
        return hosted
    return newest


def schedule_of(dispatcher: Dispatcher) -> Schedule:
    """The schedule now. It requires known step and token times.

    Steps are as short as the KV allows, so that stragglers do not set their length. They are not much shorter than
    recent ones. If the engine's cost is known, they are long enough for the longest responses to end in time
    (reserved.py).
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
    tail_s = min(rates.tail_s, TUNING.tail_step * step_s)  # training continues for this long after a step's last group
    next_s = _next_s(dispatcher, step_s, tail_s, longest.get(due, 0.0))
    if due in least_end_s:
        next_s = max(next_s, least_end_s[due] + tail_s)
    targets = [worker.target for worker in dispatcher.workers() if not worker.draining]
    leader = leading(dispatcher.newest, targets, window.size, lambda version: window.admissible(version) >= 1)
    lifetime, stride = lifetime_of(workers, window.size), stride_of(workers, window.size)
    times = (rates.published_s, next_s, step_s)
    return Schedule(workers, lifetime, dispatcher.newest, leader, stride, *times, hurried, fill, least_end_s)


def _next_s(dispatcher: Dispatcher, step_s: float, tail_s: float, due_tokens: float) -> float:
    """The expected time of the next publish. It is earlier than planned if the due version ends early; it may be later.

    The step's missing groups finish at the rate of one step's groups per step, and the last are trained on for
    ``tail_s``. No step is shorter than the shortest recent one. ``due_tokens`` are the tokens to generate of the
    longest due response.
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
    worker, mix = next(iter(dispatcher.workers()), None), dispatcher.rates.mix
    if dispatcher.cost is None or worker is None or not workers or not len(mix.classes()):
        return None
    most, lifetime_steps = (
        (worker.slots, TUNING.fill * dispatcher.kv_tokens() / workers),
        dispatcher.window.size - TUNING.margin_step,
    )
    cost = dispatcher.cost.scaled(dispatcher.mean_scale())
    return Haste(mix, cost, most, workers, dispatcher.window.groups_per_step, lifetime_steps)


def _longest_remaining(dispatcher: Dispatcher) -> dict[int, float]:
    rows, requests = dispatcher.unfinished(), dispatcher.requests
    columns = (requests[name][rows] for name in ("expected", "log_mean", "log_sd", "tokens", "max_tokens"))
    versions, tokens = requests["version"][rows], expected_remaining(*columns)
    return {int(version): float(tokens[versions == version].max()) for version in np.unique(versions)}
