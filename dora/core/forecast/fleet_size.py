"""The number of workers with which steps cost least (StreamRL section 4.2, for a fleet that may also shrink).

Generation's work is what the fleet's engines held, in worker-seconds a step: the mean share of slots or KV in use,
times the workers, times the step. ``n`` workers need at least ``work / (FILL * n)`` seconds for it. If the fleet was
full, a step can get as short as its training; if not, it waited for something that no worker shortens: one long
response, an environment. A step's cost is its time, times one for the rest of the cluster and ``price`` for each
worker.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

LOOK_STEPS: Final = 8  # the latest steps of one number of workers
FILL: Final = 0.6  # mean share of slots or KV that a full fleet holds: steps differ
GAIN_MIN: Final = 0.02  # of a step's cost, that a change must save


@dataclass(frozen=True, slots=True)
class FleetWish:
    """A number of workers, with the reason as the end of a sentence."""

    workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Step:
    took_s: float
    trained_s: float
    work: float  # worker-seconds


class FleetSize:
    """Holds the measurements of the latest steps. ``price`` is that of a worker in units of the rest of the cluster."""

    def __init__(self, price: float, cooldown_s: float) -> None:
        self._price, self._cooldown_s = price, cooldown_s
        self._steps: deque[_Step] = deque(maxlen=LOOK_STEPS)
        self._workers = 0
        self._changed_s = 0.0  # when the number of workers changed last
        self._is_changed = False  # within the present step, which does not count
        self._used = self._looks = 0.0

    def looked(self, now_s: float, workers: int, used: float) -> None:
        """Enters a sample of the share of slots or KV in use, whichever is larger."""
        if workers != self._workers:
            self._workers, self._changed_s, self._is_changed = workers, now_s, True
            self._steps.clear()
        self._used += used
        self._looks += 1

    def committed(self, took_s: float, waited_s: float) -> None:
        """Enters a step: its time, and the part in which the trainer waited for groups."""
        used, self._used, looks, self._looks = self._used, 0.0, self._looks, 0.0
        is_changed, self._is_changed = self._is_changed, False
        if is_changed or not looks or took_s <= 0.0:
            return
        self._steps.append(_Step(took_s, took_s - waited_s, self._workers * used / looks * took_s))

    def wish(self, now_s: float, least: int, most: int) -> FleetWish | None:
        """Returns the number of workers from ``least`` to ``most`` that is to be, or None while it is unknown."""
        workers = self._workers
        if not least <= workers <= most:
            return FleetWish(min(max(workers, least), most), f"{least} to {most} workers are allowed")
        if len(self._steps) < LOOK_STEPS or not workers:
            return None
        took_s, trained_s, work = np.mean([(each.took_s, each.trained_s, each.work) for each in self._steps], axis=0)
        used = work / (took_s * workers)
        allowed = np.arange(least, most + 1)
        shortest_s = trained_s if used >= FILL else took_s
        costs = np.maximum(shortest_s, work / (FILL * allowed)) * (1.0 + self._price * allowed)
        best = int(costs.argmin())
        why = (
            f"{used:.0%} of slots or KV are in use, and the trainer waits for {1.0 - trained_s / took_s:.0%} of a step"
        )
        if now_s - self._changed_s < self._cooldown_s:
            return FleetWish(workers, f"{why}; the fleet has changed less than {self._cooldown_s:.0f} s ago")
        if costs[best] > (1.0 - GAIN_MIN) * costs[workers - least]:
            return FleetWish(workers, why)
        return FleetWish(int(allowed[best]), why)
