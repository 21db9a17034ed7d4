"""Evaluations: prompts that are sampled under one pinned version beside training, and never trained on.

Evaluation groups are kept apart from training groups: they are not in the window, in a queue, or in a policy's view.
Their requests have rows in the request table, which reports use and which stay empty. An evaluation may use two parts
of a worker that hosts its version (evaluated_sessions.py has what differs for sessions):

- **Idle slots**: slots that training leaves free while none of its requests waits for the version. The engine never
  runs more requests than it has slots. Training takes a slot back at once: the evaluation's youngest request leaves,
  waits with its tokens, and continues elsewhere or later.
- **A share**, if one was requested: this share of each such worker's slots and KV is allotted to evaluations, and
  training has the rest. A worker keeps at least one slot for training. The same share of all workers, rounded down,
  stays with the version when training moves to a newer one.

KV in use stays below ``balance.pressure`` in both cases, and a worker that training assigns another version leaves its
evaluation at once. Starved workers get the newest version if an evaluation wants it, even without a prompt for it.

A running evaluation pins its version: its weights stay after it has left the window, though no step may train on it and
nothing of it is admitted (C3). ``service.evaluation_versions`` bounds the pinned versions. ``UNHOSTED_S`` after the
last worker has moved to a newer version, one is assigned to the evaluation until it ends.
"""

from collections import deque
from typing import Final

import numpy as np

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.worker import Worker
from dora.core.groups.evaluations import EvalRequest, RunningEvaluation, RunningEvaluations
from dora.core.rules import arrival, membership
from dora.core.state import State
from dora.data.types import Arrival
from dora.errors import Conflict, InvalidValue, NotFound

EVALUATIONS_MAX: Final = 8  # running at the same time
RESPONSES_MAX: Final = 1 << 16  # in one evaluation
SHARE_MAX: Final = 0.5  # of a worker's slots, for all running evaluations together
START_FILL: Final = 0.75  # of a worker's KV in use: above it no further request begins in an idle slot
LEFT_WINDOW: Final = (
    "version {} has left the window, and evaluations keep as many others as service.evaluation_versions allows: {}"
)
UNLOADED: Final = "version {}, which has left the window, could not be loaded: {}"
UNHOSTED_S: Final = 30.0  # an evaluation whose version no worker hosts gets one then
DRAINING: Final = "the service drains"


# -------------------------------------------------------------------------------------------------------------- events


def requested(state: State, event: on.EvaluationRequested) -> None:
    """Begins an evaluation. Raises InvalidValue, Conflict or NotFound if that is impossible."""
    running, window = state.evaluations.running, state.window
    version = window.newest_sound if event.version == on.NEWEST else event.version
    if event.evaluation_id in running:
        raise Conflict("evaluation_id", event.evaluation_id, "a new one", why="is in use")
    if state.evaluations.closed:
        raise Conflict("evaluation", event.evaluation_id, "requested before the service drains", why="comes too late")
    if len(running) >= EVALUATIONS_MAX:
        allowed = f"one of {EVALUATIONS_MAX} at the same time: repeat when one has ended"
        raise Conflict("evaluation", event.evaluation_id, allowed, why="is one too many")
    responses = sum(prompt.group_size for prompt in event.prompts)
    if not 0 < responses <= RESPONSES_MAX:
        raise InvalidValue("prompts", f"{responses:,} responses", f"1 to {RESPONSES_MAX:,} in all")
    left = SHARE_MAX - sum(each.share for each in running.values())
    if not 0.0 <= event.share <= left:
        raise InvalidValue(
            "share", event.share, f"0 to {left:g}: the part of {SHARE_MAX:g} that other evaluations leave"
        )
    if not state.keeps_weights(version) or version > window.newest:
        allowed = f"a live version, {window.oldest_kept} to {window.newest}"
        raise NotFound("version", version, allowed, why="is not live")
    prompts = deque(event.prompts)
    state.evaluations.stirred = True
    state.worklist.wake()  # starved workers may be wanted
    running[event.evaluation_id] = RunningEvaluation(
        event.evaluation_id, version, event.share, len(prompts), prompts, hosted_s=state.now_s
    )


def cancelled(state: State, event: on.EvaluationCancelled) -> None:
    """Ends an evaluation with its present results. Raises NotFound if none with this id runs."""
    evaluation = state.evaluations.running.get(event.evaluation_id)
    if evaluation is None:
        raise NotFound("evaluation_id", event.evaluation_id, "one that runs", why="does not run")
    _end(state, evaluation, event.reason)


