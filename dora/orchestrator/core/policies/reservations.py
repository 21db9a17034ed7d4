"""KV that the admitted requests of each version will hold, against the KV that the version is to have by then."""

from math import exp

import numpy as np

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.policies import descent
from dora.orchestrator.core.policies.forecast import on_grid, rows_forecast
from dora.orchestrator.core.policies.lifespan import Lifespan
from dora.orchestrator.core.policies.outlook import FILL, SAFETY, lifespan_of
from dora.orchestrator.core.table import Column

# The forecast is made anew after this, or after this share of a step: in between it only grows. Where KV is ample, only
# after the latter.
REFRESH_S = 5.0
REFRESH_STEP = 0.02
# Share of the KV far ahead that is not reserved: publishes come early or late, and what begins later fills it with
# shorter responses. From HEADROOM_TOKENS ahead on, and in proportion before. Never that of more than HEADROOM_GROUPS
# DP groups: a version that is late holds one more than it should, however many it has.
HEADROOM = 0.15
HEADROOM_GROUPS = 0.9
HEADROOM_TOKENS = 8_000.0
HOLD_TOKENS = 6_000.0  # so far ahead a version fills the DP groups that it is late to give up
# A response may become longer than it is believed to: so many standard deviations of its logarithm, and so many times
# at most. It counts where another version is taken up soon.
RISK_SD = 1.5
RISK = 3.0
OUTMOST_SD = 3.0  # none is expected to become longer than this
UNHURRIED = 1.25  # a version with time for so many times that is in no hurry: prompts of any length begin
GRID = np.array(
    [0, 250, 500, 750, 1000, 1500, 2000, 3000, 4000, 5500, 7000, 9000, 11000, 13500, 16000, 19000, 22000, 25500.0]
)


