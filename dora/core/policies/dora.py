"""The paper's strategy: workers in proportion to remaining work, locality and migration (DORA, section 4.3).

The paper leaves three choices open. KV is filled up to the pressure above which a worker is relieved. An older version
keeps the workers that its KV still fills; while these exceed its share, it begins no groups, and so it shrinks. An
older version begins only prompts that can end before its deadline, so that no step waits for a late start.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Final

import numpy as np

from dora.config import BalanceConfig
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.partition import WorkerCandidate, assign, keeping_full, proportional, settled
from dora.core.fleet.worker import Worker
from dora.core.groups.queues import QueuedPrompt
from dora.core.plan import Move, Plan, Trigger
from dora.core.policies.base import BasePolicy
from dora.core.policies.levelling import plan_moves
from dora.core.policies.targets import living_targets
from dora.core.table import Column
from dora.core.view import View

REACH: Final = 64  # prompts examined to find one that ends in time
MARGIN: Final = 0.9  # share of the time that a response has before its version's deadline


class DoraPolicy(BasePolicy):
    """Partitions workers by predicted tokens, keeps KV in place if possible and moves the other requests."""

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._shrinking: frozenset[int] = frozenset()  # versions with more workers than their share

    def plan(self, view: View, trigger: Trigger) -> Plan:
        workers = view.workers
        indexes = np.flatnonzero(workers.alive & ~workers.draining)
        if not len(indexes):
            return Plan()
        work = remaining_work(view)
        shares = proportional(work, len(indexes), view.newest)
        goal = keeping_full(shares, *self._occupied(view, indexes), view.newest)
        self._shrinking = frozenset(version for version in goal if goal[version] > shares.get(version, 0))
        present, times = np.unique(workers.target[indexes], return_counts=True)
        counts = dict(zip(present.tolist(), times.tolist(), strict=True))
        keep = trigger in (Trigger.TIME, Trigger.PRESSURE) and settled(counts, work, goal, self.config.dora.hysteresis)
        if keep:
            targets = dict(zip(indexes.tolist(), workers.target[indexes].tolist(), strict=True))
        elif len(goal) == 1:
            targets = dict.fromkeys(indexes.tolist(), next(iter(goal)))
        else:
            columns = (
                *(indexes, workers.loaded[indexes], workers.target[indexes], workers.kv_used[indexes]),
                1.0 / workers.step_scale[indexes],
            )
            rows = [WorkerCandidate(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
            targets = assign(rows, goal)
        return Plan(targets, plan_moves(view, targets, self.config))

    def relieve(self, view: View) -> tuple[Move, ...]:
        return plan_moves(view, living_targets(view), self.config)

    def ration(self, dispatcher: Dispatcher, version: int) -> int | None:
        return self.even_share(dispatcher, version)

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        """Returns whether KV in use stays below the pressure. An empty worker takes any request."""
        kv_tokens = worker.kv_expected + dispatcher.context_tokens(row)
        return worker.is_empty or kv_tokens <= self.config.pressure * worker.kv_tokens

    def choose(self, dispatcher: Dispatcher, version: int) -> QueuedPrompt | None:
        """The first prompt by arrival. An older version takes one that meets its deadline, none while it shrinks."""
        if version == dispatcher.newest or not dispatcher.rates.step_s:
            return dispatcher.backlog.first()
        if version in self._shrinking:
            return None
        left_s = MARGIN * time_left_s(dispatcher, version)
        backlog = islice(dispatcher.backlog, REACH)
        return next((entry for entry in backlog if entry.longest_tokens * dispatcher.token_s(entry) <= left_s), None)

    def begins(self, dispatcher: Dispatcher, version: int) -> bool:
        return self.choose(dispatcher, version) is not None

    def _occupied(self, view: View, indexes: Column) -> tuple[Mapping[int, int], Mapping[int, float]]:
        """By loaded version: the number of workers that have it, and the number that its KV would fill."""
        workers = view.workers
        loaded = indexes[workers.loaded[indexes] >= 0]
        versions, inverse, times = np.unique(workers.loaded[loaded], return_inverse=True, return_counts=True)
        # the KV of an idle engine is free, whatever it last reported
        kv = np.where(workers.assigned[loaded] > 0, workers.kv_expected[loaded], 0)
        shares = kv / (self.config.pressure * workers.kv_tokens[loaded])
        full = np.bincount(inverse, weights=shares, minlength=len(versions))
        names = versions.tolist()
        return dict(zip(names, times.tolist(), strict=True)), dict(zip(names, full.tolist(), strict=True))


def time_left_s(dispatcher: Dispatcher, version: int) -> float:
    """The time until the version's last step is full, at the recent step time."""
    rates = dispatcher.rates
    steps = dispatcher.window.deadline(version) - dispatcher.newest + 1
    return rates.published_s + steps * rates.step_s - rates.tail_s - dispatcher.now_s


def remaining_work(view: View) -> dict[int, float]:
    """Predicted tokens to generate, by version. The newest version includes the groups that it may still admit."""
    requests = view.requests
    rows = np.flatnonzero(requests.unfinished)
    versions, inverse = np.unique(requests.version[rows], return_inverse=True)
    sums = np.bincount(inverse, weights=requests.remaining_tokens(rows) + 1, minlength=len(versions))
    work = {int(version): float(total) for version, total in zip(versions, sums, strict=True)}
    supply = max(0, view.admissible.get(view.newest, 0)) * view.group_tokens
    work[view.newest] = work.get(view.newest, 0.0) + supply
    return work
