"""Sessions: responses of several turns. Between two turns a session is idle, and its tools run.

    RUNNING ──turn ended──▶ IDLE ──turn requested──▶ WAITING ──placed──▶ RUNNING
                             │ └──ended──▶ FINISHED
                             └──timed out, failed──▶ FINISHED without reward, or replaced

A session whose prompt has no tokens is idle from its admission on. Its first turn brings the prompt.

A turn continues the session's tokens, or *forks*: its tokens follow an earlier place, or are a context of their own. A
fork from a place of the present branch begins where that branch's KV is, which is cut there. Any other fork is
prefilled whole. The shell has the other branches; here a session has the tokens of its present one.

An idle session holds no slot. Its KV is *resident* on its worker or *parked* in a pool, or the session is *cold*: it
has none, and its next turn is prefilled whole. It stays under its version and is demand for it like a waiting request.

KV leaves a worker when the worker vacates its version, when the pause exceeds the time-to-live of the session's task,
and when others need the room. From a vacating worker it moves to another one of the version at best. Otherwise it goes
to a pool; without room there it is dropped. A move between two turns delays no token.
"""

from collections.abc import Iterator
from math import inf
from typing import Final

import numpy as np

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.worker import Worker
from dora.core.handoff.choice import Choice, cheapest
from dora.core.rules import handoff, lifecycle, placement
from dora.core.rules.admission import admissible, attempt_id
from dora.core.state import DORMANT, FINISHED, IDLE, RUNNING, WAITING, RequestStatus, State
from dora.errors import Conflict, InvalidValue, NotFound

TOTAL: Final = "in total"  # the end of a reason
ATTEMPTS_MAX: Final = 255  # replacements of one session, as the journal counts them

# ------------------------------------------------------------------------------------------------------------- turns


def requested(state: State, event: on.TurnRequested) -> None:
    """Queues the next turn of an idle session. It begins at once if the worker with its KV has a free slot.

    Raises NotFound, InvalidValue, or Conflict for a session that is not idle.
    """
    row = check_idle(state, event.request_id)
    requests = state.requests
    check_requested(event, int(requests["prompt_tokens"][row]), int(requests["tokens"][row]))
    is_fork = event.is_prompt or event.after_tokens != on.NO_FORK
    after = event.after_tokens if is_fork else int(requests["tokens"][row])
    if is_fork:
        _fork(state, row, event)
    else:
        state.idles_no_more(row)
    if requests["began_s"][row]:
        pause_s = state.now_s - float(requests["idle_s"][row])
        state.pauses.observe(_task(state, row), pause_s)
        requests["paused_s"][row] += pause_s
    if event.is_prompt:
        requests["prompt_tokens"][row], requests["tokens"][row] = event.tokens, 0
    else:
        requests["input_tokens"][row], requests["tokens"][row] = event.tokens, after + event.tokens
    requests["status"][row] = RequestStatus.WAITING
    if requests["moving"][row]:
        return  # it goes on when its handoff has ended
    worker = state.owner(row)
    if worker is not None and _can_run(state, row, worker):
        placement.extend(state, row, worker)
    else:
        placement.queue_again(state, row)


def check_requested(event: on.TurnRequested, prompt_tokens: int, tokens: int) -> None:
    """``prompt_tokens`` and ``tokens`` are those of the session's branch. Raises InvalidValue, or Conflict for a
    session that has no prompt and gets none.
    """
    if event.tokens < 1:
        raise InvalidValue("tokens", event.tokens, "at least 1 given token")
    if event.after_tokens < on.NO_FORK or (event.is_prompt and event.after_tokens != on.NO_FORK):
        raise InvalidValue("after_tokens", event.after_tokens, "0 or more, and none with a prompt")
    if event.is_on_branch and not on.NO_FORK < event.after_tokens <= tokens:
        raise InvalidValue("after_tokens", event.after_tokens, f"0 to {tokens}, the tokens of the branch")
    if not (event.is_prompt or prompt_tokens):
        raise Conflict("session", event.request_id, "a turn that brings the prompt", why="has no prompt")


def _fork(state: State, row: int, event: on.TurnRequested) -> None:
    """Leaves the branch of a session. Its KV stays where it is if the turn follows a place of the branch."""
    requests = state.requests
    if event.is_on_branch and (requests["worker"][row] or requests["pool"][row] or requests["moving"][row]):
        requests["left"][row] = state.kv_of(row)
        state.idles_no_more(row)
    else:
        lifecycle.withdraw(state, row)
    state.counters.turns_forked += bool(state.requests["began_s"][row])


def check_idle(state: State, request_id: str) -> int:
    """Returns the row of an idle session. Raises NotFound or Conflict."""
    row = _session(state, request_id)
    if state.requests["status"][row] != IDLE:
        raise Conflict("session", request_id, "an idle session", why="has a turn that has not ended")
    return row


