"""DORA's own strategy: lazy, laxity-filtered admission, KV kept full, DP groups partitioned by the KV they need.

What a strict window costs is mostly KV that lies idle: KV binds on long responses, a version's KV starts at nothing,
grows as its long responses grow, and must be gone by its deadline. So (docs/policies.md has the reasoning and numbers):

- a group is admitted only when a DP group has room, at that DP group's version, and only if its longest response can
  end before its deadline at the present pace; what cannot waits for the next publish and then goes first;
- a DP group is filled to the brim by a forecast of its KV, and no more long responses are admitted than the fleet can
  hold later on; where slots run out before KV, longer prompts are taken first;
- a DP group that holds a response with little laxity is filled only as far as that response keeps its pace;
- DP groups go to versions by the KV their requests need soon: a version that grows gets more, one that ends gives up.
"""

from math import inf

import numpy as np

from dora.config import BalanceConfig
from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.demand import Demand
from dora.orchestrator.core.policies.forecast import ENGINE_GRID, FleetForecast, rows_forecast
from dora.orchestrator.core.snapshot import Move, Plan, Snapshot, Trigger
from dora.orchestrator.core.state import Worker
from dora.orchestrator.core.table import Column

FILL = 0.97  # share of a DP group's KV that the forecast may reach
BLOCKED_SHARE = 0.05  # of a step in which a full window is nothing to worry about
HASTE = 0.9  # deadlines are reckoned with steps this much shorter than of late, so that stragglers do not set the pace
MARGIN_STEP = 0.06  # a response should end this share of a step before its deadline
SAFETY = 1.08  # a response takes this much longer than the present pace says
EARLY_STEP = 0.25  # for this share of a step after a publish, what could not start later goes first
NEAR_STEP = 0.25  # afterwards: what could not start within this share of a step goes first
DENSE = 0.10  # slots in use exceed KV in use by this share: longer prompts are taken
PACE_LEAST = 0.6  # a DP group is not kept faster than this share of the mean pace, whatever is late
TRIES = 8  # prompts looked at for one that the fleet can afford
SHORT_TOKENS = 2_500.0  # what fits nearly always


