"""Compares the future KV of each version's admitted requests with the KV that the version will have.

A request with context ``c`` and ``r`` tokens to generate holds ``c + h`` after ``h`` tokens if ``r > h``, otherwise
nothing. The sum over requests on a grid of ``h`` is a forecast. A new request is added to it.
"""

from math import exp

import numpy as np

from dora.core.dispatcher import Dispatcher
from dora.core.forecast.lognormal import running_chance
from dora.core.groups.queues import Backlog, QueuedPrompt
from dora.core.policies.laxity.allocation import Last
from dora.core.policies.laxity.schedule import Schedule, schedule_of
from dora.core.policies.laxity.tuning import TUNING
from dora.core.table import Column

GRID = np.array(TUNING.grid_tokens, dtype=np.float64)


def rows_forecast(dispatcher: Dispatcher, rows: Column, grid: Column) -> tuple[Column, float]:
    """The forecast of these requests, and the sum of their present contexts.

    If lengths are predicted, each request counts with the chance that it still runs: over many, that is their KV.
    """
    requests = dispatcher.requests
    tokens = requests["tokens"][rows]
    context = (requests["prompt_tokens"][rows] + tokens).astype(np.float64)
    remaining = np.maximum(requests["expected"][rows] - tokens, 1.0)
    log_mean, log_sd, most = (requests[name][rows] for name in ("log_mean", "log_sd", "max_tokens"))
    runs = running_chance(remaining, log_mean, log_sd, tokens, most, grid)
    return ((context[:, None] + grid) * runs).sum(axis=0), float(context.sum())


