"""Runs the handoff table: signals in, commands out. Ownership of a request moves exactly once."""

from typing import Final

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.pool import Pool
from dora.core.fleet.worker import Worker, one_of_workers
from dora.core.handoff.table import (
    FROM_POOL,
    LIVE,
    NOTICE,
    SESSION,
    SLOT,
    TO_POOL,
    Action,
    Handoff,
    HandoffKind,
    Phase,
    Signal,
)
from dora.core.plan import Trigger
from dora.core.rules.placement import arrive, leave_queue, orphan, queue_again, remove, start
from dora.core.state import IDLE, RUNNING, WAITING, Pending, State
from dora.errors import Conflict, NotFound

MOVE_REST_S = 5.0  # pause after a refused move
REFUSED_REST_S = 1.0  # pause before a worker without room for a parked request is tried again


def begin(state: State, row: int, target: Worker | Pool, reason: str = SESSION) -> None:
    """Asks ``target`` to accept the request of ``row``; the source continues to decode. A session whose next turn waits
    leaves its queue. ``reason`` is one of REASONS.
    """
    source = state.owner(row)
    if state.requests["status"][row] == WAITING:
        leave_queue(state, row)
    assert source is not None and source is not target, "a handoff is between two workers, or a worker and a pool"
    kind = HandoffKind.PARK if isinstance(target, Pool) else HandoffKind.MOVE
    _begin(state, kind, row, source, target, state.kv_of(row), reason)


def move(state: State, row: int, source: Worker, target: Worker, reason: str) -> None:
    """Moves a running request to another worker of its version, with its KV unless its prefill there is faster than the
    way between their zones.
    """
    if state.places.crosses(source.host, target.host, state.kv_of(row)):
        begin(state, row, target, reason)
        return
    send_back(state, row)
    leave_queue(state, row)
    start(state, row, target)
    state.requests["moves"][row] += 1


def resume(state: State, row: int, pool: Pool, target: Worker, reason: str = SLOT) -> None:
    """Asks ``target`` to accept a parked request that has just left its queue. ``reason`` is one of REASONS."""
    _begin(state, HandoffKind.RESUME, row, pool, target, _kv_in_pool(state, row), reason)


def carry(state: State, row: int, pool: Pool, target: Pool) -> None:
    """Asks ``target`` to accept a request that is parked in ``pool``, whose host leaves. It leaves its queue."""
    if state.requests["status"][row] == WAITING:
        leave_queue(state, row)
    _begin(state, HandoffKind.CARRY, row, pool, target, _kv_in_pool(state, row), NOTICE)


def _kv_in_pool(state: State, row: int) -> int:
    """KV tokens of a parked request, of which its pool may have more than the core has heard of."""
    return max(state.kv_of(row), int(state.requests["claim"][row]) - state.state_tokens)


def _begin(
    state: State, kind: HandoffKind, row: int, source: Worker | Pool, target: Worker | Pool, kv_tokens: int, reason: str
) -> None:
    request_id = state.request_id[row]
    handoff = Handoff(row, request_id, source.worker_id, target.worker_id, state.now_s, kind, reason=reason)
    state.handoffs[row] = handoff
    state.requests["moving"][row] = True
    target.inbound += 1
    claim = kv_tokens + (state.state_tokens if isinstance(target, Pool) else 0)
    target.kv_claimed += claim
    if isinstance(target, Worker):
        state.loads.changed(target.index)
        state.worklist.assigned(target.index)
        target.kv_inbound += claim
    reserve = do.ReserveSlot(
        target.worker_id,
        target.epoch,
        state.command_id(),
        request_id,
        int(state.requests["version"][row]),
        kv_tokens,
    )
    state.requests["claim_inbound"][row] = claim
    state.send(reserve, handoff)


def send_back(state: State, row: int) -> None:
    """Takes a request off its worker without its KV; it waits and is re-prefilled."""
    remove(state, row)
    queue_again(state, row)


