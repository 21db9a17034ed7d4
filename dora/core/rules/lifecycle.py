"""Responses grow, are scored and delivered; groups are trained on, cancelled and forgotten. (admission.py begins them.)

C2 rests on this module: a group leaves the state only by ``commit`` (trained) or ``cancel`` (on request, with a
reason).
"""

from collections import deque

import numpy as np

from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.adaptive import StepSignals
from dora.core.handoff.table import Signal
from dora.core.rules import (
    arrival,
    evaluation,
    growth,
    handoff,
    lease,
    membership,
    parking,
    placement,
    precision,
    rejection,
    stalls,
)
from dora.core.state import FINISHED, GROUP_FINISHED, IDLE, LEASED, SCORED, WAITING, State
from dora.data.limits import GROUPS_MAX
from dora.errors import Conflict, InvalidValue, NotFound

# ----------------------------------------------------------------------------------------------------------- progress


def progress(state: State, event: on.Progress) -> None:
    tokens_reported(state, event.in_rows(state.rows()))


def tokens_reported(state: State, event: on.TokensReported) -> None:
    """Accepts a worker's token counts. Reports on requests that it does not own, of older handoffs, are ignored."""
    worker = state.worker_at(event.worker_id, event.epoch)
    if worker is None:
        return
    rows, tokens, ends = event.rows, event.tokens, event.ends
    taken = state.reported(worker, rows)
    grew = evaluation.progress(state, worker, event) if state.evaluations.running else False
    if np.count_nonzero(taken) < len(taken):
        rows, tokens, ends = rows[taken], tokens[taken], ends[taken]
    # KV of evaluations is no load of training; this also marks the worker's load as changed
    state.uses(worker, max(0, event.kv_used_tokens - state.evaluations.kv_tokens(worker.worker_id)))
    worker.waiting = event.waiting
    state.worklist.may_have_room(worker.index)
    version, response_tokens, prompt_tokens, claimed = state.requests.columns(
        "version", "tokens", "prompt_tokens", "claim"
    )
    wrong = version[rows] != event.version
    if np.count_nonzero(wrong):  # C1: such a token is never accepted
        first = int(wrong.argmax())
        state.counters.c1_violations += 1
        membership.evict(
            state, worker, f"it sampled {state.request_id[int(rows[first])]} under version {event.version}"
        )
        return
    ended = rows[ends.nonzero()].tolist()
    stalls.reported(state, worker, bool(grew or ended or np.count_nonzero(tokens > response_tokens[rows])))
    response_tokens[rows] = tokens
    before, context = claimed[rows], prompt_tokens[rows] + tokens
    if np.count_nonzero(context > before):
        claim = claimed[rows] = np.maximum(before, context)
        worker.kv_claimed += int((claim - before).sum())
    for row in ended:
        _finish(state, row)


def _finish(state: State, row: int) -> None:
    """Ends a response, or a turn of a session, which stays on its worker and in its handoff."""
    requests = state.requests
    tokens = int(requests["tokens"][row]) - int(requests["placed_tokens"][row])
    took_s = state.now_s - float(requests["placed_s"][row])
    state.rates.generated(tokens, took_s)
    if (home := state.owner(row)) is not None:
        state.places.generated(home.host, tokens, took_s, home.assigned - home.waiting, home.kv_expected)
    if requests["session"][row]:
        worker = state.take_away(row)
        state.idles(row)
        state.keep(row, worker)
        state.counters.turns_ended += 1
        return
    if row in state.handoffs:
        handoff.signal_row(state, row, Signal.FINISHED)
    state.take_away(row)
    complete(state, row)


def complete(state: State, row: int, broken_off: str = "") -> None:
    """Ends a response that is on no worker. ``broken_off`` is the reason if its environment has not ended it."""
    requests = state.requests
    group = int(requests["group"][row])
    requests["status"][row] = FINISHED
    state.predictor.observe(state.traits[group], int(requests["tokens"][row]))
    state.groups["unfinished"][group] -= 1
    request_id = state.request_id[row]
    state.out.append(do.BreakOffSession(request_id, broken_off) if broken_off else do.ScoreRequest(request_id))