class Reservations:
    """Made from the floor every few seconds; ``reserve`` counts a group in between."""

    def __init__(self) -> None:
        self._made_s = 0.0
        self._made_for = (-1, 0, 0)  # newest version, workers there were, and of these what was to stay
        self._reserved: dict[int, Column] = {}  # version -> KV on GRID
        self._limit: dict[int, Column] = {}
        self.token_s = 0.0  # seconds a token takes
        self.kept_free: dict[int, float] = {}  # version -> KV that its lanes keep free (lanes.py)
        self.group_kv_tokens = 0.0  # KV of a group at its end, as last seen
        self.ample = False  # there are far more DP groups than can be filled, as last planned
        self._log_sd = 0.0  # how unsure lengths are: standard deviation of their logarithms, on average
        self._most_tokens = 0.0  # no response is expected to become longer
        self.believed = False  # lengths are not known, of some of the unfinished requests at least
        self.lifespan: Lifespan | None = None  # None: how long steps and tokens take is not known yet

    def refresh(self, floor: Floor) -> bool:
        """Makes the forecast anew where it is old; says whether it did."""
        if not self._stale(floor):
            return False
        self.observe(floor)
        if self.lifespan is None:
            return False
        self._made_s, self._made_for = floor.now_s, _basis(floor)
        self._forecast(floor, self.lifespan)
        return True

    def observe(self, floor: Floor) -> None:
        """Makes the schedule anew where it is old, and nothing else: the forecast takes many times as long."""
        if floor.rhythm.step_s and floor.rhythm.pace_s and self._stale(floor):
            self.token_s = SAFETY * floor.rhythm.pace_s
            self.lifespan = lifespan_of(floor)

    def _stale(self, floor: Floor) -> bool:
        if self.lifespan is None or _basis(floor) != self._made_for:
            return True
        rest_s = REFRESH_STEP * self.lifespan.step_s
        return floor.now_s - self._made_s >= (rest_s if self.ample else min(REFRESH_S, rest_s))

    def limit_tokens(self, floor: Floor, version: int) -> float:
        """The longest response, as predicted, that is to begin now.

        Where lengths are only believed it may turn out much longer, and would hold a DP group of the due version nearly
        alone: it waits for the next version where some are passed over, else for the next publish (descent.py); unless
        it ends in time however long it becomes.
        """
        assert self.lifespan is not None
        lifespan, reach = self.lifespan, self.reach_tokens(floor, version)
        if not self.believed:
            return reach
        if lifespan.stride > 1:
            return reach / min(RISK, exp(RISK_SD * self._log_sd)) if reach < self._most_tokens else reach
        if reach >= UNHURRIED * self._most_tokens:
            return reach
        turn = descent.limit_tokens(floor.backlog, float(lifespan.age(version, floor.now_s)), lifespan.window)
        return min(reach, max(turn, reach / exp(OUTMOST_SD * self._log_sd)))

    def reach_tokens(self, floor: Floor, version: int) -> float:
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

    def _judge(self, floor: Floor, rows: Column) -> None:
        """How far beyond what is believed of them these may go."""
        log_mean, log_sd, most = (floor.requests[name][rows] for name in ("log_mean", "log_sd", "max_tokens"))
        self._log_sd = float(log_sd.mean()) if len(rows) else 0.0
        log_most = np.minimum(log_mean + OUTMOST_SD * log_sd, np.log(np.maximum(1, most)))
        self._most_tokens = float(np.exp(log_most.max(initial=0.0)))

    def _forecast(self, floor: Floor, lifespan: Lifespan) -> None:
        rows = floor.unfinished()
        self.believed = bool(floor.requests["log_sd"][rows].any())
        if self.believed:
            self._judge(floor, rows)
        versions = floor.requests["version"][rows]
        kv_tokens = max(1.0, FILL * floor.kv_tokens() / max(1, lifespan.groups))  # of one DP group
        for known in self._reserved.keys() - set(floor.versions()):
            del self._reserved[known], self._limit[known]
        spare = np.zeros(len(GRID))  # what versions that can admit no more do not need: the leading one can count on it
        for version in reversed(floor.versions()):
            self._reserved[version] = rows_forecast(floor, rows[versions == version], GRID)[0]
            kept_free = self.kept_free.get(version, 0.0)
            hosts = lifespan.hosts(version, floor.now_s + self.token_s * GRID)
            present = len(floor.hosts(version))
            needs = (self._reserved[version] + kept_free) / kv_tokens
            if version == lifespan.leader:
                hosts = np.maximum(0.0, hosts + spare)
            elif not lifespan.taken_up(version):  # one that the schedule does not know: what it holds, others lack
                hosts = np.minimum(np.ceil(needs), present)
                spare -= hosts
            elif floor.window.admissible(version) < 1:
                spare += np.maximum(0.0, hosts - np.ceil(needs))
                hosts = np.minimum(hosts, np.ceil(needs))
            else:
                hosts = np.maximum(hosts, held_on(needs, present))
            hosts[0] = max(hosts[0], present)
            # where the longest cannot end in time on full DP groups they need all the KV there is, as early as can be
            if not lifespan.hurried:
                hosts = hosts - unreserved(hosts)
            self._limit[version] = kv_tokens * hosts - kept_free


def _basis(floor: Floor) -> tuple[int, int, int]:
    return floor.newest, floor.members, floor.groups()


def unreserved(hosts: Column) -> Column:
    """How many of a version's ``hosts`` DP groups, at each point of GRID, are left for what begins later."""
    ahead: Column = np.minimum(1.0, GRID / HEADROOM_TOKENS)
    return ahead * np.minimum(HEADROOM * hosts, HEADROOM_GROUPS)


def held_on(needs: Column, hosts: int) -> Column:
    """DP groups that a version of ``hosts`` will not have given up by each point of GRID, whatever the schedule says.

    Its longest responses began when the schedule was a little later, and now end a little after it. Until then it can
    as well fill what they leave free, with what ends before them. ``needs``: DP groups, in parts, for all it admitted.
    """
    held = np.where(GRID <= HOLD_TOKENS, np.minimum(np.ceil(needs - HEADROOM), hosts), 0.0)
    until: Column = np.maximum.accumulate(held[::-1])[::-1]
    return until