def requested(state: State, event: on.MigrationRequested) -> None:
    """Moves one request for an operator: one on a worker to another or to a pool, a parked one to a worker.

    Raises NotFound or Conflict if that is impossible.
    """
    row = state.request_row.get(event.request_id)
    target = state.end(event.target_worker)
    if row is None:
        raise NotFound(
            "request", event.request_id, "an admitted request that is not finished", why="is not in progress"
        )
    if target is None:
        raise NotFound("--to", event.target_worker, one_of_workers(state.workers, event.target_worker))
    pool = state.pool_of(row)
    movable = "a request that is running or parked, and in no handoff"
    if row in state.handoffs:
        raise Conflict("request", event.request_id, movable, why="is in a handoff already")
    if state.owner(row) is None and pool is None:
        raise Conflict("request", event.request_id, movable, why="is not running")
    if pool is not None and state.requests["status"][row] == IDLE:
        raise Conflict("request", event.request_id, movable, why="is parked until its next turn")
    if target in (state.owner(row), pool):
        raise Conflict("--to", event.target_worker, "another worker", why=f"is where {event.request_id} is")
    if isinstance(target, Worker):
        _check_worker(state, row, target)
    elif pool is not None:
        raise Conflict("--to", event.target_worker, "a worker: the request is parked already", why="is a pool")
    elif target.free < (needed := state.parked_kv_of(row)):
        allowed = f"a pool with room for {needed:,} tokens of KV"
        raise Conflict("--to", event.target_worker, allowed, why=f"has room for {target.free:,}")
    source = state.owner(row)
    if source is not None and isinstance(target, Worker) and state.requests["status"][row] == RUNNING:
        move(state, row, source, target, Trigger.OPERATOR.value)
    elif pool is None:
        begin(state, row, target, Trigger.OPERATOR.value)
    else:
        assert isinstance(target, Worker)
        leave_queue(state, row)
        resume(state, row, pool, target, Trigger.OPERATOR.value)


def _check_worker(state: State, row: int, target: Worker) -> None:
    version = int(state.requests["version"][row])
    if target.hosts != version:
        why = "hosts no version" if target.hosts < 0 else f"hosts version {target.hosts}"
        raise Conflict(
            "--to", target.worker_id, f"a worker that hosts version {version}, which sampled the request (C1)", why
        )
    if state.pools and target.assigned >= target.slots:
        raise Conflict("--to", target.worker_id, "a worker with a free slot", why="has no free slot")


def signal_row(state: State, row: int, signal: Signal) -> None:
    handoff = state.handoffs.get(row)
    if handoff is not None:
        signal_handoff(state, handoff, signal)


def signal_handoff(state: State, handoff: Handoff, signal: Signal) -> None:
    was_live = handoff.phase in LIVE
    actions = handoff.advance(signal)
    if was_live and handoff.phase not in LIVE:
        _close(state, handoff, signal)
    for action in actions:
        _ACTIONS[action](state, handoff)
    if was_live and handoff.phase is Phase.ABORTED and handoff.kind is not HandoffKind.RESUME:
        _wait_for_turn(state, handoff)


def _wait_for_turn(state: State, handoff: Handoff) -> None:
    """Queues a session whose next turn was requested during its handoff, or that was moved for it."""
    row = handoff.row
    if state.requests["status"][row] == WAITING:
        queue = state.waiting.get(int(state.requests["version"][row]), ())
        if row not in queue:
            queue_again(state, row)


def done(state: State, pending: Pending, event: on.CommandDone) -> None:
    handoff = pending.handoff
    assert handoff is not None
    command = pending.command
    if isinstance(command, do.CopyOut) and handoff.phase not in (Phase.RESERVED, Phase.COPYING):
        if event.locator:  # the handoff was undone while the source copied
            state.out.append(do.ReleaseSnapshot(event.locator))
        return
    if isinstance(command, do.ReserveSlot) and handoff.phase is Phase.PLANNED:
        signal_handoff(state, handoff, Signal.RESERVED if event.ok else Signal.REFUSED)
    elif isinstance(command, do.CopyOut):
        handoff.locator, handoff.tokens = event.locator, event.tokens
        handoff.had_ended = event.error_kind == "unknown_request"
        signal_handoff(state, handoff, _copy_out_signal(event))
    elif isinstance(command, do.CopyIn) and handoff.phase in (Phase.FROZEN, Phase.STRANDED):
        signal_handoff(state, handoff, _copy_in_signal(state, handoff, event))
    elif isinstance(command, do.RemoveRequest) and handoff.phase is Phase.COMMITTED:
        signal_handoff(state, handoff, Signal.SOURCE_FREED)


def copy_began(state: State, pending: Pending) -> None:
    """Notes that the source copies while the request decodes."""
    handoff = pending.handoff
    if handoff is not None and isinstance(pending.command, do.CopyOut) and handoff.phase is Phase.RESERVED:
        signal_handoff(state, handoff, Signal.COPY_BEGAN)