def progress(state: State, worker: Worker, event: on.TokensReported) -> bool:
    """Accepts a worker's tokens of evaluation requests. Returns whether there were any."""
    evaluations, grew = state.evaluations, False
    places = np.flatnonzero(evaluations.reported(worker.worker_id, event.rows)).tolist()
    requests = [evaluations.at[int(event.rows[place])] for place in places]
    for request in requests:
        if evaluations.running[request.evaluation_id].version != event.version:  # C1
            state.counters.c1_violations += 1
            membership.evict(state, worker, f"it sampled {request.request_id} under version {event.version}")
            return False
    for place, request in zip(places, requests, strict=True):
        grew |= int(event.tokens[place]) > request.tokens or bool(event.ends[place])
        evaluations.grows(request, int(event.tokens[place]))
        if event.ends[place] and request.is_session:
            _pause(state, worker, request)
        elif event.ends[place]:
            evaluations.leaves(request)
            request.finished = True
            state.out.append(do.ScoreEvaluated(request.request_id))
    return grew


def _pause(state: State, worker: Worker, request: EvalRequest) -> None:
    """Ends a turn of a session. Its KV goes at once: what training leaves free is for requests that run."""
    state.send(do.RemoveRequest(worker.worker_id, worker.epoch, state.command_id(), request.request_id))
    state.evaluations.leaves(request)
    state.evaluations.rest(request, state.now_s)


def scored(state: State, request_id: str) -> None:
    """Notes a verdict; the last one completes its group. Verdicts on unfinished responses are ignored."""
    evaluations = state.evaluations
    request = evaluations.requests.get(request_id)
    if request is None or not request.finished:
        return
    evaluation = evaluations.running[request.evaluation_id]
    request.finished, request.scored = False, True  # a second verdict is ignored
    evaluation.groups[request.group_id] -= 1
    if not evaluation.groups[request.group_id]:
        evaluation.done += 1
        _forget(state, evaluation, request.group_id)
        state.out.append(do.EndEvaluationGroup(evaluation.evaluation_id, request.group_id))
        _end_if_done(state, evaluation)


def started(state: State, command: do.StartRequest, event: on.CommandDone) -> None:
    """Handles the outcome of a StartRequest. A group that no engine can take is dropped with the reason."""
    request = state.evaluations.requests.get(command.request_id)
    if request is None or request.starting != command.command_id:
        return  # it has moved elsewhere
    if event.ok:
        request.starting = 0
    elif event.error_kind == "invalid":
        drop_group(state, request, event.error)
    else:
        membership.evict(
            state, state.workers[command.worker_id], f"{command.request_id} could not start: {event.error}"
        )


def runs_under(state: State, version: int) -> bool:
    return any(each.version == version for each in state.evaluations.running.values())


def pins(state: State, version: int) -> bool:
    """Pins a version that leaves the window while evaluations run under it. Without room for another pinned version
    they end. Returns whether it is pinned.
    """
    if not runs_under(state, version):
        return False
    most = state.config.evaluation_versions
    if len(state.pinned) < most:
        state.pinned.add(version)
        return True
    _end_under(state, version, LEFT_WINDOW.format(version, most))
    return False


def not_loaded(state: State, version: int, error: str) -> None:
    """Ends evaluations of a pinned version that a worker could not load: only training is worth further attempts."""
    if version in state.pinned:
        _end_under(state, version, UNLOADED.format(version, error))


def _end_under(state: State, version: int, reason: str) -> None:
    for evaluation in [each for each in state.evaluations.running.values() if each.version == version]:
        _end(state, evaluation, reason)


def keeps(state: State, worker: Worker | None) -> bool:
    """Returns whether the worker stays with its version for an evaluation: it was claimed, or is part of a share. With
    several workers a share is one of them at least.
    """
    running = state.evaluations.running
    if not running or worker is None or worker.target in state.window.quarantined:
        return False
    if any(each.claims == worker.worker_id and each.version == worker.target for each in running.values()):
        return True
    share = sum(each.share for each in running.values() if each.version == worker.hosts)
    if worker.hosts < 0 or not share:
        return False
    workers = state.hosting.staying()[0]
    return len(state.hosting.targeting(worker.hosts)) <= max(int(workers > 1), int(share * workers))


def for_newest(state: State, starved: frozenset[int]) -> frozenset[int]:
    """The starved workers of old versions, by index, that load the newest version for an evaluation though no prompt
    waits for it. Workers that evaluate the old version continue.
    """
    newest, evaluations = state.window.newest_sound, state.evaluations
    if not any(each.version == newest and (each.todo or each.waiting) for each in evaluations.running.values()):
        return frozenset()
    evaluating = {state.workers[worker_id].index for worker_id in evaluations.placed}
    return starved - evaluating


