"""Admission by freshness: a group begins when a step will need it, under the newest version that can have it ready in
time.

Every group that is open when a version is published becomes one version staler. Mean staleness is therefore the number
of groups open at a publish, in steps' worth, plus the age of the versions under which groups begin. It is minimised
while the trainer waits for at most ``window.freshness`` of a step's time. At any moment

    shortage(u) = demand(u) - supply(u) - later(u)

is the number of groups that the trainer will lack in ``u`` seconds if nothing begins now. Its maximum over ``u``, from
now to the end of the window, is the number of groups wanted.

- *demand*: the groups that the trainer takes until then if it never waits: a step's groups evenly over ``training_s``,
  and all of them a ``lead`` before its end. Both are observed: the time of a step less the trainer's wait, and the
  share of that time after the step's last group. The share is 1 for a trainer that waits for its whole batch; for a
  streaming one it is lowered until the trainer waits.
- *supply*: finished groups, and the running groups that are expected to finish until then, by the belief about each
  response's length, given its present length, and the pace of tokens.
- *later*: the groups that could still finish until then if they began later. For the newest version, they begin once
  the next one is published, which is fresher by one; for an older version, now, under the newest. They begin after the
  time that a group takes, and come no faster than all workers generate.

If generation does not keep up, ``later`` falls ever further behind ``demand``, and everything that the window allows
begins. If it keeps up, the groups wanted until those of the next version are ready begin right after a publish, and
then nothing more. Forecasts err: after a step in which the trainer waited though groups were held back, more are begun;
after other steps that surplus shrinks.

With an adaptive window whose trainer reports the policy's movement, staleness has a price: the share of the time to a
level that one version less saves (forecast/staleness.py). The last groups that prevent a wait prevent it rarely. If the
need for more than ``k`` steps' worth falls as exp(-k / SPREAD), the wait that is worth its freshness is SPREAD times
the price. It is permitted if it is above ``window.freshness``.
"""

from collections import deque
from collections.abc import Mapping
from math import ceil, inf
from typing import Any, Final

import numpy as np

from dora.core.forecast.lognormal import running_chance
from dora.core.groups.window import Window
from dora.core.table import Column, Table

LAST_STEPS: Final = 8  # number of training times kept
QUICK: Final = 4  # a quarter of them are shorter than the one that counts: one slow step must not slow the next ones
LOOK_STEP: Final = 1 / 64  # of a step: maximal age of the forecast,
LOOK_REQUESTS: Final = 1 << 20  # or this number divided by that of unfinished requests: a forecast scans all of them
LOSS: Final = 1.25  # assumed step time over that with slots or KV always full
STREAMS: Final = 0.9  # below this lead a trainer trains on a step's first groups before it has the last
LEAD_TRIED: Final = 0.95  # factor of the lead after each step without waits
SMOOTHING: Final = 1 / 64  # weight of one group in running means
SURELY: Final = 1.0 - 1e-12  # a chance
STOCK_KEPT: Final = 0.9  # factor of the stock after each step without waits
STOCK_MAX: Final = 1.0  # steps' worth: waits that more stock does not end have another cause
SPREAD: Final = 0.05  # steps' worth: mean error of the forecast where it errs
_RESTORED: Final = ("_lead", "_group_s", "_kept", "_stock", "_held_back")