def _copy_out_signal(event: on.CommandDone) -> Signal:
    if event.ok:
        return Signal.FROZEN
    return Signal.NOT_MOVABLE if event.error_kind == "not_movable" else Signal.COPY_FAILED


def _copy_in_signal(state: State, handoff: Handoff, event: on.CommandDone) -> Signal:
    if event.ok:
        return Signal.COPIED_IN if handoff.kind not in TO_POOL or _has_room(state, handoff) else Signal.COPY_REFUSED
    return Signal.NOT_MOVABLE if event.error_kind == "not_movable" else Signal.COPY_REFUSED


def lost(state: State, end: Worker | Pool) -> None:
    """Settles every handoff of a lost worker or pool.

    A handoff whose source was lost before is not affected: this is a later epoch of the same source.
    """
    for handoff in list(state.handoffs.values()):
        if handoff.source == end.worker_id and handoff.phase is not Phase.STRANDED:
            signal_handoff(state, handoff, Signal.SOURCE_LOST)
        elif handoff.target == end.worker_id:
            signal_handoff(state, handoff, Signal.TARGET_LOST)


def overdue(state: State) -> None:
    """Undoes handoffs that exceed the time limit: a silent target must not keep a request frozen."""
    limit_s = state.config.balance.handoff_timeout_s
    for handoff in list(state.handoffs.values()):
        if state.now_s - handoff.began_s >= limit_s:
            handoff.overdue = f"it took longer than {limit_s:g} s, in phase {handoff.phase.name}"
            signal_handoff(state, handoff, Signal.UNDO)


# ------------------------------------------------------------------------------------------------------------ actions


def _close(state: State, handoff: Handoff, signal: Signal) -> None:
    row = handoff.row
    del state.handoffs[row]
    state.requests["moving"][row] = False
    target, claim = state.end(handoff.target), int(state.requests["claim_inbound"][row])
    if target is not None:
        target.inbound -= 1
        target.kv_claimed -= claim
    if isinstance(target, Worker):
        state.loads.changed(target.index)
        target.kv_inbound -= claim
        state.worklist.changed(target.index)
    state.requests["claim_inbound"][row] = 0
    state.worklist.wake()
    if handoff.kind is HandoffKind.RESUME:
        if handoff.phase is Phase.ABORTED:
            _wait_again(state, handoff, signal)
        return
    if handoff.kind is HandoffKind.CARRY:
        if handoff.phase is Phase.ABORTED:
            _stay_parked(state, handoff, signal)
        return
    if signal in (Signal.REFUSED, Signal.COPY_REFUSED, Signal.COPY_FAILED, Signal.UNDO):
        state.requests["rests_until_s"][row] = state.now_s + MOVE_REST_S
    if signal is Signal.FINISHED or handoff.had_ended:
        state.counters.migrations_overtaken += 1
    elif handoff.phase is Phase.ABORTED and signal is not Signal.NOT_MOVABLE:
        state.counters.migrations_failed += 1


def _wait_again(state: State, handoff: Handoff, signal: Signal) -> None:
    """Puts a parked request back after a failed resume. A lost target, or one without room, does not discredit its KV.

    After a second refusal the KV is dropped, because a re-prefilled request can wait inside an engine.
    """
    row, pool, target = handoff.row, state.pool_of(handoff.row), state.workers.get(handoff.target)
    if signal is Signal.REFUSED and pool is not None and target is not None and row not in pool.refused:
        pool.refused.add(row)
        target.rests_until_s = state.now_s + REFUSED_REST_S
    elif signal is not Signal.TARGET_LOST:
        state.counters.parked_lost += 1
        if pool is not None:
            state.unpark(row)
            if signal is not Signal.SOURCE_LOST:
                remove = do.RemoveRequest(pool.pool_id, pool.epoch, state.command_id(), handoff.request_id)
                state.send(remove)
    state.wait_first(row)


def _stay_parked(state: State, handoff: Handoff, signal: Signal) -> None:
    """Leaves a parked request that did not reach another pool in its own, unless that has lost its KV."""
    row, pool = handoff.row, state.pool_of(handoff.row)
    if pool is not None and not (handoff.had_ended or signal in (Signal.SOURCE_LOST, Signal.NOT_MOVABLE)):
        state.requests["rests_until_s"][row] = state.now_s + MOVE_REST_S
        return
    state.counters.parked_lost += 1
    if pool is not None:
        state.unpark(row)
        if signal is not Signal.SOURCE_LOST:
            state.send(do.RemoveRequest(pool.pool_id, pool.epoch, state.command_id(), handoff.request_id))