def scored(state: State, event: on.RequestScored) -> None:
    if event.request_id in state.evaluations.requests:
        evaluation.scored(state, event.request_id)
        return
    row = state.request_row.get(event.request_id)
    if row is None or state.requests["status"][row] != FINISHED:
        return
    state.requests["status"][row] = SCORED
    group = int(state.requests["group"][row])
    unscored = state.groups["unscored"]
    unscored[group] -= 1
    if group in state.undecided:
        growth.scored(state, group, event)
    if not unscored[group]:
        state.groups["status"][group] = GROUP_FINISHED
        state.finished.setdefault(int(state.groups["deadline"][group]), deque()).append(group)
        state.freshness.finished(state.now_s - float(state.groups["admitted_s"][group]))
        deliver(state)


# ------------------------------------------------------------------------------------------------------------ trainer


def attached(state: State, event: on.TrainerAttached) -> None:
    window = state.window
    if event.trainer_epoch <= state.trainer_epoch:
        raise Conflict("trainer_epoch", event.trainer_epoch, f"above {state.trainer_epoch}", why="is not new")
    if not event.groups_per_step and not window.groups_per_step:
        raise InvalidValue("groups_per_step", 0, "at least 1, here or as window.groups_per_step")
    if event.groups_per_step > GROUPS_MAX:
        raise InvalidValue("groups_per_step", event.groups_per_step, f"at most {GROUPS_MAX}")
    another = event.groups_per_step and window.groups_per_step not in (0, event.groups_per_step)
    if another and (window.newest or state.config.window.groups_per_step):
        how = "configured" if state.config.window.groups_per_step else "set by the trained steps"
        allowed = f"{window.groups_per_step}; to change it, start the service with window.groups_per_step"
        raise Conflict("groups_per_step", event.groups_per_step, allowed, why=f"differs from the value {how}")
    if another:
        _resize(state, event.groups_per_step)
    elif not window.groups_per_step:
        window.set_groups_per_step(event.groups_per_step)
    state.trainer_epoch = event.trainer_epoch
    state.stream_step = None
    lease.attached(state)
    state.step_disturbed = True
    state.worklist.wake()


def _resize(state: State, groups: int) -> None:
    """Changes the step size before any step was trained. Groups beyond the new size are cancelled: the last of those in
    the first step, and the last of the open ones.
    """
    window = state.window
    reason = f"a trainer set groups_per_step to {groups}, from {window.groups_per_step}, before any step was trained"
    state.stream_step = None  # the stream of a fenced trainer
    for group in state.leased[groups:]:
        _drop(state, group, reason)
    del state.leased[groups:]
    taken = len(state.leased)
    is_open = [group for group in state.group_id if state.groups["status"][group] != LEASED]
    finished = state.groups["status"] == GROUP_FINISHED
    is_open.sort(key=lambda group: (not finished[group], int(state.group_id[group].removeprefix("g"))))
    for group in is_open[window.places(groups, taken) :]:
        cancel(state, on.GroupCancelled(state.group_id[group], reason))
    window.resize(groups, taken)
    state.short_step = -1


def step_requested(state: State, event: on.StepRequested) -> None:
    check_epoch(event.trainer_epoch, state.trainer_epoch)
    rejection.check_none(state)
    window = state.window
    if event.step != window.newest:
        raise _not_the_open(event.step, state)
    for group in state.leased:
        state.out.append(do.DeliverGroup(state.group_id[group], event.step, state.trainer_epoch, again=True))
    if window.step > event.step:
        state.out.append(do.CloseStep(event.step, state.trainer_epoch, exhausted=event.step == state.short_step))
        return
    state.stream_step = event.step
    lease.requested(state)
    state.freshness.opened(state.now_s)
    deliver(state)


def deliver(state: State) -> None:
    """Delivers finished groups to the open stream: due ones first, then by deadline, while the rest stays feasible."""
    window, counters = state.window, state.counters
    while state.stream_step == window.step:
        step = window.step
        deadline = next((deadline for deadline in sorted(state.finished) if window.takeable(deadline)), None)
        if deadline is None:
            break
        group = state.finished[deadline][0]
        _no_longer_finished(state, group, deadline)
        version = int(state.groups["version"][group])
        filled = window.take(version, deadline)
        state.groups["status"][group] = LEASED
        state.leased.append(group)
        counters.groups_taken += 1
        counters.staleness_max = max(counters.staleness_max, step - version)
        state.out.append(do.DeliverGroup(state.group_id[group], step, state.trainer_epoch))
        if filled:
            _close(state, step)
    end_if_exhausted(state)