def claim_workers(state: State) -> None:
    """Assigns a worker to each evaluation of an old version that no worker has hosted for ``UNHOSTED_S``."""
    for evaluation in state.evaluations.running.values():
        version = evaluation.version
        if version >= state.window.newest_sound or state.hosting.targeting(version):
            evaluation.hosted_s = state.now_s
        elif state.now_s - evaluation.hosted_s >= UNHOSTED_S and version not in state.window.quarantined:
            able = (each for each in state.workers.values() if arrival.holds(state, each.host, version))
            free = [worker for worker in able if not worker.draining and not keeps(state, worker)]
            if free:
                worker = min(free, key=lambda each: (each.loading >= 0, each.assigned, each.index))
                worker.target, evaluation.claims = version, worker.worker_id
                state.rehosted(worker)
                state.worklist.wake()


def end_all(state: State) -> None:
    """Ends all evaluations as the service drains."""
    state.evaluations.closed = True
    for evaluation in list(state.evaluations.running.values()):
        _end(state, evaluation, DRAINING)


# ------------------------------------------------------------------------------------------------------------ settling


def settle(state: State) -> None:
    """Called after every event: returns slots that training needs, and uses those that it leaves free."""
    evaluations = state.evaluations
    evaluations.stirred = False
    if not evaluations.running and not evaluations.lent:
        return
    shared = {each.version for each in evaluations.running.values() if each.share}
    sharing = {worker.worker_id for version in shared for worker in state.workers_of(version)}
    for worker_id in sorted(sharing | evaluations.lent):
        _lend(state, state.workers[worker_id])
    for worker_id in list(evaluations.placed):
        _make_room(state, state.workers[worker_id])
    for version in sorted({each.version for each in evaluations.running.values() if each.waiting or each.todo}):
        of_version = [each for each in evaluations.running.values() if each.version == version]
        for worker in state.workers_of(version):
            while can := [each for each in of_version if _takes_one(state, worker, each)]:
                _start_next(state, worker, min(can, key=lambda each: each.placed))


def _lend(state: State, worker: Worker) -> None:
    """Allots the share of this worker that evaluations of its version asked for, or takes it back."""
    share = sum(each.share for each in state.evaluations.running.values() if each.version == worker.hosts)
    slots, kv_tokens = worker.slots + worker.lent_slots, worker.kv_tokens + worker.lent_kv_tokens
    lent = min(slots - 1, max(1, int(share * slots))) if share else 0
    lent_kv_tokens = int(share * kv_tokens) if lent else 0
    if (lent, lent_kv_tokens) == (worker.lent_slots, worker.lent_kv_tokens):
        return
    worker.lent_slots, worker.lent_kv_tokens = lent, lent_kv_tokens
    worker.slots, worker.kv_tokens = slots - lent, kv_tokens - worker.lent_kv_tokens
    state.rehosted(worker)
    if lent:
        state.evaluations.lent.add(worker.worker_id)
    else:
        state.evaluations.lent.discard(worker.worker_id)


def _make_room(state: State, worker: Worker) -> None:
    """Removes the youngest evaluation requests from a worker until training has the slots and KV that it needs."""
    evaluations = state.evaluations
    while (youngest := evaluations.youngest(worker.worker_id)) is not None:
        if worker.hosts == evaluations.running[youngest.evaluation_id].version and _fits(state, worker):
            return
        evaluations.running[youngest.evaluation_id].preempted += 1
        _evict(state, worker, youngest.request_id)


def _fits(state: State, worker: Worker) -> bool:
    evaluations, lent_kv = state.evaluations, worker.lent_kv_tokens
    count, kv_tokens = evaluations.count(worker.worker_id), evaluations.kv_tokens(worker.worker_id)
    slots_fit = count <= max(worker.lent_slots, worker.slots + worker.lent_slots - worker.assigned)
    if count == 1 and not worker.assigned:
        return slots_fit
    most = state.config.balance.pressure * (worker.kv_tokens + lent_kv)
    return slots_fit and (kv_tokens <= lent_kv or worker.kv_expected + kv_tokens <= most)


def _takes_one(state: State, worker: Worker, evaluation: RunningEvaluation) -> bool:
    """Returns whether another request of this evaluation may begin here: in the share or in idle slots."""
    evaluations = state.evaluations
    count, kv_tokens = evaluations.count(worker.worker_id), evaluations.kv_tokens(worker.worker_id)
    if worker.assigned + count >= worker.slots + worker.lent_slots:
        return False
    if not (evaluation.waiting or _begins_another(state, evaluation)):
        return False
    kv_tokens += _next_tokens(evaluations, evaluation)
    if evaluation.share and count < worker.lent_slots and kv_tokens <= worker.lent_kv_tokens:
        return True
    if state.waiting.get(evaluation.version):
        return False
    if not worker.assigned and not count:
        return True  # otherwise a long request would never run
    return kv_tokens <= START_FILL * (worker.kv_tokens + worker.lent_kv_tokens) - worker.kv_expected


