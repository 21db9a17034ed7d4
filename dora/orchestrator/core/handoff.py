"""Runs the handoff table: signals in, commands out, ownership moved exactly once."""

from dora.errors import Conflict, NotFound
from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.orchestrator.core.handoff_table import LIVE, Action, Handoff, Phase, Signal
from dora.orchestrator.core.placement import orphan, start
from dora.orchestrator.core.state import RUNNING, Pending, State
from dora.orchestrator.core.worker import Worker, one_of_workers

MOVE_REST_S = 5.0  # what one worker has refused it would refuse again at once


def begin(state: State, row: int, target: Worker) -> None:
    """Asks ``target`` to take the request of ``row``; the source goes on decoding meanwhile."""
    source = state.owner(row)
    assert source is not None and source is not target, "a handoff is between two workers"
    request_id = state.request_id[row]
    handoff = Handoff(row, request_id, source.worker_id, target.worker_id, state.now_s)
    state.handoffs[row] = handoff
    state.requests["moving"][row] = True
    kv_tokens = _kv_tokens(state, row)
    target.inbound += 1
    state.loads.changed(target.index)
    state.worklist.given(target.index)
    target.kv_claimed += kv_tokens
    target.kv_inbound += kv_tokens
    reserve = do.ReserveSlot(
        target.worker_id,
        target.epoch,
        state.command_id(),
        request_id,
        int(state.requests["version"][row]),
        kv_tokens,
    )
    state.requests["claim_inbound"][row] = kv_tokens
    state.send(reserve, handoff)


def asked(state: State, event: on.MigrateAsked) -> None:
    """An operator moves one request. Raises NotFound or Conflict where it cannot move there."""
    row = state.request_row.get(event.request_id)
    target = state.workers.get(event.target_worker)
    if row is None:
        raise NotFound(
            "request", event.request_id, "an admitted request that is not finished", why="is not in progress"
        )
    if target is None:
        raise NotFound("--to", event.target_worker, one_of_workers(state.workers, event.target_worker))
    version = int(state.requests["version"][row])
    movable = "a request that is running and in no handoff"
    if row in state.handoffs:
        raise Conflict("request", event.request_id, movable, why="is in a handoff already")
    if state.requests["status"][row] != RUNNING:
        raise Conflict("request", event.request_id, movable, why="is not running")
    if state.owner(row) is target:
        raise Conflict("--to", event.target_worker, "another worker", why=f"is where {event.request_id} is")
    if target.hosts != version:
        why = "hosts no version" if target.hosts is None else f"hosts version {target.hosts}"
        raise Conflict(
            "--to", event.target_worker, f"a worker that hosts version {version}, as the request needs (C1)", why
        )
    begin(state, row, target)


def signal_row(state: State, row: int, signal: Signal) -> None:
    """Signals the live handoff of a request, if it has one."""
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


def done(state: State, pending: Pending, event: on.CommandDone) -> None:
    """The outcome of a handoff's command."""
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
        handoff.locator = event.locator
        handoff.had_ended = event.error_kind == "unknown_request"
        signal_handoff(state, handoff, _copy_out_signal(event))
    elif isinstance(command, do.CopyIn) and handoff.phase in (Phase.FROZEN, Phase.STRANDED):
        signal_handoff(state, handoff, _copy_in_signal(event))
    elif isinstance(command, do.RemoveRequest) and handoff.phase is Phase.COMMITTED:
        signal_handoff(state, handoff, Signal.SOURCE_FREED)


def copy_began(state: State, pending: Pending) -> None:
    """The source of a handoff copies while the request decodes."""
    handoff = pending.handoff
    if handoff is not None and isinstance(pending.command, do.CopyOut) and handoff.phase is Phase.RESERVED:
        signal_handoff(state, handoff, Signal.COPY_BEGAN)


def _copy_out_signal(event: on.CommandDone) -> Signal:
    if event.ok:
        return Signal.FROZEN
    return Signal.NOT_MOVABLE if event.error_kind == "not_movable" else Signal.COPY_FAILED


def _copy_in_signal(event: on.CommandDone) -> Signal:
    if event.ok:
        return Signal.COPIED_IN
    return Signal.NOT_MOVABLE if event.error_kind == "not_movable" else Signal.COPY_REFUSED


