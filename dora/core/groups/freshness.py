"""Admission by need: a group begins when a step will want it, under the newest version that can have it ready in time.

Every group that is open when a version is published becomes one version staler. So mean staleness is the groups open at
a publish, in steps' worth, and on top of it the age of the versions that groups begin under. That is made as small as
it can be while the trainer waits for at most ``window.freshness`` of a step's time. At any moment

    shortage(u) = demand(u) - supply(u) - later(u)

is what the trainer will lack in ``u`` seconds if nothing begins now. As many groups are wanted as its greatest value,
over ``u`` from now to the end of the window.

- *demand*: what the trainer takes until then if it never waits: a step's groups evenly over ``training_s``, and all of
  them a ``lead`` before its end. Both are seen: the time of a step less what its trainer waited, and the share of that
  which comes after the step's last group: 1 where a trainer waits for its whole batch; of one that does not, less and
  less is tried, until it waits.
- *supply*: finished groups, and of those in progress what is expected to be finished until then, by the belief about
  each response's length, given what it has so far, and the pace of tokens.
- *later*: what could still be finished until then if it began later. For the newest version that is once the next one
  is published, as it is fresher by one; for an older version now, under the newest. It begins after the time that a
  group takes, and comes no faster than all workers generate.

Where generation does not keep up, ``later`` falls ever further behind ``demand``, and whatever the window allows is
begun. Where it does, right after a publish that is begun which is wanted until groups of the next version are ready,
and then nothing more. Forecasts err: after a step in which the trainer had to wait though groups were held back, more
are begun; after others less and less of that.
"""

from collections import deque
from collections.abc import Mapping
from math import ceil, inf
from typing import Any, Final

import numpy as np

from dora.core.forecast.lognormal import running_chance
from dora.core.forecast.rates import Rates
from dora.core.groups.window import Window
from dora.core.table import Column, Table

LAST_STEPS: Final = 8  # whose training times are kept
QUICK: Final = 4  # of them a quarter are shorter than the one that counts: a slow step is not to slow the next ones
LOOK_STEP: Final = 1 / 64  # of a step: the forecast is made anew after so long,
LOOK_REQUESTS: Final = 1 << 20  # or after so much of it as the unfinished requests are of these: a look goes over all
LOSS: Final = 1.25  # a step is taken to need this much longer than with slots or KV always full
STREAMS: Final = 0.9  # a trainer with a lead below trains on a step's first groups before it has the last
LEAD_TRIED: Final = 0.95  # each step without waits: whether less will do
SMOOTHING: Final = 1 / 64  # weight of one group in running means
SURELY: Final = 1.0 - 1e-12  # a chance
STOCK_KEPT: Final = 0.9  # each step without waits
STOCK_MAX: Final = 1.0  # steps' worth: waits that more does not end have another cause
_LEARNT: Final = ("_lead", "_group_s", "_kept", "_stock", "_held_back")