def ended(state: State, event: on.SessionEnded) -> None:
    """Finishes a session with what it has; a turn that has not ended is broken off. Raises NotFound or Conflict."""
    row = _session(state, event.request_id)
    if not state.requests["tokens"][row]:
        raise Conflict("session", event.request_id, "a session with a sampled token", why="has none")
    requests = state.requests
    state.pauses.ended(_task(state, row), float(requests["paused_s"][row]), int(requests["tokens"][row]))
    _finish(state, row, "")


def failed(state: State, event: on.SessionFailed) -> None:
    """Replaces a session whose environment has failed, or cancels its group. Raises NotFound or Conflict."""
    row = _session(state, event.request_id)
    if event.fault == "prompt":
        _cancel(state, row, event.reason)
    else:
        _replace(state, row, event.reason, is_spared=event.fault == "another")


def overdue(state: State) -> None:
    limits, requests = state.config.sessions, state.requests
    status, session, began_s = requests.columns("status", "session", "began_s")
    late: dict[int, str] = {}
    if limits.total_timeout_s:
        is_open = session & (status != FINISHED) & (status != RequestStatus.SCORED) & (began_s > 0.0)
        total = np.flatnonzero(is_open & (state.now_s - began_s >= limits.total_timeout_s))
        late |= dict.fromkeys(total.tolist(), f"it took longer than {limits.total_timeout_s:g} s {TOTAL}")
    if limits.idle_timeout_s and state.idle:
        idle = np.flatnonzero((status == IDLE) & (state.now_s - requests["idle_s"] >= limits.idle_timeout_s))
        late |= dict.fromkeys(idle.tolist(), f"no turn was requested in {limits.idle_timeout_s:g} s")
    for row, reason in late.items():
        if row not in state.request_id or requests["status"][row] in (FINISHED, RequestStatus.SCORED):
            continue  # the group of an earlier one was cancelled
        if limits.on_timeout == "end" and requests["tokens"][row]:
            _break_off(state, row, reason)
        else:
            _replace(state, row, reason)


def _session(state: State, request_id: str) -> int:
    row = state.request_row.get(request_id)
    if row is None or not state.requests["session"][row]:
        raise NotFound("session", request_id, "an open session", why="is not open")
    if state.requests["status"][row] not in (WAITING, RUNNING, IDLE):
        why = "has not begun" if state.requests["status"][row] == DORMANT else "has ended"
        raise Conflict("session", request_id, "an open session", why=why)
    return row


def _task(state: State, row: int) -> str:
    return state.traits[int(state.requests["group"][row])].task_id


def _can_run(state: State, row: int, worker: Worker) -> bool:
    return worker.hosts == state.requests["version"][row] and worker.assigned < worker.slots


# --------------------------------------------------------------------------------------------------------------- ends


def _finish(state: State, row: int, broken_off: str) -> None:
    lifecycle.withdraw(state, row)
    lifecycle.complete(state, row, broken_off)


def _break_off(state: State, row: int, reason: str) -> None:
    state.counters.sessions_broken_off += 1
    _finish(state, row, reason)


def _cancel(state: State, row: int, reason: str) -> None:
    group_id = state.group_id[int(state.requests["group"][row])]
    lifecycle.cancel(state, on.GroupCancelled(group_id, f"{state.request_id[row]}: {reason}"))


def may_replace(state: State, attempt: int, spared: int, *, is_spared: bool) -> bool:
    """Returns whether a session may be replaced once more. ``attempt`` counts the replacements before it, and
    ``spared`` those of them for the fault of another session. ``is_spared`` says that this one is, too.
    """
    return attempt < ATTEMPTS_MAX and (is_spared or attempt - spared < state.config.sessions.replacements)


def _replace(state: State, row: int, reason: str, *, is_spared: bool = False) -> None:
    """Begins another session in place of this one. One that was replaced too often ends with what it has, and without
    any token its group is cancelled.
    """
    requests = state.requests
    old_id, attempt, spared = state.request_id[row], int(requests["attempt"][row]), int(requests["spared"][row])
    if not may_replace(state, attempt, spared, is_spared=is_spared):
        if requests["tokens"][row]:
            _break_off(state, row, reason)
        else:
            _cancel(state, row, reason)
        return
    lifecycle.withdraw(state, row)
    attempt += 1
    new_id = attempt_id(old_id, attempt)
    requests["attempt"][row], requests["spared"][row] = attempt, spared + is_spared
    for name in ("tokens", "input_tokens", "left", "paused_s", "moves", "began_s", "rests_until_s"):
        requests[name][row] = 0
    state.rename(row, new_id)
    state.counters.sessions_replaced += 1
    state.out.append(do.ReplaceRequest(old_id, new_id, reason))
    prompt_tokens = state.traits[int(requests["group"][row])].prompt_tokens
    requests["prompt_tokens"][row] = prompt_tokens
    if prompt_tokens:
        state.wait_first(row)
    else:
        state.idles(row)


# ----------------------------------------------------------------------------------------------------------------- KV


