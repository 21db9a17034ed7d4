"""When to re-balance, and carrying a plan out (design: re-balancing)."""

from collections import deque
from collections.abc import Iterable

from dora.errors import Conflict, NotFound
from dora.orchestrator.core import events as on
from dora.orchestrator.core import fleet, handoffs
from dora.orchestrator.core.admission import draw
from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.lifecycle import retire
from dora.orchestrator.core.migration import QUEUE_SLOTS
from dora.orchestrator.core.snapshot import Trigger
from dora.orchestrator.core.state import RequestStatus, State
from dora.orchestrator.core.view import snapshot

RELIEF_REST_S = 1.0  # between two looks for moves: else one would be taken at every response's end
BARREN_REST_S = 5.0  # after one that found none, unless a place has become free where one was looked for
PRESSURE_REST_S = 5.0  # pressure is looked at again after this


def rebalance(state: State, trigger: Trigger) -> None:
    """Plans on a snapshot, sets targets, begins moves; ``check`` then loads empty workers and supplements."""
    state.counters.rebalances += 1
    state.balanced_s = state.now_s
    state.policy.foresee(Floor(state))
    plan = state.policy.plan(snapshot(state), trigger)
    for seat, version in plan.targets.items():
        _retarget(state, seat, version)
    state.planned = deque(plan.moves)  # what the last plan wanted and did not begin is void
    state.settling = True


def settle(state: State) -> None:
    """Something changed hands: move on what is displaced, load what is empty, fill what is idle."""
    state.settling = False
    _begin(state)
    if state.barren:  # where something has changed there may be a place now
        state.barren -= {worker.hosts for worker in map(state.seats.__getitem__, state.touched) if worker is not None}
    if not state.planned and state.now_s >= state.relief_s:
        _relieve(state)
    seats = sorted(state.touched)
    state.touched.clear()
    state.roomy.update(seats)
    fleet.settle(state, seats)
    state.policy.dispatch(Floor(state))
    draw(state)
    for seat in (*seats, *state.touched):
        worker = state.seats[seat]
        if worker is not None and not worker.held and worker.loading < 0 and not worker.draining:
            state.idle.add(seat)
        else:
            state.idle.discard(seat)


def check(state: State) -> None:
    """At the end of every event: what changed hands is settled, and nobody is left without a host or without work.

    Each new situation gets one plan: with too few workers, or nothing better to do, a second would change nothing.
    """
    if state.settling:
        settle(state)
        unhosted, dry = _unhosted(state), _dry(state)
        dried = (dry, state.window.step, state.window.newest)
        if unhosted - state.unhosted:
            rebalance(state, Trigger.MEMBERSHIP)
        elif dry and dried != state.dry:
            _hand_on(state, dry)
        state.unhosted, state.dry = unhosted, dried
        if state.settling:
            settle(state)
        retire(state)  # the window moves, and loads end, in events that settle
        live = state.window.newest - state.window.oldest_live + 1
        state.counters.versions_live_max = max(state.counters.versions_live_max, live)


def tick(state: State) -> None:
    handoffs.overdue(state)
    state.settling = True  # what rested may go on
    balance = state.config.balance
    since_s = state.now_s - state.balanced_s
    if since_s >= balance.period_s:
        rebalance(state, Trigger.TIME)
    elif since_s >= min(PRESSURE_REST_S, balance.period_s) and state.pressed:
        rebalance(state, Trigger.PRESSURE)


def migrate(state: State, event: on.MigrateAsked) -> None:
    """An operator moves one request. Raises NotFound or Conflict where it cannot move there."""
    row = state.request_row.get(event.request_id)
    target = state.workers.get(event.target_worker)
    if row is None:
        raise NotFound("request", event.request_id, "an admitted request that is not finished")
    if target is None:
        raise NotFound("--to", event.target_worker, f"one of {', '.join(sorted(state.workers))}")
    version = int(state.requests["version"][row])
    if state.requests["status"][row] != RequestStatus.RUNNING or row in state.handoffs:
        raise Conflict("request", event.request_id, "a request that is running and in no handoff")
    if state.owner(row) is target:
        raise Conflict("--to", event.target_worker, "another worker than the one it is on")
    if target.hosts != version:
        raise Conflict("--to", event.target_worker, f"a worker that hosts version {version}, as the request needs (C1)")
    handoffs.begin(state, row, target)


def _hand_on(state: State, dry: frozenset[int]) -> None:
    """Idle seats without work get another version: the one that the policy names at once, else what a plan says."""
    heir = state.policy.heir(Floor(state))
    if heir is None:
        rebalance(state, Trigger.DRAINED)
        return
    for seat in sorted(dry):
        _retarget(state, seat, heir)


def _retarget(state: State, seat: int, version: int) -> None:
    """The worker on this seat is to host this version from now on."""
    worker = state.seats[seat]
    assert worker is not None, f"a version for the empty seat {seat}"
    if worker.target != version:
        worker.target = version
        state.rehosted(worker)


def _begin(state: State) -> None:
    """Begins the planned moves that still make sense, as many as may be under way."""
    while state.planned and len(state.handoffs) < state.config.balance.moves_at_once:
        move = state.planned.popleft()
        target, source = state.seats[move.target], state.owner(move.row)
        if source is None or target is None or source is target or move.row in state.handoffs:
            continue
        if target.hosts == state.requests["version"][move.row] and target.held < QUEUE_SLOTS * target.slots:
            handoffs.begin(state, move.row, target)


def _unhosted(state: State) -> frozenset[int]:
    """The versions that requests wait for while no worker has them or is to get them."""
    waited = {version for version, line in state.waiting.items() if line and not state.hosts_of(version)}
    if waited:
        waited -= {worker.target for worker in state.workers.values() if not worker.draining}
    return frozenset(waited)


def _relieve(state: State) -> None:
    """Looks for moves where workers are to be left; again soon only if the last look found some, or might now."""
    leaving = state.hosting.leaving()
    rested = state.now_s >= state.relief_s + BARREN_REST_S - RELIEF_REST_S
    if not leaving or (leaving <= state.barren and not rested):
        return
    displaced = frozenset(worker.loaded for worker in state.hosting.vacating() if worker.rows)
    if not _places(state, displaced):
        return
    state.relief_s = state.now_s + RELIEF_REST_S
    state.planned.extend(state.policy.relieve(snapshot(state)))
    state.barren = frozenset() if state.planned else displaced
    _begin(state)


def _places(state: State, displaced: Iterable[int]) -> bool:
    """Whether a worker hosts one of these versions and has a place."""
    return any(worker.held < QUEUE_SLOTS * worker.slots for version in displaced for worker in state.hosts_of(version))


def _dry(state: State) -> frozenset[int]:
    """Seats of idle workers whose version, an old one, has no waiting or admissible work."""
    if not state.idle:
        return frozenset()
    window = state.window
    seats: set[int] = set()
    for version in range(state.retired, window.newest):
        idle = state.hosting.targeting(version) & state.idle
        if idle and not state.waiting.get(version) and (not state.backlog or window.admissible(version) < 1):
            seats |= idle
    return frozenset(seats)
