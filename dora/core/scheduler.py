"""Runs after every event, in this order:

1. ``settle``, if anything has changed:
   moves begin (off hosts that leave by a deadline, then planned ones, else moves off vacating workers; KV of idle
   sessions leaves these too), empty workers load
   their target version or leave, requested turns begin where their KV is, the policy assigns work to workers with room,
   KV of idle sessions makes room for what still waits, prompts are drawn, and idle workers are noted.
2. Each new situation gets one plan: a version with waiting requests and no worker; starved workers, whose old version
   has nothing left to do. With too few workers a second plan would change nothing.
3. ``settle`` again, if 2 has changed anything.
4. Versions that nobody can need are retired.

balance.py has the other triggers of a plan (a commit, a period, pressure, a worker that joins or leaves).
"""

from dora.core.balance import Balance
from dora.core.dispatcher import Dispatcher
from dora.core.plan import Trigger
from dora.core.rules import evaluation, membership, notice, sessions
from dora.core.rules.admission import admissible, draw
from dora.core.rules.lifecycle import retire
from dora.core.state import State


class Scheduler:
    """Brings the state to where nothing is left to do until the next event."""

    def __init__(self, state: State, balance: Balance) -> None:
        self._state, self._balance = state, balance
        self._unhosted: frozenset[int] = frozenset()  # versions without a worker at the last check
        self._starved: tuple[frozenset[int], int, int, frozenset[int]] | None = None  # see _look_around

    def run(self) -> bool:
        """Runs the steps above. Returns whether there was anything to do."""
        state, window = self._state, self._state.window
        if not state.worklist.awake:
            return False
        self._settle()
        self._look_around()
        if state.worklist.awake:
            self._settle()
        retire(state)  # the window moves and loads end in events that settle
        live = window.newest - window.oldest_live + 1
        state.counters.versions_live_max = max(state.counters.versions_live_max, live)
        return True

    def _settle(self) -> None:
        state, worklist = self._state, self._state.worklist
        worklist.settle()
        notice.leave(state)
        self._balance.begin_moves()
        self._balance.relieve()
        sessions.vacate(state)
        touched = worklist.take_touched()
        membership.settle(state, touched)
        sessions.resume(state)
        self._balance.policy.dispatch(Dispatcher(state))
        sessions.make_room(state)
        draw(state)
        for index in (*touched, *worklist.touched):
            worker = state.worker_list[index]
            idle = worker is not None and worker.is_empty and worker.loading < 0 and not worker.draining
            worklist.rests(index, idle)

    def _look_around(self) -> None:
        window = self._state.window
        unhosted, starved = self._without_worker(), self._without_work()
        evaluated = evaluation.for_newest(self._state, starved)
        situation = (starved, window.step, window.newest_sound, evaluated)
        if unhosted - self._unhosted:
            self._balance.rebalance(Trigger.MEMBERSHIP)
        elif starved and situation != self._starved:
            self._balance.hand_over(starved, evaluated)
        self._unhosted, self._starved = unhosted, situation

    def _without_worker(self) -> frozenset[int]:
        """Versions with waiting requests that no worker hosts or will host; without quarantined ones."""
        state = self._state
        waited = {
            version
            for version, waiting_requests in state.waiting.items()
            if waiting_requests and not state.workers_of(version)
        }
        if waited:
            waited -= state.window.quarantined
            waited -= {worker.target for worker in state.workers.values() if not worker.draining}
        return frozenset(waited)

    def _without_work(self) -> frozenset[int]:
        state, window = self._state, self._state.window
        if not state.worklist.idle:
            return frozenset()
        indexes: set[int] = set()
        for version in range(state.retired, window.newest_sound):
            targeting = state.hosting.targeting(version)
            idle = targeting & state.worklist.idle
            if idle and not state.waiting.get(version) and not self._begins(version):
                if version in state.idle and idle == targeting:  # the next turn of a session may come at any time
                    idle = idle - {min(idle)}
                indexes |= idle
        kept = {index for index in indexes if evaluation.keeps(state, state.worker_list[index])}
        return frozenset(indexes - kept)

    def _begins(self, version: int) -> bool:
        state = self._state
        if not state.backlog or admissible(state, version) < 1:
            return False
        return self._balance.policy.begins(Dispatcher(state), version)
