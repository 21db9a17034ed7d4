"""KV that the admitted requests of each version will hold, against the KV that the version is to have by then."""

import numpy as np

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.policies.forecast import on_grid, rows_forecast
from dora.orchestrator.core.policies.lifespan import Lifespan
from dora.orchestrator.core.state import RequestStatus
from dora.orchestrator.core.table import Column

REFRESH_S = 5.0  # the forecast is made anew after this, or after this share of a step: in between it only grows
REFRESH_STEP = 0.02
SKEW = 0.25  # prompts that wait cost this share more than those drawn: from here on steps are expected to be longer
SAFETY = 1.04  # a token takes this much longer than of late
LOSS = 1.04  # a step takes this much longer than the work of its responses on KV that is always full
SHORTEST_STEP = 0.8  # of the mean time between publishes: a step is not expected to be shorter
GRID = np.array(
    [0, 250, 500, 750, 1000, 1500, 2000, 3000, 4000, 5500, 7000, 9000, 11000, 13500, 16000, 19000, 22000, 25500.0]
)


class Reservations:
    """Made from the floor every few seconds; ``reserve`` counts a group in between."""

    def __init__(self, fill: float) -> None:
        """``fill``: share of a DP group's KV that may be reserved."""
        self._fill = fill
        self._made_s = 0.0
        self._members = 0
        self._reserved: dict[int, Column] = {}  # version -> KV on GRID
        self._limit: dict[int, Column] = {}
        self.token_s = 0.0  # seconds a token takes
        self.lifespan: Lifespan | None = None  # None: how long steps and tokens take is not known yet

    def refresh(self, floor: Floor) -> bool:
        """Makes the forecast anew where it is old; says whether it did."""
        made = bool(floor.rhythm.step_s and floor.rhythm.pace_s) and self._stale(floor)
        if made:
            self._made_s, self._members = floor.now_s, floor.members
            self.token_s = SAFETY * floor.rhythm.pace_s
            self.lifespan = _lifespan(floor)
            self._forecast(floor, self.lifespan)
        return made

    def _stale(self, floor: Floor) -> bool:
        if self.lifespan is None or floor.newest != self.lifespan.newest or floor.members != self._members:
            return True
        return floor.now_s - self._made_s >= min(REFRESH_S, REFRESH_STEP * self.lifespan.step_s)

    def limit_tokens(self, floor: Floor, version: int) -> float:
        """The longest response that can begin now and end by its version's deadline."""
        assert self.lifespan is not None
        return (self.lifespan.end_s(version) - floor.now_s) / self.token_s

    def reserve(self, version: int, entry: Entry, late: bool = False) -> bool:
        """Counts the group of a prompt in where its KV fits from now to its end, and says whether it did.

        ``late``: it will end after the deadline whatever is done; its KV need only fit as far as the version goes.
        """
        lengths = np.asarray(entry.lengths)
        more = on_grid(np.full(len(lengths), float(entry.prompt.prompt_tokens)), lengths, GRID)
        reserved, limit = self._reserved[version] + more, self._limit[version]
        over = (reserved > limit) & (more > 0)
        if late:
            over &= limit > 0
        if over.any():
            return False
        self._reserved[version] = reserved
        return True

    def _forecast(self, floor: Floor, lifespan: Lifespan) -> None:
        status = floor.requests["status"]
        rows = np.flatnonzero((status == RequestStatus.WAITING) | (status == RequestStatus.RUNNING))
        versions = floor.requests["version"][rows]
        kv_tokens = floor.kv_tokens() / max(1, lifespan.groups)
        for known in self._reserved.keys() - set(floor.versions()):
            del self._reserved[known], self._limit[known]
        for version in floor.versions():
            self._reserved[version] = rows_forecast(floor, rows[versions == version], GRID)[0]
            hosts = lifespan.hosts(version, floor.now_s + self.token_s * GRID)
            hosts[0] = max(hosts[0], len(floor.hosts(version)))
            self._limit[version] = self._fill * kv_tokens * hosts


def _lifespan(floor: Floor) -> Lifespan:
    """Steps as short as the KV allows, so that stragglers do not set their length; a late publish moves what follows.

    Nor shorter: steps are, while long prompts are left waiting, and would then leave ever more of them. The more those
    that wait cost, the nearer to the steps seen: what sets their length, a trainer perhaps, leaves time for long ones.

    A step cannot end before the groups that it lacks have finished, and they finish at the rate of a step's in a step.
    """
    rhythm, window = floor.rhythm, floor.window
    kv_step_s = LOSS * rhythm.kv_step_s(window.groups_per_step, floor.kv_tokens())
    left_out = floor.backlog.mean_work / rhythm.group_work - 1.0 if rhythm.group_work else 0.0
    shortest = min(1.0, SHORTEST_STEP + (1.0 - SHORTEST_STEP) * max(0.0, left_out - SKEW) / SKEW)
    step_s = max(kv_step_s, shortest * rhythm.step_s)
    lacking_s = floor.lacking() * step_s if window.step == floor.newest else 0.0
    next_s = max(rhythm.published_s + step_s, floor.now_s + 1.0 + lacking_s)
    groups = floor.groups()
    versions = max(1, min(window.size, groups))  # each needs a DP group of its own
    return Lifespan(groups, versions, floor.newest, rhythm.published_s, next_s, step_s)