class Freshness:
    """How many groups are wanted now. Until trainer and generation have been seen for a step: as many as may begin."""

    def __init__(self, freshness: float) -> None:
        """``freshness``: share of a step's time that the trainer may wait for fresher groups; 0: none is held back."""
        self._freshness = freshness
        self._opened_s = self._filled_s = 0.0  # the step last asked for; the one last filled
        self._training_s: deque[float] = deque(maxlen=LAST_STEPS)
        self._lead = 1.0
        self._group_s = 0.0  # from admission to its last score; 0: not known yet
        self._kept = 1.0  # share of the finished groups that no filter cancels
        self._stock = 0.0  # steps' worth of groups wanted beyond the forecast
        self._held_back = False  # since the last publish
        self._made_s = -inf
        self._made_for = (-1, -1)  # newest version, step
        self._wanted = (0.0, 0.0)  # groups: of the newest version, of an older one
        self._begun = 0  # groups since the forecast was made
        self._look_step = LOOK_STEP

    # ------------------------------------------------------------------------------------------------- what is seen

    def opened(self, now_s: float) -> None:
        """The trainer has asked for the groups of the next step."""
        self._opened_s, self._made_s = now_s, -inf

    def filled(self, now_s: float) -> None:
        """The last group of a step went to the trainer."""
        self._filled_s = now_s

    def published(self, now_s: float, waited_s: float) -> None:
        """The step was trained on, and its trainer waited so long for its groups; negative: it does not say."""
        self._made_s = -inf
        if waited_s < 0.0:
            self._training_s.clear()
            return
        took_s = max(now_s - self._opened_s, 1e-9)
        training_s = max(took_s - waited_s, 1e-3 * took_s)
        self._training_s.append(training_s)
        # at most this comes after the last group that it needs: less where the step was filled before it needed that
        self._lead = min(self._lead, (now_s - self._filled_s) / training_s)
        over = waited_s / took_s - self._freshness
        if over <= 0.0:
            self._stock *= STOCK_KEPT
            self._lead *= LEAD_TRIED if self._lead < STREAMS else 1.0
        elif self._held_back:
            self._lead = min(1.0, self._lead / LEAD_TRIED**2)
            self._stock = min(STOCK_MAX, self._stock + over)  # what it would have trained on meanwhile
        self._held_back = False

    def finished(self, took_s: float) -> None:
        """A group's last response was scored, so long after the group was admitted."""
        self._kept += SMOOTHING * (1.0 - self._kept)
        self._group_s += (SMOOTHING if self._group_s else 1.0) * (took_s - self._group_s)

    def cancelled(self) -> None:
        """A finished group will not be trained on."""
        self._kept = max(0.01, self._kept - SMOOTHING / (1.0 - SMOOTHING))

    def admitted(self) -> None:
        self._begun += 1

    def learnt(self, now_s: float) -> dict[str, Any]:
        """What outlives a crash, as plain values; times are said as how long ago."""
        values = {name: getattr(self, name) for name in _LEARNT}
        ago_s = [now_s - self._opened_s, now_s - self._filled_s]
        return values | {"ago_s": ago_s, "training_s": list(self._training_s)}

    def learn_again(self, values: Mapping[str, Any], now_s: float) -> None:
        """Goes on from ``learnt``."""
        for name in _LEARNT:
            setattr(self, name, values[name])
        self._opened_s, self._filled_s = (now_s - ago_s for ago_s in values["ago_s"])
        self._training_s.extend(values["training_s"])

    # --------------------------------------------------------------------------------------------------- what is said

    @property
    def acts(self) -> bool:
        """Whether anything may be held back: never before the times of a step and of a group are known."""
        return bool(self._freshness and self._training_s and self._group_s)

    def is_old(self, now_s: float, window: Window) -> bool:
        """Whether the forecast has to be made anew."""
        if (window.newest, window.step) != self._made_for:
            return True
        return now_s - self._made_s >= self._look_step * self._usual_s()

    def wanted(self, *, newest: bool) -> int:
        """Groups that should begin now, under the newest version or an older one. ``look`` comes first."""
        left = ceil(self._wanted[0 if newest else 1] - self._begun)
        if left < 1 and newest:
            self._held_back = True
        return left

    def look(self, now_s: float, window: Window, rates: Rates, requests: Table, rows: Column, room: float) -> None:
        """Makes the forecast. ``rows``: of unfinished requests; ``room``: what all workers generate, steps a second."""
        self._made_s, self._made_for, self._begun = now_s, (window.newest, window.step), 0
        self._look_step = max(LOOK_STEP, len(rows) / LOOK_REQUESTS)
        training_s, group_s = self._usual_s(), self._group_s
        next_s = self._next_s(now_s, window) - now_s
        end_s = next_s + group_s + (window.size - 1) * training_s
        ahead_s = np.array([group_s, 0.5 * next_s, next_s, next_s + 0.5 * group_s, next_s + group_s, end_s])
        unfinished = _unfinished_groups(requests, rows, ahead_s / rates.pace_s) if rates.pace_s else np.zeros(1)
        step_groups = float(window.groups_per_step)
        lacking = self._demand(now_s, ahead_s, window) - self._kept * (window.open_groups - unfinished)
        more = (self._stock - self._freshness) * step_groups
        later = [room * step_groups * np.maximum(0.0, ahead_s - begin_s - group_s) for begin_s in (next_s, 0.0)]
        newest, older = (float((lacking - each).max()) + more for each in later)
        # what the step lacks that the trainer is at, whatever is forecast: else it might never end
        at_once = max(0, window.left - window.open_groups) if window.step == window.newest else 0
        self._wanted = (max(at_once, newest / self._kept), older / self._kept)

    def _usual_s(self) -> float:
        """How long a step takes the trainer without any wait."""
        return sorted(self._training_s)[len(self._training_s) // QUICK]

    def _next_s(self, now_s: float, window: Window) -> float:
        """When the next version is published, if the trainer waits no more than it has to."""
        training_s = self._usual_s()
        full = window.step > window.newest
        return max(now_s, self._opened_s + training_s, (self._filled_s if full else now_s) + self._lead * training_s)

    def _demand(self, now_s: float, ahead_s: Column, window: Window) -> Column:
        """Groups that the trainer takes from now until then."""
        step_groups, training_s = window.groups_per_step, self._usual_s()
        at_s, next_s = now_s + ahead_s, self._next_s(now_s, window)
        open_steps = (at_s - next_s) / training_s  # since the next one opens
        demand = np.zeros(len(ahead_s))
        for step in range(window.size):
            since = open_steps - step
            demand += np.where(since >= 0.0, np.minimum(1.0, since + self._lead), 0.0) * step_groups
        if window.step == window.newest:
            share = np.minimum(1.0, (at_s - self._opened_s) / training_s + self._lead)
            demand += np.maximum(0.0, share * step_groups - (step_groups - window.left))
        return demand


def _unfinished_groups(requests: Table, rows: Column, ahead_tokens: Column) -> Column:
    """Groups that are expected to lack a response after so many tokens more of each. Shape of ``ahead_tokens``."""
    if not len(rows):
        return np.zeros(len(ahead_tokens))
    tokens = requests["tokens"][rows]
    remaining = np.maximum(requests["expected"][rows] - tokens, 1)
    log_mean, log_sd, most = (requests[name][rows] for name in ("log_mean", "log_sd", "max_tokens"))
    runs = running_chance(remaining, log_mean, log_sd, tokens, most, ahead_tokens)
    groups = requests["group"][rows]
    if not log_sd.any():
        return np.array([np.count_nonzero(np.bincount(groups, weights=column)) for column in runs.T])
    ended = np.log1p(-np.minimum(runs, SURELY))
    return np.array([(1.0 - np.exp(np.bincount(groups, weights=column))).sum() for column in ended.T])