def resume(state: State) -> None:
    """Begins requested turns where their KV is, as slots have become free there."""
    for index in sorted(state.waiting_turns_at):
        worker = state.worker_list[index]
        while (
            worker is not None
            and worker.waiting_turns
            and _can_run(state, row := next(iter(worker.waiting_turns)), worker)
        ):
            placement.leave_queue(state, row)
            placement.extend(state, row, worker)


def vacate(state: State) -> None:
    """Sets aside the KV of sessions on workers that leave their version."""
    for worker in state.hosting.vacating():
        if worker.host in state.notices:
            continue  # notice.py decides what leaves it
        for row in sorted(worker.kept):
            if not state.requests["moving"][row]:
                _set_aside(state, row, worker, moves=True)


def rest(state: State) -> None:
    """Sets aside the longest pauses on workers under KV pressure, and pauses that exceed their task's time-to-live,
    where there is a pool. Called at each tick.
    """
    if not state.idle:
        return
    for worker in state.workers.values():
        _relieve(state, worker)
    for row in sorted(row for rows in state.idle.values() for row in rows) if state.pools else ():
        home = state.owner(row)
        if home is not None and not state.requests["moving"][row]:
            idle_s = state.now_s - float(state.requests["idle_s"][row])
            if idle_s > state.pauses.ttl_s(_task(state, row)):
                _set_aside(state, row, home, drops=False)


def _relieve(state: State, worker: Worker) -> None:
    """Sets aside pauses on this worker, the longest first, while it is under KV pressure."""
    if worker.kept and _lacks(state, worker, 0):
        for row in _by_pause(state, worker):
            if not (_set_aside(state, row, worker) and _lacks(state, worker, 0)):
                return


def _by_pause(state: State, worker: Worker) -> list[int]:
    moving, idle_s = state.requests.columns("moving", "idle_s")
    idle = [row for row in worker.kept if row not in worker.waiting_turns and not moving[row]]
    return sorted(idle, key=lambda row: (idle_s[row], row))


def make_room(state: State) -> None:
    """Sets aside the KV of the longest pause on a worker with a free slot, if a request or prompt waits for that KV."""
    if not state.idle:
        return
    for version, need in _needs(state):
        for worker in state.workers_of(version):
            if worker.assigned < worker.slots and _lacks(state, worker, need) and _longest_pause(state, worker):
                break


def _needs(state: State) -> Iterator[tuple[int, int]]:
    """The versions that something waits for, with the KV that the first request needs at once."""
    newest, first = state.window.newest_sound, state.backlog.first()
    prompt_tokens, tokens = state.requests.columns("prompt_tokens", "tokens")
    for version, waiting in state.waiting.items():
        if waiting:
            row = waiting.peek()
            yield version, int(prompt_tokens[row] + tokens[row]) + 1
    if first is not None and not state.waiting.get(newest) and admissible(state, newest) >= 1:
        yield newest, first.prompt.prompt_tokens + 1


def _lacks(state: State, worker: Worker, need: int) -> bool:
    """Returns whether a worker will have less than ``need`` free KV once the sessions that leave it are gone."""
    free = _free(state, worker)
    if free >= need:
        return False
    moving = state.requests["moving"]
    return free + sum(state.kv_of(row) for row in worker.kept if moving[row]) < need


def _longest_pause(state: State, worker: Worker) -> bool:
    """Sets aside the KV of a worker's longest pause. Returns whether there is one."""
    idle = _by_pause(state, worker)
    if idle:
        _set_aside(state, idle[0], worker)
    return bool(idle)


def _set_aside(state: State, row: int, worker: Worker, *, moves: bool = False, drops: bool = True) -> bool:
    """Moves the KV of an idle or waiting session off its worker: to another one (``moves``), to a pool, or nowhere
    (``drops``). Returns whether it goes.
    """
    context = state.kv_of(row)
    target = _roomiest(state, row, worker, context) if moves else None
    pool = state.pool_with(state.parked_kv_of(row), worker.host)
    if (target or pool) and len(state.handoffs) >= state.config.balance.moves_at_once:
        return False  # it goes when others have arrived
    choice = cheapest(state.cost, context, inf, slot=target is not None, pool=pool is not None)
    end = target if choice is Choice.MOVE else pool if choice is Choice.PARK else None
    if end is not None:
        handoff.begin(state, row, end)
    elif drops:
        lifecycle.drop_kv(state, row)
        state.worklist.wake()
    return end is not None or drops


def _roomiest(state: State, row: int, source: Worker, context: int) -> Worker | None:
    workers = state.workers_of(int(state.requests["version"][row]))
    fit = [
        worker
        for worker in workers
        if worker is not source
        and _free(state, worker) >= context
        and state.places.crosses(source.host, worker.host, context)
    ]
    return max(fit, key=lambda worker: (_free(state, worker), -worker.index), default=None)


def _free(state: State, worker: Worker) -> float:
    return _most(state, worker) - worker.kv_expected


def _most(state: State, worker: Worker) -> float:
    return state.config.balance.pressure * worker.kv_tokens