def _begins_another(state: State, evaluation: RunningEvaluation) -> bool:
    """Returns whether another group may begin. Sessions that wait for their environments are at most as many as the
    version has slots, and one group.
    """
    if not evaluation.todo or not evaluation.todo[0].sessions:
        return bool(evaluation.todo)
    workers = state.workers_of(evaluation.version)
    return len(evaluation.idle) < sum(worker.slots + worker.lent_slots for worker in workers)


def _next_tokens(evaluations: RunningEvaluations, evaluation: RunningEvaluation) -> int:
    if evaluation.waiting:
        return evaluations.requests[evaluation.waiting[0]].context + 1
    return evaluation.todo[0].prompt_tokens + 1


def _start_next(state: State, worker: Worker, evaluation: RunningEvaluation) -> None:
    """Starts the next request here, of a new group if none waits. Sessions without a prompt ask for it first."""
    if not evaluation.waiting:
        _begin_group(state, evaluation, evaluation.todo.popleft())
    if not evaluation.waiting:
        return
    request = state.evaluations.requests[evaluation.waiting.popleft()]
    arrival: Arrival = "re-prefilled" if request.tokens > request.input_tokens else "new"
    command_id, version = state.command_id(), evaluation.version
    state.evaluations.give(request, worker.worker_id, command_id, state.now_s)
    state.send(do.StartRequest(worker.worker_id, worker.epoch, command_id, request.request_id, version, arrival))


def _begin_group(state: State, evaluation: RunningEvaluation, prompt: on.OfferedPrompt) -> None:
    group_id = f"{evaluation.evaluation_id}.{evaluation.begun}"
    evaluation.begun += 1
    ids = tuple(f"{group_id}.{index}" for index in range(prompt.group_size))
    rows = state.requests.allocate(len(ids))  # the rows stay empty: training does not see evaluations
    evaluation.groups[group_id] = len(ids)
    for row, name in zip(rows, ids, strict=True):
        tokens = prompt.prompt_tokens
        request = EvalRequest(row, name, evaluation.evaluation_id, group_id, tokens, tokens, prompt.sessions)
        state.evaluations.begin(request, state.now_s)
    state.out.append(
        do.BeginEvaluationGroup(evaluation.evaluation_id, group_id, prompt.prompt_id, evaluation.version, ids)
    )


# ------------------------------------------------------------------------------------------------------------- leaving


def _evict(state: State, worker: Worker, request_id: str) -> None:
    """Removes a request from its worker; it waits. The worker gets this command before others of the same event that
    use the slot or change the version.
    """
    command_id = state.command_id()
    state.send_first(do.RemoveRequest(worker.worker_id, worker.epoch, command_id, request_id))
    state.evaluations.wait(request_id, state.now_s)


def withdraw(state: State, request: EvalRequest) -> None:
    """Takes a request off its worker, out of its queue, or out of its pause."""
    evaluation = state.evaluations.running[request.evaluation_id]
    if request.worker_id:
        _evict(state, state.workers[request.worker_id], request.request_id)
    if request.request_id in evaluation.waiting:
        evaluation.waiting.remove(request.request_id)
    evaluation.idle.pop(request.request_id, None)
    state.evaluations.stirred = True


def drop_group(state: State, request: EvalRequest, reason: str) -> None:
    evaluation = state.evaluations.running[request.evaluation_id]
    evaluation.refused += 1
    _forget(state, evaluation, request.group_id)
    state.out.append(do.EndEvaluationGroup(evaluation.evaluation_id, request.group_id, reason))
    _end_if_done(state, evaluation)


def _forget(state: State, evaluation: RunningEvaluation, group_id: str) -> None:
    evaluations = state.evaluations
    for request_id in [name for name, each in evaluations.requests.items() if each.group_id == group_id]:
        request = evaluations.requests[request_id]
        withdraw(state, request)
        evaluations.forget(request)
        state.requests.free([request.row])
    del evaluation.groups[group_id]


def _end_if_done(state: State, evaluation: RunningEvaluation) -> None:
    if not evaluation.groups and not evaluation.todo:
        _end(state, evaluation, "")


def _end(state: State, evaluation: RunningEvaluation, reason: str) -> None:
    evaluations = state.evaluations
    for group_id in list(evaluation.groups):
        _forget(state, evaluation, group_id)
    del evaluations.running[evaluation.evaluation_id]
    state.worklist.wake()  # workers that it retained are free
    heir = next((each for each in evaluations.running.values() if each.version == evaluation.version), None)
    if heir is not None:
        heir.claims = heir.claims or evaluation.claims
    elif evaluation.claims or evaluation.version in state.pinned:
        state.replan = True
    state.out.append(do.EndEvaluation(evaluation.evaluation_id, reason))