class Reservations:
    """The KV forecast of every version. It is rebuilt every few seconds; ``reserve`` adds a group in between."""

    def __init__(self) -> None:
        self._made_s = 0.0
        self._made_for = (-1, 0, 0)  # newest version, number of workers, and number of these that do not leave
        self._reserved: dict[int, Column] = {}  # version -> KV on GRID
        self._limit: dict[int, Column] = {}
        self._log_sd = 0.0  # uncertainty of lengths: the mean standard deviation of their logarithms
        self._most_tokens = 0.0  # the most tokens that a response is expected to reach
        self.token_s = 0.0  # seconds per token
        self._fastest_s = 0.0  # the same on the fastest kind of machine
        self.believed = False  # lengths of some unfinished requests are predictions
        self.schedule: Schedule | None = None  # None: step and token times are unknown
        self.last = Last()

    def refresh(self, dispatcher: Dispatcher) -> bool:
        """Rebuilds the forecast if it is old. Returns whether it did."""
        if not self._stale(dispatcher):
            return False
        self.observe(dispatcher)
        if self.schedule is None:
            return False
        self._made_s, self._made_for = dispatcher.now_s, (dispatcher.newest, dispatcher.members, dispatcher.groups())
        self._forecast(dispatcher, self.schedule)
        return True

    def observe(self, dispatcher: Dispatcher) -> None:
        """Rebuilds only the schedule if it is old. The forecast takes many times as long."""
        if dispatcher.rates.step_s and dispatcher.rates.pace_s and self._stale(dispatcher):
            self.token_s = self._fastest_s = TUNING.safety * dispatcher.rates.pace_s
            if dispatcher.are_unlike:
                paces_s = map(dispatcher.token_s_on, dispatcher.workers())
                self._fastest_s = TUNING.safety * min(paces_s, default=dispatcher.rates.pace_s)
            self.schedule = schedule_of(dispatcher)

    def _stale(self, dispatcher: Dispatcher) -> bool:
        if self.schedule is None or (dispatcher.newest, dispatcher.members, dispatcher.groups()) != self._made_for:
            return True
        rest_s = TUNING.refresh_step * self.schedule.step_s
        return dispatcher.now_s - self._made_s >= (rest_s if self.last.ample else min(TUNING.refresh_s, rest_s))

    def limit_tokens(self, dispatcher: Dispatcher, version: int) -> float:
        """The longest predicted response that may begin now.

        If lengths are predictions, a response may turn out much longer. Long ones then wait for the next version that
        workers take up (``longest_first_tokens``), unless they would end in time at any length.
        """
        assert self.schedule is not None
        schedule, reach = self.schedule, self.reach_tokens(dispatcher, version)
        if not self.believed:
            return reach
        if schedule.stride > 1:
            longer = min(TUNING.risk, exp(TUNING.risk_sd * self._log_sd))
            return reach / longer if reach < self._most_tokens else reach
        if reach >= TUNING.unhurried * self._most_tokens:
            return reach
        limit = longest_first_tokens(
            dispatcher.backlog, float(schedule.age(version, dispatcher.now_s)), schedule.window
        )
        return min(reach, max(limit, reach / exp(TUNING.outmost_sd * self._log_sd)))

    def reach_tokens(self, dispatcher: Dispatcher, version: int) -> float:
        """The longest response that can begin now and end by its version's deadline on the fastest kind of machine."""
        assert self.schedule is not None
        return (self.schedule.end_s(version) - dispatcher.now_s) / self._fastest_s

    def reserve(self, version: int, entry: QueuedPrompt, late: bool = False) -> bool:
        """Reserves KV for a prompt's group if it fits from now to its end. Returns whether it did.

        If ``late``, the group ends after the deadline in any case, so its KV must fit only during the version's life.
        """
        lengths = np.asarray(entry.lengths)
        more = ((entry.prompt.prompt_tokens + GRID) * (lengths[:, None] > GRID)).sum(axis=0)
        reserved, limit = self._reserved[version] + more, self._limit[version]
        over = (reserved > limit) & (more > 0)
        if late:
            over &= limit > 0
        if over.any():
            return False
        self._reserved[version] = reserved
        return True

    def _forecast(self, dispatcher: Dispatcher, schedule: Schedule) -> None:
        rows = dispatcher.unfinished()
        self.believed = bool(dispatcher.requests["log_sd"][rows].any())
        if self.believed:
            log_mean, log_sd, most = (dispatcher.requests[name][rows] for name in ("log_mean", "log_sd", "max_tokens"))
            self._log_sd = float(log_sd.mean())
            log_most = np.minimum(log_mean + TUNING.outmost_sd * log_sd, np.log(np.maximum(1, most)))
            self._most_tokens = float(np.exp(log_most.max()))
        versions = dispatcher.requests["version"][rows]
        kv_tokens = max(1.0, TUNING.fill * dispatcher.kv_tokens() / max(1, schedule.workers))  # of one worker
        for known in self._reserved.keys() - set(dispatcher.versions()):
            del self._reserved[known], self._limit[known]
        spare = np.zeros(len(GRID))  # KV shares that closed versions do not need. The leading version can use them
        for version in reversed(dispatcher.versions()):
            self._reserved[version] = rows_forecast(dispatcher, rows[versions == version], GRID)[0]
            kept_free = self.last.kept_free.get(version, 0.0)
            share = schedule.share(version, dispatcher.now_s + self.token_s * GRID)
            present = len(dispatcher.workers_of(version))
            needs = (self._reserved[version] + kept_free) / kv_tokens
            if version == schedule.leader:
                share = np.maximum(0.0, share + spare)
            # a version that is not in the schedule: its KV is unavailable to others
            elif not schedule.taken_up(version):
                share = np.minimum(np.ceil(needs), present)
                spare -= share
            elif dispatcher.admissible(version) < 1:
                spare += np.maximum(0.0, share - np.ceil(needs))
                share = np.minimum(share, np.ceil(needs))
            share[0] = max(share[0], present)
            self._limit[version] = kv_tokens * share - kept_free


def longest_first_tokens(backlog: Backlog, age: float, window: int) -> float:
    """The longest predicted response that a version may begin at this age, in steps of the ``window``.

    Between two moments of the version's life, the share of waiting prompts that are short enough falls linearly to one.
    """
    share = 1.0 - (age / window - TUNING.at_once) / (TUNING.begun - TUNING.at_once)
    return backlog.longest_of_shortest(max(1, round(share * len(backlog))))
