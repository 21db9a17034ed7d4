"""DORA's own strategy: lazy admission, KV reserved along each version's life, workers handed on by a schedule."""

from collections import defaultdict
from itertools import islice

import numpy as np

from dora.config import BalanceConfig
from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.plan import Move, Plan, Trigger
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.laxity.allocation import Allocation
from dora.orchestrator.core.policies.laxity.reservations import Reservations, rows_forecast
from dora.orchestrator.core.policies.laxity.tuning import TUNING
from dora.orchestrator.core.policies.targets import living_targets
from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.worker import Worker

ENGINE_GRID = np.array(TUNING.engine_tokens)


class LaxityPolicy(BasePolicy):
    """What it keeps between calls are caches of what the core shows: docs/strategy.md lists how each is made again."""

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._reservations = Reservations()
        self._forecasts: dict[int, list[float]] = {}  # seat -> KV on ENGINE_GRID, within one dispatch
        self._no_fit: set[int] = set()  # versions that no prompt fits: nor will one before the next forecast or prompt
        self._arrivals = 0
        self._newest = self._leader = -1  # the latter as last planned
        self._waited = 0  # prompts that had ever come when the newest version began its first
        self._caps: dict[int, tuple[int, float]] = {}  # seat -> version, KV that it is to hold at most: as last planned

    def dispatch(self, floor: Floor) -> None:
        self._forecasts.clear()
        if floor.newest != self._newest or not any(worker.held for worker in floor.hosts(floor.newest)):
            self._newest, self._waited = floor.newest, floor.backlog.arrivals
        if self._reservations.refresh(floor) or floor.backlog.arrivals != self._arrivals:
            self._no_fit.clear()
            self._arrivals = floor.backlog.arrivals
        super().dispatch(floor)

    def room(self, floor: Floor, worker: Worker) -> float:
        free_slots = worker.slots - worker.held
        if not worker.held:  # whatever its last report said
            return 1.0
        if free_slots <= 0 or worker.waiting:  # what waits inside the engine goes first
            return 0.0
        peak = max(self._forecast(floor, worker)) / worker.kv_tokens
        return min(free_slots / worker.slots, self._most(worker) / worker.kv_tokens - peak)

    def fits(self, floor: Floor, row: int, worker: Worker) -> bool:
        if not worker.held:
            return True
        context = floor.context_tokens(row)
        left = max(1.0, float(floor.requests["expected"][row]) - float(floor.requests["tokens"][row]))
        ahead = zip(self._forecast(floor, worker), TUNING.engine_tokens, strict=True)
        forecast = [kv + (context + tokens) if left > tokens else kv for kv, tokens in ahead]
        if max(forecast) > self._most(worker):
            return False
        self._forecasts[worker.seat] = forecast
        return True

    def ration(self, floor: Floor, version: int) -> int | None:
        """An even share where KV is ample; where it is short, the first worker that has the version is filled."""
        return self.even_share(floor, version) if self._reservations.last.ample else None

    def choose(self, floor: Floor, version: int) -> Entry | None:
        schedule = self._reservations.schedule
        if schedule is None:
            return floor.backlog.first()
        entry = None
        if version not in self._no_fit:
            due, limit = schedule.due(version), self._reservations.limit_tokens(floor, version)
            if not due:
                entry = self._late(floor, version, self._waited)
                if entry is None and (self._reservations.last.ample or not self._sparse(floor, version)):
                    entry = self._first(floor, version, limit)
            entry = entry or self._longest(floor, version, limit)
            if entry is None and not due:  # rather than nothing
                entry = self._late(floor, version, floor.backlog.arrivals)
        if entry is None:
            self._no_fit.add(version)
            if version == schedule.leader and not any(worker.held for worker in floor.hosts(version)):
                return floor.backlog.first()  # whatever the forecasts say: there is nothing to wait for
        return entry

    def _late(self, floor: Floor, version: int, arrivals: int) -> Entry | None:
        """Right after a publish, the longest of the first so many prompts where it will be late in any case.

        One that has come since would hold the version's last step up for as much longer: it lets others begin first.
        """
        rhythm, reservations = floor.rhythm, self._reservations
        if version != floor.newest or floor.now_s - rhythm.published_s >= TUNING.early_step * rhythm.step_s:
            return None
        entry = floor.backlog.longest_beyond(reservations.reach_tokens(floor, version), arrivals)
        return entry if entry is not None and reservations.reserve(version, entry, late=True) else None

    def _first(self, floor: Floor, version: int, limit: float) -> Entry | None:
        """The one that waits longest of those that fit."""
        short = (entry for entry in floor.backlog if entry.longest_tokens <= limit)
        tried = islice(short, TUNING.tries)
        return next((entry for entry in tried if self._reservations.reserve(version, entry)), None)

    def _longest(self, floor: Floor, version: int, limit: float) -> Entry | None:
        """The longest that fits of the first TUNING.reach prompts; of all, where none of these does."""
        near = [entry for entry in islice(floor.backlog, TUNING.reach) if entry.longest_tokens <= limit]
        for entry in sorted(near, key=lambda entry: -entry.longest_tokens):
            if entry.longest_tokens <= limit:
                if self._reservations.reserve(version, entry):
                    return entry
                limit = entry.longest_tokens * TUNING.step_down
        for _ in range(TUNING.tries // 2):
            far = floor.backlog.longest_within(limit)
            if far is None or self._reservations.reserve(version, far):
                return far
            limit = far.longest_tokens * TUNING.step_down
        return None

    def _sparse(self, floor: Floor, version: int) -> bool:
        """Whether this version's slots would run out before its KV."""
        hosts = floor.hosts(version)
        slots, kv_tokens = sum(worker.slots for worker in hosts), sum(worker.kv_tokens for worker in hosts)
        held, kv = sum(worker.held for worker in hosts), sum(worker.kv_expected for worker in hosts)
        return bool(slots) and held / slots > kv / kv_tokens + TUNING.dense

    def _forecast(self, floor: Floor, worker: Worker) -> list[float]:
        """KV of a worker after TUNING.engine_tokens. Plain numbers: numpy takes longer for so few."""
        forecast = self._forecasts.get(worker.seat)
        if forecast is None:
            rows = np.fromiter(worker.rows, dtype=np.int64, count=len(worker.rows))
            held, context = rows_forecast(floor, rows, ENGINE_GRID)
            # token counts may be old: the engine's own sum is newer
            forecast = self._forecasts[worker.seat] = (held + (worker.kv_expected - context)).tolist()
        return forecast

    def observe(self, floor: Floor) -> None:
        """The schedule as of now: a plan at a publish hands workers on by the step that begins, not by the last."""
        self._reservations.observe(floor)

    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        allocation = self._allocation(snapshot)
        targets = allocation.targets()
        self._reservations.last.ample, self._leader = allocation.ample, allocation.leader
        return Plan(targets, self._moves(snapshot, allocation, targets))

    def successor(self, floor: Floor) -> int | None:
        """Where KV is ample the newest version: a plan would say the same, in a thousand times as long."""
        leads = self._leader == floor.newest and any(worker.held for worker in floor.hosts(floor.newest))
        return floor.newest if self._reservations.last.ample and leads else None

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        return self._moves(snapshot, self._allocation(snapshot), living_targets(snapshot))

    def _allocation(self, snapshot: Snapshot) -> Allocation:
        last = self._reservations.last
        # at a publish without an older version no group is left to know it by
        last.group_kv_tokens = snapshot.group_kv_tokens or last.group_kv_tokens
        return Allocation(snapshot, self._reservations.schedule, last)

    def _moves(self, snapshot: Snapshot, allocation: Allocation, targets: dict[int, int]) -> tuple[Move, ...]:
        moves, reserved = allocation.moves(targets)
        loaded, kv_tokens = snapshot.workers.loaded, snapshot.workers.kv_tokens
        self._caps = {seat: (int(loaded[seat]), worker.kv_tokens) for seat, worker in reserved.by_seat.items()}
        kept_free: dict[int, float] = defaultdict(float)
        for seat, (version, most) in self._caps.items():
            kept_free[version] += TUNING.fill * float(kv_tokens[seat]) - most
        self._reservations.last.kept_free = kept_free
        return moves

    def _most(self, worker: Worker) -> float:
        """KV that a worker is to hold at most."""
        version, most = self._caps.get(worker.seat, (-1, 0.0))
        if version == worker.hosts:
            return most
        return (TUNING.believed_fill if self._reservations.believed else TUNING.fill) * worker.kv_tokens
