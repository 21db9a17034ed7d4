"""When to re-balance, and what a plan changes (DORA, section 4.3)."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from dora.core import events as on
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import QUEUE_SLOTS, Worker
from dora.core.observation import view_of
from dora.core.plan import LINE, POOL, Move, Trigger
from dora.core.policy import Policy
from dora.core.rules import evaluation, handoff, rejection
from dora.core.state import State

PRESSURE_REST_S: Final = 5.0  # pressure is looked at again after this
RELIEF_REST_S: Final = 1.0  # between two looks for moves: else one would be taken at every response's end
FRUITLESS_REST_S: Final = 5.0  # after one that found none, unless a slot has become free where one was looked for

# The events that re-balance by themselves. A Tick does when a period is over or KV is nearly full; so does a version
# that no worker hosts any more, or a worker that starves (scheduler.py).
TRIGGERS: Final[dict[type, Trigger]] = {
    on.WorkerJoined: Trigger.MEMBERSHIP,
    on.WorkerLost: Trigger.MEMBERSHIP,
    on.Restored: Trigger.MEMBERSHIP,
    on.StepCommitted: Trigger.UPDATE,
    on.VersionRepublished: Trigger.UPDATE,
    on.DrainAsked: Trigger.OPERATOR,
    on.RebalanceAsked: Trigger.OPERATOR,
}


class Balance:
    """Asks the policy for plans and moves, and carries them out as far as they still make sense."""

    def __init__(self, state: State, policy: Policy) -> None:
        self._state, self.policy = state, policy
        self._moves: deque[Move] = deque()  # of the last plan, those that have not begun
        self._balanced_s = 0.0
        self._relief_s = 0.0  # moves between plans are not looked for before
        self._no_free_slot: frozenset[int] = frozenset()  # versions whose last look for a free slot found none

    def trigger(self, event: Any) -> Trigger | None:
        """Why this event re-balances; None: it does not."""
        if self._state.replan:
            return Trigger.UPDATE
        if isinstance(event, on.Tick):
            return self._trigger_of_time()
        return TRIGGERS.get(type(event))

    def _trigger_of_time(self) -> Trigger | None:
        balance = self._state.config.balance
        since_s = self._state.now_s - self._balanced_s
        if since_s >= balance.period_s:
            return Trigger.TIME
        if since_s >= min(PRESSURE_REST_S, balance.period_s) and self._state.worklist.nearly_full:
            return Trigger.PRESSURE
        return None

    def rebalance(self, trigger: Trigger) -> None:
        """Sets the targets of a new plan and keeps its moves; settling then begins moves and loads empty workers."""
        state = self._state
        state.counters.rebalances += 1
        self._balanced_s = state.now_s
        state.replan = False
        self.policy.observe(Dispatcher(state))
        plan = self.policy.plan(view_of(state), trigger)
        for index, version in plan.targets.items():
            self._retarget(index, version)
        self._moves = deque(plan.moves)  # what the last plan wanted and did not begin is void
        state.worklist.wake()

    def hand_over(self, starved: Iterable[int], evaluated: Iterable[int] = ()) -> None:
        """Starved workers get another version: the one that the policy names at once, else what a plan says.

        Of those that a plan leaves as they are, the ``evaluated`` get the newest, which an evaluation wants.
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
        """Begins the planned moves that still make sense, as many as may be under way."""
        state = self._state
        while self._moves and len(state.handoffs) < state.config.balance.moves_at_once:
            move = self._moves.popleft()
            source = state.owner(move.row)
            if source is None or move.row in state.handoffs:
                continue
            if move.target == LINE:
                handoff.send_back(state, move.row)
            elif move.target == POOL:
                pool = state.pool_with(handoff.kv_tokens(state, move.row), source.host)
                if pool is not None:
                    handoff.begin(state, move.row, pool)
            else:
                self._begin_move(move, source)

    def _begin_move(self, move: Move, source: Worker) -> None:
        state, target = self._state, self._state.worker_list[move.target]
        if target is None or source is target or not self._takes_one(target):
            return
        if target.hosts == state.requests["version"][move.row]:
            handoff.begin(state, move.row, target)

    def relieve(self) -> None:
        """Looks for moves where workers are to be left; again soon only if the last look found some, or might now."""
        state = self._state
        if self._no_free_slot:  # where something has changed there may be one now
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
        self._no_free_slot = frozenset() if self._moves else displaced
        self.begin_moves()

    def _has_free_slot(self, versions: Iterable[int]) -> bool:
        """Whether a worker hosts one of these versions and takes one more request."""
        hosts = (worker for version in versions for worker in self._state.workers_of(version))
        return any(map(self._takes_one, hosts))

    def _takes_one(self, worker: Worker) -> bool:
        """Whether a request may move to this worker: into a free slot; without a pool it may queue for one."""
        return worker.held < (1 if self._state.pools else QUEUE_SLOTS) * worker.slots

    def _target(self, index: int) -> int:
        worker = self._state.worker_list[index]
        assert worker is not None, f"index {index}, which no worker has"
        return worker.target

    def _retarget(self, index: int, version: int) -> None:
        """The worker with this index is to host this version from now on; if that is withheld, the newest that is not.

        A worker that is to try a version in doubt stays with that, and one that an evaluation keeps with its version.
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