class LaxityPolicy(BasePolicy):
    """See the module. State between calls are caches of what the core shows; every decision follows from that."""

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._fleet = FleetForecast()
        self._forecasts: dict[int, Column] = {}  # seat -> KV on ENGINE_GRID, within one dispatch
        self._paces: dict[int, float] = {}  # seat -> slowest step that its most urgent response allows
        self._looks = self._blocked = 0  # of this step: plans, and those that found the window full
        self._tight = False  # the last step found the window full too often

    # --------------------------------------------------------------------------------------------------------- dispatch

    def dispatch(self, floor: Floor) -> None:
        self._forecasts.clear()
        self._paces.clear()
        super().dispatch(floor)

    def room(self, floor: Floor, worker: Worker) -> float:
        free_slots = worker.slots - worker.held
        if free_slots <= 0:
            return 0.0
        peak = float(self._forecast(floor, worker).max())
        return min(free_slots / worker.slots, FILL - peak / worker.kv_tokens)

    def fits(self, floor: Floor, row: int, worker: Worker) -> bool:
        if not worker.held:
            return True
        context = floor.context_tokens(row)
        left = max(1.0, float(floor.requests["expected"][row]) - float(floor.requests["tokens"][row]))
        forecast = self._forecast(floor, worker) + (context + ENGINE_GRID) * (left > ENGINE_GRID)
        if float(forecast.max()) > FILL * worker.kv_tokens or not self._keeps_pace(floor, worker, float(forecast[0])):
            return False
        self._forecasts[worker.seat] = forecast
        return True

    def choose(self, floor: Floor, version: int) -> Entry | None:
        backlog, rhythm = floor.backlog, floor.rhythm
        limit = self._limit_tokens(floor, version)
        if limit == inf:
            return backlog.first()
        if version == floor.newest:
            first = backlog.first()
            if first is not None and first.newest < version - 1:
                return first  # it was deferred before: once is enough
            early = floor.now_s - rhythm.published_s < EARLY_STEP * rhythm.step_s
            urgent = backlog.longest() if early else backlog.longest_within(limit)
            ahead = (1.0 if early else NEAR_STEP) * rhythm.step_s / rhythm.pace_s
            if urgent is not None and urgent.longest_tokens > limit - ahead and self._fleet.take(floor, urgent):
                return urgent
        return self._by_density(floor, version, limit) or self._first_affordable(floor, limit)

    def _by_density(self, floor: Floor, version: int, limit: float) -> Entry | None:
        """The longest that may start, where this version's slots would run out before its KV."""
        if self._tight:
            return None
        slots = held = kv_tokens = kv = 0
        for worker in floor.hosts(version):
            slots, held = slots + worker.slots, held + worker.held
            kv_tokens, kv = kv_tokens + worker.kv_tokens, kv + worker.kv_expected
        if not slots or held / slots <= kv / kv_tokens + DENSE:
            return None
        entry = floor.backlog.longest_within(limit)
        return entry if entry is not None and self._fleet.take(floor, entry) else None

    def _first_affordable(self, floor: Floor, limit: float) -> Entry | None:
        tries = 0
        for entry in floor.backlog:
            if entry.longest_tokens <= limit:
                if self._fleet.take(floor, entry):
                    return entry
                tries += 1
                if tries == TRIES:
                    break
        short = floor.backlog.longest_within(min(limit, SHORT_TOKENS)) if tries else None
        return short if short is not None and self._fleet.take(floor, short) else None

    def _limit_tokens(self, floor: Floor, version: int) -> float:
        """The longest response that can begin now and end before this version's deadline; ``inf``: not known yet."""
        rhythm = floor.rhythm
        deadline_s = floor.deadline_s(version, HASTE)
        if deadline_s == inf or not rhythm.pace_s:
            return inf
        return (deadline_s - MARGIN_STEP * rhythm.step_s - floor.now_s) / (SAFETY * rhythm.pace_s)

    def _forecast(self, floor: Floor, worker: Worker) -> Column:
        forecast = self._forecasts.get(worker.seat)
        if forecast is None:
            rows = np.fromiter(worker.rows, dtype=np.int64, count=len(worker.rows))
            forecast, context = rows_forecast(floor, rows, ENGINE_GRID)
            # token counts may be old: the engine's own sum is newer
            forecast = self._forecasts[worker.seat] = forecast + (worker.kv_expected - context)
        return forecast

    def _keeps_pace(self, floor: Floor, worker: Worker, kv_tokens: float) -> bool:
        """Whether one more request leaves the most urgent response of this DP group time to end."""
        if floor.cost is None:
            return True
        slowest_s = self._paces.get(worker.seat)
        if slowest_s is None:
            slowest_s = self._paces[worker.seat] = self._slowest_step_s(floor, worker)
        return floor.cost.decode_step_s(worker.held + 1, kv_tokens) <= slowest_s

    def _slowest_step_s(self, floor: Floor, worker: Worker) -> float:
        rhythm = floor.rhythm
        deadline_s = floor.deadline_s(worker.hosts, HASTE)
        if deadline_s == inf or not worker.rows:
            return inf
        rows = np.fromiter(worker.rows, dtype=np.int64, count=len(worker.rows))
        left = floor.requests["expected"][rows] - floor.requests["tokens"][rows]
        left_s = deadline_s - MARGIN_STEP * rhythm.step_s - floor.now_s
        return max(left_s / max(1.0, float(left.max())), PACE_LEAST * rhythm.pace_s)

    # ------------------------------------------------------------------------------------------------------------ plan

    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        self._look(snapshot, trigger)
        demand = Demand(snapshot, FILL)
        targets = demand.targets()
        return Plan(targets, demand.moves(targets))

    def _look(self, snapshot: Snapshot, trigger: Trigger) -> None:
        """A window that is often full says that steps wait for stragglers, not for work: no more long ones then."""
        if trigger is Trigger.UPDATE:
            self._tight = self._blocked > BLOCKED_SHARE * self._looks
            self._looks = self._blocked = 0
        elif trigger is Trigger.TIME:
            self._looks += 1
            self._blocked += snapshot.admissible.get(snapshot.newest, 0) < 1

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        alive = np.flatnonzero(snapshot.workers.alive)
        return Demand(snapshot, FILL).moves({int(seat): int(snapshot.workers.target[seat]) for seat in alive})