def lost(state: State, worker: Worker) -> None:
    """A worker died: settle every handoff it took part in.

    The source of a stranded one has died before: this is a later life of the same worker, which has no part in it.
    """
    for handoff in list(state.handoffs.values()):
        if handoff.source == worker.worker_id and handoff.phase is not Phase.STRANDED:
            signal_handoff(state, handoff, Signal.SOURCE_LOST)
        elif handoff.target == worker.worker_id:
            signal_handoff(state, handoff, Signal.TARGET_LOST)


def overdue(state: State) -> None:
    """Undoes handoffs that take too long: a silent target must not keep a request frozen."""
    limit_s = state.config.balance.handoff_timeout_s
    for handoff in list(state.handoffs.values()):
        if state.now_s - handoff.began_s >= limit_s:
            signal_handoff(state, handoff, Signal.UNDO)


# ------------------------------------------------------------------------------------------------------------ actions


def _close(state: State, handoff: Handoff, signal: Signal) -> None:
    """The request is no longer between two workers."""
    row = handoff.row
    del state.handoffs[row]
    state.requests["moving"][row] = False
    target = state.workers.get(handoff.target)
    if target is not None:
        target.inbound -= 1
        state.loads.changed(target.index)
        target.kv_claimed -= int(state.requests["claim_inbound"][row])
        target.kv_inbound -= int(state.requests["claim_inbound"][row])
        state.worklist.changed(target.index)
    state.requests["claim_inbound"][row] = 0
    state.worklist.wake()
    if signal in (Signal.REFUSED, Signal.COPY_REFUSED, Signal.COPY_FAILED, Signal.UNDO):
        state.requests["rests_until_s"][row] = state.now_s + MOVE_REST_S
    if signal is Signal.FINISHED or handoff.had_ended:
        state.counters.migrations_overtaken += 1
    elif handoff.phase is Phase.ABORTED and signal is not Signal.NOT_MOVABLE:
        state.counters.migrations_failed += 1


def _commit(state: State, handoff: Handoff) -> None:
    if state.owner(handoff.row) is not None:
        state.move_off(handoff.row)
    state.give(handoff.row, state.workers[handoff.target])
    state.requests["moves"][handoff.row] += 1
    state.counters.migrations_kv += 1


def _free_source(state: State, handoff: Handoff) -> None:
    source = state.workers[handoff.source]
    command = do.RemoveRequest(source.worker_id, source.epoch, state.command_id(), handoff.request_id)
    state.send(command, handoff)


def _copy_out(state: State, handoff: Handoff) -> None:
    source = state.workers[handoff.source]
    command = do.CopyOut(source.worker_id, source.epoch, state.command_id(), handoff.request_id)
    state.send(command, handoff)


def _copy_in(state: State, handoff: Handoff) -> None:
    target = state.workers[handoff.target]
    version = int(state.requests["version"][handoff.row])
    command = do.CopyIn(
        target.worker_id, target.epoch, state.command_id(), handoff.request_id, version, handoff.locator
    )
    state.send(command, handoff)


def _thaw_source(state: State, handoff: Handoff) -> None:
    source = state.workers[handoff.source]
    state.send(do.Thaw(source.worker_id, source.epoch, state.command_id(), handoff.request_id))


def _cancel_target(state: State, handoff: Handoff) -> None:
    target = state.workers[handoff.target]
    state.send(do.CancelReservation(target.worker_id, target.epoch, state.command_id(), handoff.request_id))


def _restart_at_target(state: State, handoff: Handoff) -> None:
    source = state.move_off(handoff.row)
    state.send(do.RemoveRequest(source.worker_id, source.epoch, state.command_id(), handoff.request_id))
    start(state, handoff.row, state.workers[handoff.target])
    state.requests["moves"][handoff.row] += 1


def _orphan(state: State, handoff: Handoff) -> None:
    if state.owner(handoff.row) is not None:
        state.take_away(handoff.row)
    orphan(state, handoff.row)


def _release_snapshot(state: State, handoff: Handoff) -> None:
    state.out.append(do.ReleaseSnapshot(handoff.locator))


def _kv_tokens(state: State, row: int) -> int:
    requests = state.requests
    return int(requests["prompt_tokens"][row] + requests["tokens"][row])


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