def _no_longer_finished(state: State, group: int, deadline: int) -> None:
    """Removes a group from those that wait for a step. Empty deadlines are deleted, so that the table does not grow."""
    waiting = state.finished[deadline]
    waiting.remove(group)
    if not waiting:
        del state.finished[deadline]


def end_admission(state: State, _event: on.AdmissionEnded) -> None:
    """Drops drawn prompts that are not admitted: nothing was promised of them."""
    state.backlog.clear()
    state.exhausted = True
    evaluation.end_all(state)
    state.worklist.wake()
    end_if_exhausted(state)


def end_if_exhausted(state: State) -> None:
    """Ends the step short once no prompt is left and nothing is open, so that its trainer can commit it."""
    window = state.window
    done = state.exhausted and not state.backlog and not window.open_groups
    if done and state.stream_step == window.step:
        step = window.step
        if state.leased:
            state.short_step = step
            window.close_short()
        _close(state, step, exhausted=True)


def _close(state: State, step: int, *, exhausted: bool = False) -> None:
    state.out.append(do.CloseStep(step, state.trainer_epoch, exhausted))
    state.stream_step = None
    state.rates.filled(state.now_s)
    state.freshness.filled(state.now_s)
    state.worklist.wake()  # the window has moved


def retire(state: State) -> None:
    """Retires versions that no step can need; a version that a worker is loading is kept. The weights of a version that
    an evaluation pins stay until that has ended.
    """
    for version in sorted(state.pinned):
        if not evaluation.runs_under(state, version) and not state.hosting.loading(version):
            state.pinned.discard(version)
            _retire(state, version)
    while state.retired < state.window.oldest_kept:
        if any(worker.loading == state.retired for worker in state.workers.values()):
            return
        if evaluation.pins(state, state.retired):
            state.out.append(do.PinVersion(state.retired))
        else:
            _retire(state, state.retired)
        # delete empty queues, so that they do not accumulate with the versions
        if not state.waiting.get(state.retired, True):
            del state.waiting[state.retired]
        state.worklist.retire(state.retired)
        state.retired += 1


def _retire(state: State, version: int) -> None:
    arrival.forgotten(state, version)
    state.proven.discard(version)
    state.out.append(do.RetireVersion(version))


def commit(state: State, event: on.StepCommitted) -> None:
    """Ends a trained step whose weights are stored: forgets its groups, begins the next version."""
    check_commit(state, event.trainer_epoch, event.step)
    staleness, tokens = _staleness(state, event.step), _tokens(state) if state.adaptive is not None else 1
    for group in state.leased:
        state.out.append(do.ForgetGroup(state.group_id[group]))
        _free(state, group)
        state.counters.groups_trained += 1
    state.leased.clear()
    state.to_republish.clear()  # a commit implies that all rejected versions were republished
    state.window.publish()
    lease.committed(state)
    state.freshness.published(state.now_s, event.waited_s)
    _adapt(state, event, state.rates.published(state.now_s), staleness, tokens)
    precision.judge(state, event)


def _staleness(state: State, step: int) -> float:
    groups = list(state.leased)
    return step - float(state.groups["version"][groups].mean()) if groups else 0.0


def _tokens(state: State) -> int:
    """The tokens of the step's responses, at least 1."""
    rows = [row for group in state.leased for row in state.members[group]]
    return max(1, int(state.requests["tokens"][rows].sum())) if rows else 1


def _adapt(state: State, event: on.StepCommitted, took_s: float | None, staleness: float, tokens: int) -> None:
    """Passes the step to an adaptive window, and resizes it as that decides. ``took_s`` is None if unknown."""
    disturbed, state.step_disturbed = state.step_disturbed, False
    if state.adaptive is None:
        return
    signals = None
    if took_s and not disturbed:
        measured = (event.waited_s, event.clip_fraction, event.effective_sample, event.movement)
        waited_s, clipped, sample, movement = (value if value >= 0.0 else None for value in measured)
        signals = StepSignals(took_s, waited_s, clipped, sample, movement, staleness, tokens)
    resize = state.adaptive.saw(event.step, signals)
    state.freshness.price = state.adaptive.price
    if resize is not None:
        state.window.set_size(resize.size)
        state.out.append(do.ResizeWindow(resize.size, resize.reason))


