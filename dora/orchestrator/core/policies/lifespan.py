"""How many DP groups a version has at each age: what laxity partitions by, and reserves KV against.

A version is ``age`` steps old: 0 when it is published, W when the last step that may train on it is. With E DP groups,
the newest and the due version share E / (W - 1) of them (all, at W = 2): the newest grows in even steps from a head to
all but a tail, the due one shrinks as it grows, the versions between hold still. So every DP group changes version
about once in W - 1 steps, one at a time, and at every moment the shares of the live versions add up to E.
Where only every S-th version is taken up (stride.py), each has S times as many; the others have none.

    W = 3, E = 10, DP groups by age          newest 2 3 | middle 5 5   | due 3 2     | 0
    W = 3, E = 6, every second version       newest 2 4 | middle 6 6   | due 4 2     | 0

The due version ends some percent of a step before the publish. Until then its last DP groups are the newest's: else
they would stand idle, and a version that has 2 and is to have 3 from the publish on is the sooner full.

Why this shape: a DP group that begins a version is short of KV for minutes, as all its requests are young, so the fewer
changes the better; and the due version must end with its deadline, so it has to give up what it holds gradually.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dora.orchestrator.core.table import Column

HEAD_SHARE = 0.3  # of what the newest and the due version share, the newest's from the start: long responses begin then
TAIL_SHARE = 0.3  # and the due version's to the end: long responses end then
MARGIN_STEP = 0.08  # a response should end this share of a step before the deadline of its version


@dataclass(frozen=True, slots=True)
class Lifespan:
    """The schedule as of one moment."""

    groups: int  # DP groups of all versions
    window: int  # steps that a version is hosted for: the window, or fewer where DP groups are
    newest: int
    leader: int  # the version that new work goes to first
    stride: int  # steps between versions that are taken up
    published_s: float  # when the newest version was published
    next_s: float  # when the next one is expected
    step_s: float  # from there on, between publishes
    hurried: bool = False  # the longest responses cannot end in time on full DP groups
    lane_fill: float = 1.0  # but on those that use this share of their KV
    turn_s: float = 0.0  # groups of a version are to end so long after one another; 0: all at once
    least_end_s: Mapping[int, float] = field(default_factory=dict)  # version -> before that it cannot end, even hurried

    def end_s(self, version: int) -> float:
        """When the last response of a version should have ended."""
        steps = version + self.window - 1 - self.newest
        return max(self.next_s + (steps - MARGIN_STEP) * self.step_s, self.least_end_s.get(version, 0.0))

    @property
    def newest_due(self) -> int:
        """The newest version that is to end with the step of the newest of all."""
        return self.newest - self.window + 1

    def due(self, version: int) -> bool:
        """Whether this version is to end with the step of the newest."""
        return version <= self.newest_due

    def taken_up(self, version: int) -> bool:
        """Whether this version is one of those that DP groups take up."""
        return (self.leader - version) % self.stride == 0

    def age(self, version: int, at_s: Column | float) -> Column:
        """Steps since a version was published, at these times."""
        at = np.asarray(at_s, dtype=np.float64)
        now_on = np.minimum((at - self.published_s) / max(self.next_s - self.published_s, 1e-9), 0.999)
        later = 1.0 + (at - self.next_s) / self.step_s
        age: Column = self.newest - version + np.where(at < self.next_s, now_on, later)
        return age

    def hosts(self, version: int, at_s: Column | float) -> Column:
        """DP groups that a version is to have at these times; of floats, as a middle version's share may be broken."""
        at = np.asarray(at_s, dtype=np.float64)
        if not self.taken_up(version):
            return np.zeros_like(at)
        age = np.minimum(self.age(version, at), self.window - 0.001)
        alive = at < self.end_s(version)
        hosts: Column = np.where(alive, self._by_age(age), 0.0)
        if version == self.newest and self.window > 1:
            # the due version ends before the next publish: until then its last DP groups are the newest's
            over = (at >= self.end_s(version - self.window + 1)) & (at < self.next_s)
            hosts = hosts + np.where(over, self._by_age(age + self.window - 1.0), 0.0)
        return hosts

    def _by_age(self, age: Column) -> Column:
        if self.window == 1:
            return np.full_like(age, float(self.groups))
        shared = max(2, round(self.groups * self.stride / (self.window - 1)))
        head = max(1, round(HEAD_SHARE * shared))
        tail = max(1, round(TAIL_SHARE * shared))
        steps = np.floor(age)
        part = np.round(age - steps, 9)  # the same for all versions: what one takes another gives
        newest = np.minimum(head + np.floor(part * (shared - head - tail + 1)), shared - tail)
        old = (self.window - 1) // self.stride  # versions older than the one that grows; the oldest shrinks meanwhile
        middle = np.where(steps % self.stride, self.groups / old, (self.groups - shared) / max(1, old - 1))
        by_age: Column = np.where(steps == 0, newest, np.where(steps == self.window - 1, shared - newest, middle))
        return by_age
