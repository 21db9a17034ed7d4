"""Sessions of evaluations: their turns, ends and time limits.

    RUNNING ──turn ended──▶ IDLE ──turn requested──▶ WAITING ──slot──▶ RUNNING
                             └──ended, timed out, failed──▶ FINISHED, or replaced

They run in what training leaves free (rules/evaluation.py), all turns under the version of their evaluation. An idle
one holds neither slot nor KV, so each turn is prefilled whole. Time in which a session waits for a slot, because
training has it, does not count for ``sessions.total_timeout_s``.
"""

from dora.core import commands as do
from dora.core import events as on
from dora.core.groups.evaluations import EvalRequest
from dora.core.rules import evaluation
from dora.core.rules.admission import attempt_id
from dora.core.rules.sessions import TOTAL, check_requested, may_replace
from dora.core.state import State
from dora.errors import Conflict, NotFound


def check_idle(state: State, request_id: str) -> EvalRequest:
    """Returns an idle session. Raises NotFound or Conflict."""
    request = _open(state, request_id)
    if not state.evaluations.is_idle(request_id):
        raise Conflict("session", request_id, "an idle session", why="has a turn that has not ended")
    return request


def requested(state: State, event: on.TurnRequested) -> None:
    """Queues the next turn of an idle session. Raises NotFound, InvalidValue or Conflict."""
    request = check_idle(state, event.request_id)
    check_requested(event, request.prompt_tokens, request.tokens)
    evaluation.withdraw(state, request)
    if event.is_prompt:
        request.prompt_tokens, request.tokens, request.input_tokens = event.tokens, 0, 0
    else:
        after = request.tokens if event.after_tokens == on.NO_FORK else event.after_tokens
        request.tokens, request.input_tokens = after + event.tokens, event.tokens
    state.evaluations.queue(request, state.now_s)


def ended(state: State, event: on.SessionEnded) -> None:
    """Finishes a session with what it has. Raises NotFound or Conflict."""
    request = _open(state, event.request_id)
    if not request.tokens:
        raise Conflict("session", event.request_id, "a session with a sampled token", why="has none")
    _finish(state, request)
    state.out.append(do.ScoreEvaluated(request.request_id))


def failed(state: State, event: on.SessionFailed) -> None:
    """Replaces a session whose environment has failed, or ends its group. Raises NotFound or Conflict."""
    request = _open(state, event.request_id)
    if event.fault == "prompt":
        evaluation.drop_group(state, request, f"{request.request_id}: {event.reason}")
    else:
        _replace(state, request, event.reason, is_spared=event.fault == "another")


def overdue(state: State) -> None:
    evaluations, limits = state.evaluations, state.config.sessions
    for request in [each for each in evaluations.requests.values() if each.is_session]:
        reason = _lateness(state, request)
        if not reason or evaluations.requests.get(request.request_id) is not request:
            continue  # the group of an earlier one has ended
        if limits.on_timeout == "end" and request.tokens:
            _break_off(state, request, reason)
        else:
            _replace(state, request, reason)


def _lateness(state: State, request: EvalRequest) -> str:
    limits, is_idle = state.config.sessions, state.evaluations.is_idle(request.request_id)
    if is_idle and limits.idle_timeout_s and state.now_s - request.idle_s >= limits.idle_timeout_s:
        return f"no turn was requested in {limits.idle_timeout_s:g} s"
    counts = request.began_s and (is_idle or request.worker_id)
    if counts and limits.total_timeout_s and state.now_s - request.began_s >= limits.total_timeout_s:
        return f"it took longer than {limits.total_timeout_s:g} s {TOTAL}"
    return ""


def _open(state: State, request_id: str) -> EvalRequest:
    request = state.evaluations.requests.get(request_id)
    if request is None or not request.is_session:
        raise NotFound("session", request_id, "an open session", why="is not open")
    if request.finished or request.scored:
        raise Conflict("session", request_id, "an open session", why="has ended")
    return request


def _finish(state: State, request: EvalRequest) -> None:
    evaluation.withdraw(state, request)
    request.finished = True


def _break_off(state: State, request: EvalRequest, reason: str) -> None:
    _finish(state, request)
    state.out.append(do.BreakOffSession(request.request_id, reason))


def _replace(state: State, request: EvalRequest, reason: str, *, is_spared: bool = False) -> None:
    """Begins another session in place of this one. One that was replaced too often ends with what it has, and without
    any token its group ends without a result.
    """
    if not may_replace(state, request.attempt, request.spared, is_spared=is_spared):
        if request.tokens:
            _break_off(state, request, reason)
        else:
            evaluation.drop_group(state, request, f"{request.request_id}: {reason}")
        return
    evaluation.withdraw(state, request)
    state.evaluations.forget(request)
    before, attempt = request.request_id, request.attempt + 1
    again = EvalRequest(
        request.row,
        attempt_id(before, attempt),
        request.evaluation_id,
        request.group_id,
        request.offered_tokens,
        request.offered_tokens,
        is_session=True,
        attempt=attempt,
        spared=request.spared + is_spared,
    )
    state.evaluations.begin(again, state.now_s)
    state.out.append(do.ReplaceRequest(before, again.request_id, reason))