class Freshness:
    """The number of groups wanted now. Until a step has been observed, it is as many as may begin."""

    def __init__(self, freshness: float) -> None:
        """The trainer may wait for fresher groups for ``freshness`` of a step's time. With 0 none is held back."""
        self._freshness = freshness
        self.price = 0.0  # of a version of staleness, as a share of the time to a level
        self._opened_s = self._filled_s = 0.0  # times at which the last step was requested and filled
        self._training_s: deque[float] = deque(maxlen=LAST_STEPS)
        self._lead = 1.0
        self._group_s = 0.0  # from admission to the last score; 0: unknown
        self._kept = 1.0  # share of the finished groups that no filter cancels
        self._stock = 0.0  # steps' worth of groups wanted beyond the forecast
        self._held_back = False  # since the last publish
        self._made_s = -inf
        self._made_for = (-1, -1)  # newest version, step
        self._needed = (0.0, 0.0)  # groups: of the newest version, of an older one
        self._begun = 0  # groups begun since the forecast
        self._look_step = LOOK_STEP

    # ------------------------------------------------------------------------------------------------- what is seen

    def opened(self, now_s: float) -> None:
        """The trainer has requested the next step's groups."""
        self._opened_s, self._made_s = now_s, -inf

    def filled(self, now_s: float) -> None:
        self._filled_s = now_s

    def published(self, now_s: float, waited_s: float) -> None:
        """The step was trained. ``waited_s`` is the trainer's wait for groups, negative if unknown."""
        self._made_s = -inf
        if waited_s < 0.0:
            self._training_s.clear()
            return
        took_s = max(now_s - self._opened_s, 1e-9)
        training_s = max(took_s - waited_s, 1e-3 * took_s)
        self._training_s.append(training_s)
        # at most the time after the last group: less if the step was filled before the trainer needed it
        self._lead = min(self._lead, (now_s - self._filled_s) / training_s)
        over = waited_s / took_s - self._permitted
        if over <= 0.0:
            self._stock *= STOCK_KEPT
            self._lead *= LEAD_TRIED if self._lead < STREAMS else 1.0
        elif self._held_back:
            self._lead = min(1.0, self._lead / LEAD_TRIED**2)
            self._stock = min(STOCK_MAX, self._stock + over)  # the groups that it would have trained on meanwhile
        self._held_back = False

    def finished(self, took_s: float) -> None:
        """A group's last response was scored, this long after its admission."""
        self._kept += SMOOTHING * (1.0 - self._kept)
        self._group_s += (SMOOTHING if self._group_s else 1.0) * (took_s - self._group_s)

    def cancelled(self) -> None:
        self._kept = max(0.01, self._kept - SMOOTHING / (1.0 - SMOOTHING))

    def admitted(self) -> None:
        self._begun += 1

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """The estimates as plain values; times as ages."""
        values = {name: getattr(self, name) for name in _RESTORED}
        ago_s = [now_s - self._opened_s, now_s - self._filled_s]
        return values | {"ago_s": ago_s, "training_s": list(self._training_s)}

    def restore(self, values: Mapping[str, Any], now_s: float) -> None:
        for name in _RESTORED:
            setattr(self, name, values[name])
        self._opened_s, self._filled_s = (now_s - ago_s for ago_s in values["ago_s"])
        self._training_s.extend(values["training_s"])

    # --------------------------------------------------------------------------------------------------- what is said

    @property
    def acts(self) -> bool:
        """Returns whether groups may be held back: only after the times of a step and of a group are known."""
        return bool(self._freshness and self._training_s and self._group_s)

    def is_old(self, now_s: float, window: Window) -> bool:
        if (window.newest, window.step) != self._made_for:
            return True
        return now_s - self._made_s >= self._look_step * self._usual_s()

    def needed(self, *, newest: bool) -> int:
        """Groups that should begin now, under the newest version or an older one. Call ``look`` first."""
        left = ceil(self._needed[0 if newest else 1] - self._begun)
        if left < 1 and newest:
            self._held_back = True
        return left

    def look(self, now_s: float, window: Window, pace_s: float, requests: Table, rows: Column, room: float) -> None:
        """Makes the forecast. ``pace_s`` is the time of a response's token, pauses included, or 0 if unknown. ``rows``
        are those of unfinished requests, and ``room`` is the steps per second of all workers.
        """
        self._made_s, self._made_for, self._begun = now_s, (window.newest, window.step), 0
        self._look_step = max(LOOK_STEP, len(rows) / LOOK_REQUESTS)
        training_s, group_s = self._usual_s(), self._group_s
        next_s = self._next_s(now_s, window) - now_s
        end_s = next_s + group_s + (window.size - 1) * training_s
        ahead_s = np.array([group_s, 0.5 * next_s, next_s, next_s + 0.5 * group_s, next_s + group_s, end_s])
        unfinished = _unfinished_groups(requests, rows, ahead_s / pace_s) if pace_s else np.zeros(1)
        step_groups = float(window.groups_per_step)
        lacking = self._demand(now_s, ahead_s, window) - self._kept * (window.open_groups - unfinished)
        more = (self._stock - self._permitted) * step_groups
        later = [room * step_groups * np.maximum(0.0, ahead_s - begin_s - group_s) for begin_s in (next_s, 0.0)]
        newest, older = (float((lacking - each).max()) + more for each in later)
        # groups that the trainer's present step lacks, whatever the forecast: otherwise it might never end
        at_once = max(0, window.left - window.open_groups) if window.step == window.newest else 0
        self._needed = (max(at_once, newest / self._kept), older / self._kept)

    @property
    def _permitted(self) -> float:
        return max(self._freshness, SPREAD * self.price)

    def _usual_s(self) -> float:
        return sorted(self._training_s)[len(self._training_s) // QUICK]

    def _next_s(self, now_s: float, window: Window) -> float:
        """The expected time of the next publish, without needless waits."""
        training_s = self._usual_s()
        full = window.step > window.newest
        return max(now_s, self._opened_s + training_s, (self._filled_s if full else now_s) + self._lead * training_s)

    def _demand(self, now_s: float, ahead_s: Column, window: Window) -> Column:
        step_groups, training_s = window.groups_per_step, self._usual_s()
        at_s, next_s = now_s + ahead_s, self._next_s(now_s, window)
        open_steps = (at_s - next_s) / training_s  # after the next one opens
        demand = np.zeros(len(ahead_s))
        for step in range(window.size):
            since = open_steps - step
            demand += np.where(since >= 0.0, np.minimum(1.0, since + self._lead), 0.0) * step_groups
        if window.step == window.newest:
            share = np.minimum(1.0, (at_s - self._opened_s) / training_s + self._lead)
            demand += np.maximum(0.0, share * step_groups - (step_groups - window.left))
        return demand


def _unfinished_groups(requests: Table, rows: Column, ahead_tokens: Column) -> Column:
    """The groups expected to lack a response after so many more tokens of each. Shape of ``ahead_tokens``."""
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
