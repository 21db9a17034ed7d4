"""Decides when to re-balance, and applies a plan (DORA, section 4.3)."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import QUEUE_SLOTS, Worker
from dora.core.handoff.table import VACATING
from dora.core.observation import view_of
from dora.core.plan import POOL, QUEUE, Move, Trigger
from dora.core.policy import Policy
from dora.core.rules import evaluation, handoff, rejection
from dora.core.state import State

PRESSURE_REST_S: Final = 5.0  # pause between two checks of pressure
RELIEF_REST_S: Final = 1.0  # pause between two searches for moves: otherwise each ended response would start one
FRUITLESS_REST_S: Final = 5.0  # pause after a search without result, unless a slot has become free
# Pause before another plan for a lost worker, for each worker of the fleet. A plan for 1,024 workers takes about 0.1 s:
# if they are lost one by one, plans take a tenth of a core.
LOSS_REST_S: Final = 0.001

# Events that re-balance by themselves. A Tick does so when a period has passed or KV is nearly full; so do a version
# without a worker and a starved worker (scheduler.py).
TRIGGERS: Final[dict[type, Trigger]] = {
    on.WorkerJoined: Trigger.MEMBERSHIP,
    on.WorkerLost: Trigger.MEMBERSHIP,
    on.Restored: Trigger.MEMBERSHIP,
    on.StepCommitted: Trigger.UPDATE,
    on.VersionRepublished: Trigger.UPDATE,
    on.DrainRequested: Trigger.OPERATOR,
    on.HostNoticed: Trigger.MEMBERSHIP,
    on.RebalanceRequested: Trigger.OPERATOR,
}


class Balance:
    """Asks the policy for plans and moves, and carries out those that still make sense."""

    def __init__(self, state: State, policy: Policy) -> None:
        self._state, self.policy = state, policy
        self._moves: deque[Move] = deque()  # moves of the last plan that have not begun
        self._reason = ""  # of these moves
        self._balanced_s = 0.0
        self._plans_for_loss = False  # at the next Tick after LOSS_REST_S
        self._relief_s = 0.0  # earliest time of the next search for moves between plans
        self._no_free_slot: frozenset[int] = frozenset()  # versions without a free slot at the last search

    def trigger(self, event: Any) -> Trigger | None:
        if self._state.replan:
            return Trigger.UPDATE
        if isinstance(event, on.Tick):
            return self._trigger_of_time()
        if isinstance(event, on.WorkerLost) and self._rests_from_losses():
            self._plans_for_loss = True
            return None
        return TRIGGERS.get(type(event))

    def _trigger_of_time(self) -> Trigger | None:
        balance = self._state.config.balance
        since_s = self._state.now_s - self._balanced_s
        if self._plans_for_loss and not self._rests_from_losses():
            return Trigger.MEMBERSHIP
        if since_s >= balance.period_s:
            return Trigger.TIME
        if since_s >= min(PRESSURE_REST_S, balance.period_s) and self._state.worklist.nearly_full:
            return Trigger.PRESSURE
        return None

    def _rests_from_losses(self) -> bool:
        return self._state.now_s - self._balanced_s < LOSS_REST_S * len(self._state.workers)

    def rebalance(self, trigger: Trigger) -> None:
        """Applies a new plan's targets and keeps its moves; settling then begins moves and loads empty workers."""
        state = self._state
        state.counters.rebalances += 1
        self._balanced_s = state.now_s
        self._plans_for_loss = state.replan = False
        self.policy.observe(Dispatcher(state))
        plan = self.policy.plan(view_of(state), trigger)
        for index, version in plan.targets.items():
            self._retarget(index, version)
        self._replace_kept(plan.targets)
        self._moves = deque(plan.moves)  # unstarted moves of the last plan are void
        self._reason = trigger.value
        state.worklist.wake()

    def _replace_kept(self, targets: Mapping[int, int]) -> None:
        """Gives an idle worker a version that the plan has assigned only to workers that evaluations keep."""
        state = self._state
        refused = {version for index, version in targets.items() if self._target(index) != version}
        for version in sorted(refused - state.window.quarantined, reverse=True):
            if not state.hosting.targeting(version):
                idle = (state.worker_list[index] for index in sorted(state.worklist.idle))
                free = (each for each in idle if each is not None and not evaluation.keeps(state, each))
                if (worker := next(free, None)) is not None:
                    self._retarget(worker.index, version)

    def hand_over(self, starved: Iterable[int], evaluated: Iterable[int] = ()) -> None:
        """Gives starved workers another version: the one that the policy names at once, else a plan's.

        The ``evaluated`` ones that a plan leaves unchanged get the newest version, for an evaluation.
        """
        successor = self.policy.successor(Dispatcher(self._state))
        if successor is None:
            before = {index: self._target(index) for index in evaluated}
            self.rebalance(Trigger.STARVED)
            for index, version in sorted(before.items()):
                if self._target(index) == version:
                    self._retarget(index, self._state.window.newest_sound)
            return
        for index in sorted(starved):
            self._retarget(index, successor)

    def begin_moves(self) -> None:
        """Begins planned moves that still make sense, up to the limit of concurrent moves."""
        state = self._state
        while self._moves and len(state.handoffs) < state.config.balance.moves_at_once:
            move = self._moves.popleft()
            source = state.owner(move.row)
            if source is None or move.row in state.handoffs:
                continue
            if move.target == QUEUE:
                handoff.send_back(state, move.row)
            elif move.target == POOL:
                pool = state.pool_with(state.parked_kv_of(move.row), source.host)
                if pool is not None:
                    handoff.begin(state, move.row, pool, self._reason)
            else:
                self._begin_move(move, source)

    def _begin_move(self, move: Move, source: Worker) -> None:
        state, target = self._state, self._state.worker_list[move.target]
        if target is None or source is target or not self._takes_one(target):
            return
        if target.hosts == state.requests["version"][move.row]:
            handoff.move(state, move.row, source, target, self._reason)

    def relieve(self) -> None:
        """Searches for moves off vacating workers; again soon only if the last search found some, or might now."""
        state = self._state
        if self._no_free_slot:  # a change may have freed one
            touched = map(state.worker_list.__getitem__, state.worklist.touched)
            self._no_free_slot -= {worker.hosts for worker in touched if worker is not None}
        if self._moves or state.now_s < self._relief_s:
            return
        leaving = state.hosting.leaving()
        rested = state.now_s >= self._relief_s + FRUITLESS_REST_S - RELIEF_REST_S
        if not leaving or (leaving <= self._no_free_slot and not rested):
            return
        displaced = frozenset(worker.loaded for worker in state.hosting.vacating() if worker.rows)
        if not self._has_free_slot(displaced) and not any(pool.free for pool in state.pools.values()):
            return
        self._relief_s = state.now_s + RELIEF_REST_S
        self._moves.extend(self.policy.relieve(view_of(state)))
        self._reason = VACATING
        self._no_free_slot = frozenset() if self._moves else displaced
        self.begin_moves()

    def _has_free_slot(self, versions: Iterable[int]) -> bool:
        hosts = (worker for version in versions for worker in self._state.workers_of(version))
        return any(map(self._takes_one, hosts))

    def _takes_one(self, worker: Worker) -> bool:
        """Returns whether a request may move to this worker: into a free slot; without a pool it may queue for one."""
        return worker.assigned < (1 if self._state.pools else QUEUE_SLOTS) * worker.slots

    def _target(self, index: int) -> int:
        worker = self._state.worker_list[index]
        assert worker is not None, f"index {index}, which no worker has"
        return worker.target

    def _retarget(self, index: int, version: int) -> None:
        """Assigns a version to the worker with this index; instead of a quarantined one, the newest that is not.

        A worker that is trying a suspect version keeps it, and one that an evaluation retains keeps its version.
        """
        worker = self._state.worker_list[index]
        assert worker is not None, f"a version for index {index}, which no worker has"
        if version in self._state.window.quarantined:
            version = self._state.window.newest_sound
        if evaluation.keeps(self._state, worker):
            return
        if worker.target != version and not rejection.tries(self._state, worker):
            worker.target = version
            self._state.rehosted(worker)
