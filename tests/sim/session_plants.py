"""Bugs of sessions to plant into the core and the shell, each a patch of one function."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core import machine
from dora.core.fleet.worker import Worker
from dora.core.groups.evaluations import EvalRequest
from dora.core.rules import (
    admission,
    evaluated_sessions,
    evaluation,
    handoff,
    lifecycle,
    membership,
    placement,
    sessions,
)
from dora.core.state import IDLE, RequestStatus, State
from dora.data.trajectory import Trajectory
from dora.journal import records
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.ledger import SimResponse
from dora.lab.sim_engine.request import SimRequest
from dora.orchestrator.rollout.responses import branches, delivery
from dora.orchestrator.rollout.responses import buffer as response_buffer
from dora.orchestrator.rollout.responses.state import ResponseState

Patch = pytest.MonkeyPatch


def weights_change_under_idle_sessions(patch: Patch) -> None:
    patch.setattr(Worker, "is_empty", property(lambda self: not self.assigned))


def idle_sessions_stay_with_a_lost_worker(patch: Patch) -> None:
    lost = membership.lost

    def forgets(state: State, event: on.WorkerLost) -> bool:
        worker = state.worker_at(event.worker_id, event.epoch)
        if worker is not None:
            worker.kept = set()
        return lost(state, event)

    patch.setitem(machine._HANDLERS, on.WorkerLost, forgets)


def turn_counts_as_an_end(patch: Patch) -> None:
    """The group is taken for whole once each of its sessions has had a turn."""
    finish = lifecycle._finish

    def ends(state: State, row: int) -> None:
        finish(state, row)
        if state.requests["status"][row] == IDLE:
            state.groups["unfinished"][int(state.requests["group"][row])] -= 1

    patch.setattr(lifecycle, "_finish", ends)


def evaluated_turn_counts_as_an_end(patch: Patch) -> None:
    def ends(state: State, worker: Worker, request: EvalRequest) -> None:
        state.evaluations.leaves(request)
        request.finished = True
        state.out.append(do.ScoreEvaluated(request.request_id))

    patch.setattr(evaluation, "_pause", ends)


def evaluated_replacement_keeps_its_tokens(patch: Patch) -> None:
    replaced = evaluated_sessions._replace

    def keeps(state: State, request: EvalRequest, reason: str, *, is_spared: bool = False) -> None:
        replaced(state, request, reason, is_spared=is_spared)
        again = state.evaluations.at.get(request.row)
        if again is not None:
            again.tokens = request.tokens

    patch.setattr(evaluated_sessions, "_replace", keeps)


def replacement_counts_as_one_more(patch: Patch) -> None:
    replaced = sessions._replace

    def more(state: State, row: int, reason: str, *, is_spared: bool = False) -> None:
        group, count = int(state.requests["group"][row]), state.counters.sessions_replaced
        replaced(state, row, reason, is_spared=is_spared)
        if state.counters.sessions_replaced > count:
            state.groups["unfinished"][group] += 1

    patch.setattr(sessions, "_replace", more)


def replacement_has_the_same_name(patch: Patch) -> None:
    patch.setattr(sessions, "attempt_id", lambda request_id, attempt: request_id)


def replacement_is_of_the_newest_version(patch: Patch) -> None:
    replaced = sessions._replace

    def newest(state: State, row: int, reason: str, *, is_spared: bool = False) -> None:
        state.requests["version"][row] = state.window.newest
        replaced(state, row, reason, is_spared=is_spared)

    patch.setattr(sessions, "_replace", newest)


def turn_asked_in_a_handoff_is_lost(patch: Patch) -> None:
    patch.setattr(handoff, "_wait_for_turn", lambda state, ended: None)


def moved_session_is_not_extended(patch: Patch) -> None:
    """Its KV arrives, and nobody tells the worker what was given."""
    patch.setattr(placement, "arrive", lambda state, row, worker: state.give(row, worker))
    patch.setattr(handoff, "arrive", lambda state, row, worker: state.give(row, worker))


def silent_sessions_are_waited_for(patch: Patch) -> None:
    patch.setattr(sessions, "overdue", lambda state: None)


def ended_session_may_end_again(patch: Patch) -> None:
    def ended(state: State, event: on.SessionEnded) -> None:
        row = state.request_row[event.request_id]
        if state.requests["status"][row] in (RequestStatus.FINISHED, RequestStatus.SCORED):
            lifecycle.complete(state, row)
        elif state.requests["tokens"][row]:
            sessions._finish(state, row, "")

    patch.setitem(machine._HANDLERS, on.SessionEnded, ended)


def opened_groups_are_beyond_the_window(patch: Patch) -> None:
    """A group whose caller names its version is neither counted nor refused."""

    def asked(state: State, event: on.GroupRequested) -> None:
        entry = admission._enqueue(state, event.prompt)
        state.backlog.remove(entry)
        admission.admit(state, entry, event.version)
        state.worklist.wake()

    patch.setitem(machine._HANDLERS, on.GroupRequested, asked)


def two_turns_at_once(patch: Patch) -> None:
    """A turn is queued, whatever its session does."""

    def asked(state: State, event: on.TurnRequested) -> None:
        row = state.request_row.get(event.request_id)
        if row is not None and state.requests["status"][row] == IDLE:
            sessions.requested(state, event)

    patch.setitem(machine._HANDLERS, on.TurnRequested, asked)


def asked_turn_is_queued_twice(patch: Patch) -> None:
    """One that waits for its worker's slot is not taken from the queue as it begins there."""

    def leaves(state: State, row: int) -> None:
        if (worker := state.owner(row)) is not None:
            worker.waiting_turns.pop(row, None)
            if not worker.waiting_turns:
                state.waiting_turns_at.discard(worker.index)
        else:
            state.waiting[int(state.requests["version"][row])].remove(row)

    patch.setattr(placement, "leave_queue", leaves)


