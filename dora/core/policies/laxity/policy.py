"""DORA's own strategy: lazy admission, KV reserved along each version's life, workers reassigned by a schedule."""

from collections import defaultdict
from itertools import islice
from math import inf

import numpy as np

from dora.config import BalanceConfig
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.groups.queues import QueuedPrompt
from dora.core.plan import Move, Plan, Trigger
from dora.core.policies.base import BasePolicy
from dora.core.policies.laxity.allocation import Allocation
from dora.core.policies.laxity.reservations import Reservations, rows_forecast
from dora.core.policies.laxity.tuning import TUNING
from dora.core.policies.targets import living_targets
from dora.core.view import View

ENGINE_GRID = np.array(TUNING.engine_tokens)


class LaxityPolicy(BasePolicy):
    """The default policy. Its fields are caches of the core's state; docs/strategy.md says how each is rebuilt."""

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._reservations = Reservations()
        self._forecasts: dict[int, list[float]] = {}  # index -> KV on ENGINE_GRID, within one dispatch
        self._ceilings: dict[int, float] = {}  # index -> bound of its forecast, within one dispatch
        self._no_fit: set[int] = set()  # versions that no prompt fits until the next forecast or prompt
        self._changes = 0  # the backlog's change counter at the last check
        self._newest = self._leader = -1  # ``_leader``: of the last plan
        self._waited = 0  # total prompt arrivals when the newest version began its first request
        self._caps: dict[int, tuple[int, float]] = {}  # index -> version, and the KV limit from the last plan

    def dispatch(self, dispatcher: Dispatcher) -> None:
        self._forecasts.clear()
        self._ceilings.clear()
        if dispatcher.newest != self._newest or not any(
            worker.assigned for worker in dispatcher.workers_of(dispatcher.newest)
        ):
            self._newest, self._waited = dispatcher.newest, dispatcher.backlog.arrivals
        if self._reservations.refresh(dispatcher) or dispatcher.backlog.changes != self._changes:
            self._no_fit.clear()
            self._changes = dispatcher.backlog.changes
        super().dispatch(dispatcher)

    def room(self, dispatcher: Dispatcher, worker: Worker) -> float:
        free_slots = worker.slots - worker.assigned
        if worker.is_empty:  # regardless of its last report
            return 1.0
        if free_slots <= 0 or worker.waiting:  # requests that wait inside the engine go first
            return 0.0
        share, most = free_slots / worker.slots, self._most(worker)
        if self._ceiling(dispatcher, worker) <= most - share * worker.kv_tokens:
            return share
        return min(share, (most - max(self._forecast(dispatcher, worker))) / worker.kv_tokens)

    def fits(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        if dispatcher.are_unlike and self._waits_for_faster(dispatcher, row, worker):
            return False
        if worker.is_empty:
            return True
        requests, context, most = dispatcher.requests, dispatcher.context_tokens(row), self._most(worker)
        left = max(1, int(requests["expected"][row]) - int(requests["tokens"][row]))
        if (ceiling := self._ceiling(dispatcher, worker)) < inf:
            ceiling += context + max(left, int(requests["max_tokens"][row]) - int(requests["tokens"][row]))
            if ceiling <= most:
                self._ceilings[worker.index] = ceiling
                return True
        ahead = zip(self._forecast(dispatcher, worker), TUNING.engine_tokens, strict=True)
        forecast = [kv + (context + tokens) if left > tokens else kv for kv, tokens in ahead]
        if max(forecast) > most:
            return False
        self._forecasts[worker.index] = forecast
        return True

    def _waits_for_faster(self, dispatcher: Dispatcher, row: int, worker: Worker) -> bool:
        """Returns whether the response would be late on this worker and a faster one of its version has room."""
        schedule, requests, version = self._reservations.schedule, dispatcher.requests, worker.hosts
        if schedule is None:
            return False
        left = max(1, int(requests["expected"][row]) - int(requests["tokens"][row]))
        token_s, left_s = dispatcher.token_s_on(worker), schedule.end_s(version) - dispatcher.now_s
        if TUNING.safety * token_s * left <= left_s:
            return False
        context = dispatcher.context_tokens(row)
        return any(
            dispatcher.token_s_on(other) < TUNING.faster * token_s
            and self.room(dispatcher, other) * other.kv_tokens >= context
            for other in dispatcher.candidates(version)
        )

    def ration(self, dispatcher: Dispatcher, version: int) -> int | None:
        """An even share if KV is ample. If it is short, the first worker that has the version is filled."""
        return self.even_share(dispatcher, version) if self._reservations.last.ample else None

    def choose(self, dispatcher: Dispatcher, version: int) -> QueuedPrompt | None:
        schedule = self._reservations.schedule
        if schedule is None:
            return dispatcher.backlog.first()
        entry = None
        if version not in self._no_fit:
            due, limit = schedule.due(version), self._reservations.limit_tokens(dispatcher, version)
            if not due:
                entry = self._late(dispatcher, version, self._waited)
                if entry is None and (self._reservations.last.ample or not self._sparse(dispatcher, version)):
                    entry = self._first(dispatcher, version, limit)
            entry = entry or self._longest(dispatcher, version, limit)
            if entry is None and not due:  # a late prompt is better than none
                entry = self._late(dispatcher, version, dispatcher.backlog.arrivals)
        if entry is None:
            self._no_fit.add(version)
            if version == schedule.leader and not any(worker.assigned for worker in dispatcher.workers_of(version)):
                return dispatcher.backlog.first()  # regardless of the forecast: the version has nothing to wait for
        return entry

    def _late(self, dispatcher: Dispatcher, version: int, arrivals: int) -> QueuedPrompt | None:
        """Right after a publish, the longest of the first ``arrivals`` prompts that will be late in any case.

        A later arrival would delay the version's last step by as much, so it lets others begin first.
        """
        rates, reservations = dispatcher.rates, self._reservations
        if version != dispatcher.newest or dispatcher.now_s - rates.published_s >= TUNING.early_step * rates.step_s:
            return None
        entry = dispatcher.backlog.longest_beyond(reservations.reach_tokens(dispatcher, version), arrivals)
        return entry if entry is not None and reservations.reserve(version, entry, late=True) else None

    def _first(self, dispatcher: Dispatcher, version: int, limit: float) -> QueuedPrompt | None:
        short = (entry for entry in dispatcher.backlog if entry.longest_tokens <= limit)
        tried = islice(short, TUNING.tries)
        return next((entry for entry in tried if self._reservations.reserve(version, entry)), None)

    def _longest(self, dispatcher: Dispatcher, version: int, limit: float) -> QueuedPrompt | None:
        """The longest prompt that fits among the first TUNING.reach; among all if none of these fits."""
        near = [entry for entry in islice(dispatcher.backlog, TUNING.reach) if entry.longest_tokens <= limit]
        for entry in sorted(near, key=lambda entry: -entry.longest_tokens):
            if entry.longest_tokens <= limit:
                if self._reservations.reserve(version, entry):
                    return entry
                limit = entry.longest_tokens * TUNING.step_down
        for _ in range(TUNING.tries // 2):
            far = dispatcher.backlog.longest_within(limit)
            if far is None or self._reservations.reserve(version, far):
                return far
            limit = far.longest_tokens * TUNING.step_down
        return None

    def _sparse(self, dispatcher: Dispatcher, version: int) -> bool:
        hosts = dispatcher.workers_of(version)
        slots, kv_tokens = sum(worker.slots for worker in hosts), sum(worker.kv_tokens for worker in hosts)
        assigned, kv = sum(worker.assigned for worker in hosts), sum(worker.kv_expected for worker in hosts)
        return bool(slots) and assigned / slots > kv / kv_tokens + TUNING.dense

    def _ceiling(self, dispatcher: Dispatcher, worker: Worker) -> float:
        """A bound of a worker's KV forecast in a fiftieth of its time: each request counts at its full length. It is
        infinite once the forecast is known.
        """
        if worker.index in self._forecasts:
            return inf
        ceiling = self._ceilings.get(worker.index)
        if ceiling is None:
            rows = np.fromiter(worker.rows, dtype=np.int64, count=len(worker.rows))
            tokens, expected, longest = (
                dispatcher.requests[name][rows] for name in ("tokens", "expected", "max_tokens")
            )
            left = np.maximum(np.maximum(expected, longest) - tokens, 1)
            ceiling = self._ceilings[worker.index] = worker.kv_expected + float(left.sum())
        return ceiling

    def _forecast(self, dispatcher: Dispatcher, worker: Worker) -> list[float]:
        """KV of a worker after TUNING.engine_tokens. Plain numbers are faster than numpy for so few values."""
        forecast = self._forecasts.get(worker.index)
        if forecast is None:
            rows = np.fromiter(worker.rows, dtype=np.int64, count=len(worker.rows))
            assigned, context = rows_forecast(dispatcher, rows, ENGINE_GRID)
            # token counts may be stale: the engine's own sum is newer
            forecast = self._forecasts[worker.index] = (assigned + (worker.kv_expected - context)).tolist()
        return forecast

    def observe(self, dispatcher: Dispatcher) -> None:
        """Updates the schedule, so that a plan at a publish assigns workers by the new step."""
        self._reservations.observe(dispatcher)

    def plan(self, view: View, trigger: Trigger) -> Plan:
        allocation = self._allocation(view)
        targets = allocation.targets()
        self._reservations.last.ample, self._leader = allocation.ample, allocation.leader
        return Plan(targets, self._moves(view, allocation, targets))

    def successor(self, dispatcher: Dispatcher) -> int | None:
        """The newest version if KV is ample. A plan would give the same answer and take a thousand times as long."""
        leads = self._leader == dispatcher.newest and any(
            worker.assigned for worker in dispatcher.workers_of(dispatcher.newest)
        )
        return dispatcher.newest if self._reservations.last.ample and leads else None

    def relieve(self, view: View) -> tuple[Move, ...]:
        return self._moves(view, self._allocation(view), living_targets(view))

    def _allocation(self, view: View) -> Allocation:
        last = self._reservations.last
        # at a publish, the newest version has no group to measure; without an older version the last value remains
        last.group_kv_tokens = view.group_kv_tokens or last.group_kv_tokens
        return Allocation(view, self._reservations.schedule, last)

    def _moves(self, view: View, allocation: Allocation, targets: dict[int, int]) -> tuple[Move, ...]:
        moves, reserved = allocation.moves(targets)
        loaded, kv_tokens = view.workers.loaded, view.workers.kv_tokens
        self._caps = {index: (int(loaded[index]), worker.kv_tokens) for index, worker in reserved.by_index.items()}
        kept_free: dict[int, float] = defaultdict(float)
        for index, (version, most) in self._caps.items():
            kept_free[version] += TUNING.fill * float(kv_tokens[index]) - most
        self._reservations.last.kept_free = kept_free
        return moves

    def _most(self, worker: Worker) -> float:
        version, most = self._caps.get(worker.index, (-1, 0.0))
        if version == worker.hosts:
            return most
        return (TUNING.believed_fill if self._reservations.believed else TUNING.fill) * worker.kv_tokens