def republished(state: State, event: on.VersionRepublished) -> None:
    """Lets workers load a republished version; its groups continue."""
    check_republish(state, event.trainer_epoch, event.version)
    rejection.republished(state, event.version)
    lease.republished(state)
    arrival.forgotten(state, event.version)
    state.step_disturbed = True


def check_republish(state: State, trainer_epoch: int, version: int) -> None:
    """Raises Conflict unless ``version`` is rejected or unavailable."""
    check_epoch(trainer_epoch, state.trainer_epoch)
    if not rejection.has_to_come(state, version):
        allowed = f"a rejected version: {', '.join(map(str, sorted(state.rejected))) or 'there is none'}"
        raise Conflict("version", version, allowed, why="is not rejected")


def check_commit(state: State, trainer_epoch: int, step: int) -> None:
    """Raises Conflict if ``step`` cannot be committed now: VersionRejected if a version must be republished first."""
    check_epoch(trainer_epoch, state.trainer_epoch)
    rejection.check_none(state)
    if step != state.window.newest:
        raise _not_the_open(step, state)
    if state.window.step <= step:
        raise Conflict("step", step, "a step that is full", why=f"still takes {state.window.left} groups")


def _not_the_open(step: int, state: State) -> Conflict:
    return Conflict("step", step, f"{state.window.newest}, the first that is not committed", why="is not the open step")


def check_epoch(trainer_epoch: int, present: int) -> None:
    """Raises Conflict if a call comes from a trainer other than the one that attached last."""
    if trainer_epoch != present:
        raise Conflict(
            "trainer_epoch", trainer_epoch, str(present), why="has ended, because another trainer has attached since"
        )


# ------------------------------------------------------------------------------------------------------------- cancel


def cancel(state: State, event: on.GroupCancelled) -> None:
    """Ends an open group and frees its room. Raises NotFound, or Conflict once a step has taken it."""
    group = state.group_row.get(event.group_id)
    if group is None:
        raise NotFound("group_id", event.group_id, "an admitted group that is not committed", why="is not in progress")
    if state.groups["status"][group] == LEASED:
        raise Conflict("group_id", event.group_id, "a group that no step has taken", why="is taken by a step")
    version, deadline = int(state.groups["version"][group]), int(state.groups["deadline"][group])
    for row in state.members[group]:
        withdraw(state, row)
    if state.groups["status"][group] == GROUP_FINISHED:
        _no_longer_finished(state, group, deadline)
        state.freshness.cancelled()
    state.window.give_back(version, deadline)
    _drop(state, group, event.reason)
    state.worklist.wake()
    deliver(state)


def withdraw(state: State, row: int) -> None:
    """Takes a request from its queue, worker, pool and handoff, and frees its KV."""
    handoff.signal_row(state, row, Signal.UNDO)
    status = state.requests["status"][row]
    if status == WAITING:
        state.waiting[int(state.requests["version"][row])].remove(row)
    elif status == IDLE:
        state.idles_no_more(row)
    drop_kv(state, row)
    state.worklist.wake()


def drop_kv(state: State, row: int) -> None:
    """Frees what a worker or pool has of a request."""
    if state.owner(row) is not None:
        placement.remove(state, row)
    elif state.requests["pool"][row]:
        parking.forget(state, row)
    state.requests["left"][row] = 0


def _drop(state: State, group: int, reason: str) -> None:
    state.out.append(do.DropGroup(state.group_id[group], reason))
    state.counters.groups_cancelled += 1
    _free(state, group)


def _free(state: State, group: int) -> None:
    rows = state.members.pop(group)
    for row in rows:
        del state.request_row[state.request_id.pop(row)]
    state.requests.free(rows)
    state.undecided.pop(group, None)
    del state.traits[group]
    del state.group_row[state.group_id.pop(group)]
    state.groups.free([group])