def _commit(state: State, handoff: Handoff) -> None:
    row, target = handoff.row, state.end(handoff.target)
    assert target is not None, "a lost target ends its handoff"
    if state.owner(row) is not None:
        state.move_off(row)
    elif state.requests["pool"][row]:
        state.unpark(row)
    if isinstance(target, Pool):
        state.park(row, target, _parked_tokens(state, handoff))
        queue_again(state, row)
        state.counters.requests_parked += 1
        return
    arrive(state, row, target)
    state.requests["moves"][row] += 1
    if handoff.kind is HandoffKind.RESUME:
        state.counters.requests_resumed += 1
    else:
        state.counters.migrations_kv += 1


def _parked_tokens(state: State, handoff: Handoff) -> int:
    """A frozen request's room in a pool, in tokens of KV; its worker may have reported fewer."""
    row = handoff.row
    return max(state.kv_of(row), int(state.requests["prompt_tokens"][row]) + handoff.tokens) + state.state_tokens


def _has_room(state: State, handoff: Handoff) -> bool:
    """Returns whether a pool has room for the copied KV: the request has grown since the pool was asked."""
    more = _parked_tokens(state, handoff) - int(state.requests["claim_inbound"][handoff.row])
    return more <= state.pools[handoff.target].free


def _free_source(state: State, handoff: Handoff) -> None:
    source = state.end(handoff.source)
    assert source is not None, "a lost source strands its handoff"
    command = do.RemoveRequest(source.worker_id, source.epoch, state.command_id(), handoff.request_id)
    state.send(command, handoff)


def _copy_out(state: State, handoff: Handoff) -> None:
    source = state.end(handoff.source)
    assert source is not None
    command = _COPIES[handoff.kind](source.worker_id, source.epoch, state.command_id(), handoff.request_id)
    state.send(command, handoff)


def _copy_in(state: State, handoff: Handoff) -> None:
    target = state.end(handoff.target)
    assert target is not None
    version = int(state.requests["version"][handoff.row])
    command = do.CopyIn(
        target.worker_id, target.epoch, state.command_id(), handoff.request_id, version, handoff.locator
    )
    state.send(command, handoff)


def _thaw_source(state: State, handoff: Handoff) -> None:
    source = state.end(handoff.source)
    assert source is not None
    if handoff.kind in FROM_POOL and not state.requests["pool"][handoff.row]:
        return  # the pool was told to drop it
    state.send(do.Thaw(source.worker_id, source.epoch, state.command_id(), handoff.request_id))


def _cancel_target(state: State, handoff: Handoff) -> None:
    target = state.end(handoff.target)
    assert target is not None
    command = do.CancelReservation(target.worker_id, target.epoch, state.command_id(), handoff.request_id)
    state.send(command, handoff if handoff.overdue else None)


def _restart_at_target(state: State, handoff: Handoff) -> None:
    """Re-prefills the request at its target. In a pool it waits to be re-prefilled elsewhere."""
    if handoff.kind in FROM_POOL:
        return  # it waits again (``_close``)
    row = handoff.row
    send_back(state, row)
    if handoff.kind is HandoffKind.PARK or state.requests["status"][row] == IDLE:
        return
    leave_queue(state, row)
    start(state, row, state.workers[handoff.target])
    state.requests["moves"][row] += 1


def _orphan(state: State, handoff: Handoff) -> None:
    if handoff.kind in FROM_POOL:
        return  # it waits again (``_close``)
    if state.owner(handoff.row) is not None:
        state.take_away(handoff.row)
    orphan(state, handoff.row)


def _release_snapshot(state: State, handoff: Handoff) -> None:
    state.out.append(do.ReleaseSnapshot(handoff.locator))


_COPIES: Final[dict[HandoffKind, type[do.CopyOut]]] = {
    HandoffKind.MOVE: do.CopyOut,
    HandoffKind.PARK: do.Park,
    HandoffKind.RESUME: do.Resume,
    HandoffKind.CARRY: do.Resume,
}
_ACTIONS = {
    Action.COPY_OUT: _copy_out,
    Action.COPY_IN: _copy_in,
    Action.COMMIT: _commit,
    Action.FREE_SOURCE: _free_source,
    Action.THAW_SOURCE: _thaw_source,
    Action.CANCEL_TARGET: _cancel_target,
    Action.RESTART_AT_TARGET: _restart_at_target,
    Action.ORPHAN: _orphan,
    Action.RELEASE_SNAPSHOT: _release_snapshot,
}