def another_history_is_continued(patch: Patch) -> None:
    """A worker that has returned continues a turn that the journal does not know."""

    def continues(self: UnreliableWorld, response: SimResponse, request: SimRequest | None, tokens: int) -> bool:
        return tokens >= response.tokens

    patch.setattr(UnreliableWorld, "_continues", continues)


def journal_forgets_attempts(patch: Patch) -> None:
    record = response_buffer._record

    def forgets(*arguments: Any, **named: Any) -> records.Tokens:
        made = record(*arguments, **named)
        return replace(made, attempts=made.attempts[:0])

    patch.setattr(response_buffer, "_record", forgets)


def journal_forgets_ends(patch: Patch) -> None:
    patch.setattr(records, "CLOSED", 0)


def dropped_kv_is_believed_there(patch: Patch) -> None:
    """Who makes room forgets to tell the core's books."""

    def drop(state: State, row: int) -> None:
        worker = state.owner(row)
        if worker is not None:
            worker.kept.discard(row)

    patch.setattr(lifecycle, "drop_kv", drop)


def cancelled_session_stays_idle(patch: Patch) -> None:
    patch.setattr(State, "idles_no_more", lambda self, row: None)


def fork_keeps_the_kv_of_the_branch_it_leaves(patch: Patch) -> None:
    patch.setattr(sessions, "_fork", lambda state, row, event: state.idles_no_more(row))


def branch_that_a_fork_left_counts_for_ever(patch: Patch) -> None:
    """Its worker has cut it, and the core's books still have all of it."""
    extend = placement.extend

    def counts(state: State, row: int, worker: Worker) -> None:
        left = int(state.requests["left"][row])
        extend(state, row, worker)
        state.requests["left"][row] = left

    patch.setattr(placement, "extend", counts)


def journal_forgets_forks(patch: Patch) -> None:
    record = response_buffer._record

    def forgets(*arguments: Any, turns: Any = (), **named: Any) -> records.Tokens:
        return record(*arguments, turns=[turn[:5] for turn in turns], **named)

    patch.setattr(response_buffer, "_record", forgets)


def sampled_tokens_count_in_each_branch(patch: Patch) -> None:
    delivered = branches.trajectories

    def doubles(entry: ResponseState, *of: int) -> Iterator[Trajectory]:
        for each in delivered(entry, *of):
            mask = each.loss_mask.copy()
            mask[: each.shared_prefix_tokens] = 1
            yield replace(each, loss_mask=mask)

    patch.setattr(delivery, "trajectories", doubles)
