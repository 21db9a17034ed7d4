"""Bugs to plant into the core, many as peers have had them, each a patch of one function."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core import machine, scheduler
from dora.core.balance import Balance
from dora.core.fleet.hosting import Hosting
from dora.core.fleet.pool import Pool
from dora.core.fleet.worker import Worker
from dora.core.groups.evaluations import RunningEvaluations
from dora.core.groups.queues import WaitingRequests
from dora.core.groups.window import Window
from dora.core.handoff import table
from dora.core.handoff.table import Action, Phase, Signal
from dora.core.policies.base import BasePolicy
from dora.core.rules import (
    admission,
    evaluation,
    handoff,
    lease,
    lifecycle,
    membership,
    parking,
    placement,
    rejection,
    restoring,
    selection,
    stalls,
)
from dora.core.state import LEASED, State
from dora.data.token_spans import Column, TokenColumns
from dora.lab.sim.faults import crash
from dora.lab.sim.faults.service import SimLog
from dora.orchestrator.recovery import recovery_state
from dora.orchestrator.rollout.responses.accepted import Accepted
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import TOKEN

Patch = pytest.MonkeyPatch


# -------------------------------------------------------------------------------------------------------------- restart


def leased_groups_are_open_again(patch: Patch) -> None:
    """Groups that the open step had taken wait for a step once more."""
    restored = recovery_state.restored

    def forgotten(*arguments: Any) -> on.Restored:
        event = restored(*arguments)
        left = event.left if event.step > event.newest else event.left + len(event.leased)
        return replace(event, leased=(), finished=(*event.finished, *event.leased), left=left)

    patch.setattr(recovery_state, "restored", forgotten)


def returned_request_is_taken_twice(patch: Patch) -> None:
    """Every reattaching worker continues its requests, whether or not another one does."""

    def all_of_them(state: State, version: int, requests: Mapping[str, int]) -> list[int]:
        rows = [state.request_row[name] for name in requests if name in state.request_row]
        return [row for row in rows if state.requests["version"][row] == version]

    patch.setattr(membership, "adoptable", all_of_them)
    patch.setattr(crash, "without_doubles", list)


def ids_begin_anew(patch: Patch) -> None:
    patch.setattr(recovery_state, "_next_name", lambda named, unsaid: 0)


def restored_requests_stand_in_no_line(patch: Patch) -> None:
    patch.setattr(restoring, "_line_up", lambda state, rows: None)


def deadlines_follow_the_window_of_now(patch: Patch) -> None:
    enter = admission.enter

    def by_the_window(state: State, *arguments: Any) -> list[int]:
        names, prompts, versions, _, rows = arguments
        return enter(state, names, prompts, versions, [state.window.deadline(version) for version in versions], rows)

    patch.setattr(restoring, "enter", by_the_window)


def verdicts_that_are_due_count_as_given(patch: Patch) -> None:
    patch.setattr(recovery_state, "FINISHED", recovery_state.SCORED)


def lost_verdicts_are_not_asked_for_again(patch: Patch) -> None:
    restored = restoring.restored

    def unasked(state: State, event: on.Restored) -> None:
        restored(state, event)
        state.out.clear()

    patch.setitem(machine._HANDLERS, on.Restored, unasked)


def trainer_is_told_before_the_journal(patch: Patch) -> None:
    """Acknowledged facts may be lost."""
    patch.setattr(SimLog, "relied_on", property(lambda self: 1, lambda self, count: None), raising=False)


# ----------------------------------------------------------------------------------------------------- book and journal


def repeated_tokens_are_taken_twice(patch: Patch) -> None:
    """A worker that repeats some of what the book holds adds them to it once more."""
    append = ResponseBuffer._append

    def all_of_them(
        self: ResponseBuffer, worker_id: str, version: int, columns: TokenColumns, held: Column, at: float
    ) -> Any:
        return append(self, worker_id, version, replace(columns, first_tokens=held), held, at)

    patch.setattr(ResponseBuffer, "_append", all_of_them)


def journal_mixes_up_tokens(patch: Patch) -> None:
    """A restored report has its tokens in another order."""
    record = Accepted.record

    def backwards(self: Accepted) -> Any:
        tokens = record(self)
        return tokens and replace(tokens, token_ids=tokens.token_ids[::-1])

    patch.setattr(Accepted, "record", backwards)


def restored_book_lacks_its_last_tokens(patch: Patch) -> None:
    restore = ResponseBuffer.restore

    def shortened(self: ResponseBuffer, group: Any, first: int, found: Any) -> None:
        restore(self, group, first, found)
        for row in group.rows:
            del self.at(row).delivered[-TOKEN.itemsize :]

    patch.setattr(ResponseBuffer, "restore", shortened)


# ---------------------------------------------------------------------------------------------------- window, admission


def count_based_admission(patch: Patch) -> None:
    def admissible(self: Window, version: int) -> int:
        live = self.deadline(version) >= self.step and version <= self.newest
        return self.size * self.groups_per_step - self.open_groups if live and self.groups_per_step else 0

    patch.setattr(Window, "admissible", admissible)


def feasible_off_by_one(patch: Patch) -> None:
    admissible = Window.admissible
    patch.setattr(Window, "admissible", lambda self, version: admissible(self, version) + (version == self.newest))


def tops_up_the_oldest(patch: Patch) -> None:
    """The oldest version always gets a step's worth."""
    admissible = Window.admissible

    def topped_up(self: Window, version: int) -> int:
        if version == self.oldest_live:
            return self.groups_per_step - self._open.get(self.deadline(version), 0)
        return admissible(self, version)

    patch.setattr(Window, "admissible", topped_up)
    patch.setattr(BasePolicy, "versions", lambda self, floor: reversed(floor.versions()))


def warm_up_over_submits(patch: Patch) -> None:
    admissible = Window.admissible
    patch.setattr(
        Window, "admissible", lambda self, version: admissible(self, version) if self.newest else 8 - self.open_groups
    )


def full_storage_is_not_looked_at(patch: Patch) -> None:
    patch.setattr(Window, "closed", property(lambda self: False, lambda self, closed: None), raising=False)


def full_storage_closes_for_ever(patch: Patch) -> None:
    closed = property(lambda self: self.__dict__.get("shut", False), lambda self, closed: _shut(self, closed))
    patch.setattr(Window, "closed", closed, raising=False)


def _shut(window: Window, closed: bool) -> None:
    window.__dict__["shut"] = closed or window.__dict__.get("shut", False)


def takes_whatever_is_finished(patch: Patch) -> None:
    patch.setattr(Window, "takeable", lambda self, deadline: self.left > 0 and self.newest == self.step)


def in_flight_not_counted(patch: Patch) -> None:
    patch.setattr(Window, "admit", lambda self, version: None)


def cancelled_keeps_its_place(patch: Patch) -> None:
    patch.setattr(Window, "give_back", lambda self, version, deadline: None)


def recovery_forgets_what_was_taken(patch: Patch) -> None:
    def attach(state: State, event: on.TrainerAttached) -> None:
        lifecycle.attached(state, event)
        state.window._open.clear()

    patch.setitem(machine._HANDLERS, on.TrainerAttached, attach)


def wider_window_holds_for_what_was_admitted(patch: Patch) -> None:
    """The bound is looked up when a group is taken: an open one lives as long as the window allows by then."""
    _resized_deadlines(patch, wider=True)


def narrower_window_holds_for_what_was_admitted(patch: Patch) -> None:
    """The same the other way round: what was begun in time may be due at once, more than a step takes."""
    _resized_deadlines(patch, wider=False)


def _resized_deadlines(patch: Patch, wider: bool) -> None:
    adapt = lifecycle._adapt

    def deadlines_anew(
        state: State, event: on.StepCommitted, took_s: float | None, staleness: float, tokens: int
    ) -> None:
        before = state.window.size
        adapt(state, event, took_s, staleness, tokens)
        window, groups = state.window, state.groups
        if window.size == before or (window.size > before) != wider:
            return
        for group in [row for row in state.group_id if groups["status"][row] != LEASED]:
            version, old = int(groups["version"][group]), int(groups["deadline"][group])
            new = window.deadline(version)
            window._count(version, old, -1)
            window._count(version, new, 1)
            groups["deadline"][group] = new
            if group in state.finished.get(old, ()):
                lifecycle._no_longer_finished(state, group, old)
                state.finished.setdefault(new, deque()).append(group)

    patch.setattr(lifecycle, "_adapt", deadlines_anew)


def narrower_window_lets_older_versions_go(patch: Patch) -> None:
    """The live versions are computed from the present window alone."""
    patch.setattr(Window, "oldest_live", property(lambda self: self.oldest_admitting))


def let_go_version_comes_back(patch: Patch) -> None:
    """As the window gets wider, it admits groups of versions that had left it."""
    patch.setattr(Window, "oldest_admitting", property(lambda self: max(0, self.step - self.size + 1)))


def draws_prompts_once(patch: Patch) -> None:
    def draw(state: State) -> None:
        if not state.counters.groups_admitted:
            admission.draw(state)

    patch.setattr(scheduler, "draw", draw)


# ------------------------------------------------------------------------------------------------------------ versions


def version_read_twice(patch: Patch) -> None:
    """Once when the group is admitted, and again when the request starts."""
    send = State.send

    def read_again(self: State, command: do.WorkerCommand, handoff: Any = None) -> None:
        if isinstance(command, do.StartRequest):
            command = replace(command, version=self.window.newest)
        send(self, command, handoff)

    patch.setattr(State, "send", read_again)


def version_stamped_at_completion(patch: Patch) -> None:
    def score(state: State, event: on.RequestScored) -> None:
        row = state.request_row.get(event.request_id)
        if row is not None:
            state.groups["version"][int(state.requests["group"][row])] = state.window.newest
        lifecycle.scored(state, event)

    patch.setitem(machine._HANDLERS, on.RequestScored, score)


def load_under_live_requests(patch: Patch) -> None:
    settle = membership.settle

    def settle_blindly(state: State, indexes: Iterable[int]) -> None:
        with patch.context() as blind:
            blind.setattr(Worker, "assigned", property(lambda self: 0))
            settle(state, indexes)

    patch.setattr(membership, "settle", settle_blindly)


def failed_load_serves(patch: Patch) -> None:
    def load_done(state: State, pending: Any, event: on.CommandDone) -> None:
        worker = state.workers[pending.command.worker_id]
        worker.loaded, worker.loading = worker.loading, -1
        state.rehosted(worker)

    patch.setattr(membership, "load_done", load_done)


def failed_load_is_never_tried_again(patch: Patch) -> None:
    load_done = membership.load_done
    patch.setattr(
        membership, "load_done", lambda state, pending, event: load_done(state, pending, event) if event.ok else None
    )


def weights_let_go_too_early(patch: Patch) -> None:
    patch.setattr(Window, "oldest_kept", property(lambda self: self.newest))


# ------------------------------------------------------------------------------------------------- bad publications


def refusal_is_always_the_workers_fault(patch: Patch) -> None:
    """As it was: three refusals end a worker, whoever published what nobody can load."""
    patch.setattr(rejection, "is_unproven", lambda state, version: False)


def rejected_version_is_planned_for(patch: Patch) -> None:
    def retarget(self: Balance, index: int, version: int) -> None:
        worker = self._state.worker_list[index]
        assert worker is not None
        worker.target = max(version, self._state.window.newest)
        self._state.rehosted(worker)

    patch.setattr(Balance, "_retarget", retarget)


def stream_goes_on_under_a_rejection(patch: Patch) -> None:
    judge = rejection.judge

    def still_streaming(state: State) -> None:
        stream_step = state.stream_step
        judge(state)
        state.stream_step = stream_step

    patch.setattr(rejection, "judge", still_streaming)


def doubted_version_is_tried_by_nobody(patch: Patch) -> None:
    patch.setattr(rejection, "_ask_another", lambda state, version, suspect, working: None)


def rejected_version_is_retired(patch: Patch) -> None:
    """Its weights are no good, so they are let go; what is bound to it waits for ever."""
    reject = rejection._reject

    def retired(state: State, version: int, suspect: Any) -> None:
        reject(state, version, suspect)
        state.out.append(do.RetireVersion(version))

    patch.setattr(rejection, "_reject", retired)


# ------------------------------------------------------------------------------------------------------------- workers


def drain_is_not_listed(patch: Patch) -> None:
    rehosted = State.rehosted
    patch.setattr(State, "rehosted", lambda self, worker: None if worker.draining else rehosted(self, worker))


def target_is_not_listed(patch: Patch) -> None:
    rebalance = Balance.rebalance

    def unlisted(self: Balance, trigger: Any) -> None:
        state = self._state
        moved = dict(state.hosting._moved)
        rebalance(self, trigger)
        state.hosting._moved.clear()
        state.hosting._moved.update(moved)

    patch.setattr(Balance, "rebalance", unlisted)


def busy_worker_stays_idle(patch: Patch) -> None:
    give = State.give

    def unnoted(self: State, row: int, worker: Worker) -> None:
        idle = worker.index in self.worklist.idle
        give(self, row, worker)
        self.worklist.rests(worker.index, idle)

    patch.setattr(State, "give", unnoted)


def given_work_is_not_noted(patch: Patch) -> None:
    give = State.give

    def silently(self: State, row: int, worker: Worker) -> None:
        changed = worker.index in self.loads._changed
        give(self, row, worker)
        if not changed:
            self.loads._changed.discard(worker.index)

    patch.setattr(State, "give", silently)


def staying_is_counted_again(patch: Patch) -> None:
    unlist = Hosting._unlist

    def unforgetting(self: Hosting, index: int) -> None:
        staying, kv_tokens = dict(self._staying), self._staying_kv
        unlist(self, index)
        self._staying, self._staying_kv = staying, kv_tokens

    patch.setattr(Hosting, "_unlist", unforgetting)


def dead_worker_keeps_its_requests(patch: Patch) -> None:
    patch.setattr(membership, "orphan", lambda state, row: None)


def dead_worker_is_picked_again(patch: Patch) -> None:
    patch.setattr(State, "remove_worker", lambda self, worker: None)


def epoch_is_not_looked_at(patch: Patch) -> None:
    patch.setattr(State, "worker_at", lambda self, worker_id, epoch: self.workers.get(worker_id))


def progress_reset_on_retry(patch: Patch) -> None:
    orphan = placement.orphan

    def reset(state: State, row: int) -> None:
        orphan(state, row)
        state.requests["tokens"][row] = 0

    patch.setattr(membership, "orphan", reset)


def claims_never_given_back(patch: Patch) -> None:
    take_away = State.take_away

    def leak(self: State, row: int) -> Worker:
        claim = int(self.requests["claim"][row])
        worker = take_away(self, row)
        worker.kv_claimed += claim
        return worker

    patch.setattr(State, "take_away", leak)


def aborted_request_is_left_on_its_worker(patch: Patch) -> None:
    send = State.send

    def forgetful(self: State, command: do.WorkerCommand, handoff: Any = None) -> None:
        if handoff is not None or not isinstance(command, do.RemoveRequest):
            send(self, command, handoff)

    patch.setattr(State, "send", forgetful)


def drain_is_noted_before_it_is_refused(patch: Patch) -> None:
    def drain(state: State, event: on.DrainRequested) -> None:
        state.counters.rebalances += 1
        membership.drain(state, event)

    patch.setitem(machine._HANDLERS, on.DrainRequested, drain)


# ------------------------------------------------------------------------------------------------------------ handoffs


def source_freed_before_commit(patch: Patch) -> None:
    for phase in (Phase.RESERVED, Phase.COPYING):
        key = (phase, Signal.FROZEN)
        patch.setitem(table.TABLE, key, (Phase.FROZEN, (Action.FREE_SOURCE, Action.COPY_IN)))


def failed_handoff_stays_frozen(patch: Patch) -> None:
    for key, (phase, actions) in list(table.TABLE.items()):
        kept = tuple(action for action in actions if action is not Action.THAW_SOURCE)
        patch.setitem(table.TABLE, key, (phase, kept))


def lost_workers_handoffs_go_on(patch: Patch) -> None:
    patch.setattr(handoff, "lost", lambda state, worker: None)


def later_life_ends_a_stranded_handoff(patch: Patch) -> None:
    """A source is known by its name alone: that it comes back and dies again ends what its first life left."""

    def lost(state: State, worker: Worker) -> None:
        for each in list(state.handoffs.values()):
            if each.source == worker.worker_id:
                handoff.signal_handoff(state, each, Signal.SOURCE_LOST)
            elif each.target == worker.worker_id:
                handoff.signal_handoff(state, each, Signal.TARGET_LOST)

    patch.setattr(handoff, "lost", lost)


def stranded_request_is_forgotten(patch: Patch) -> None:
    for key, (phase, actions) in list(table.TABLE.items()):
        if key[0] is Phase.STRANDED:
            patch.setitem(table.TABLE, key, (phase, tuple(a for a in actions if a is not Action.ORPHAN)))


def snapshot_is_never_released(patch: Patch) -> None:
    patch.setitem(handoff._ACTIONS, Action.RELEASE_SNAPSHOT, lambda state, handoff: None)


def reservation_is_not_cancelled(patch: Patch) -> None:
    """The target goes on with what it has copied in, though the handoff was undone."""
    patch.setitem(handoff._ACTIONS, Action.CANCEL_TARGET, lambda state, handoff: None)


# ----------------------------------------------------------------------------------------------------------- host tier


def lost_pool_is_still_counted_on(patch: Patch) -> None:
    """Its requests wait for KV that nobody has any more."""

    def lost(state: State, event: on.PoolLost) -> bool:
        pool = state.pools.get(event.pool_id)
        if pool is None or pool.epoch != event.epoch:
            return False
        state.answers_no_more(event.pool_id, event.epoch)
        handoff.lost(state, pool)
        state.remove_pool(pool)
        return True

    patch.setitem(machine._HANDLERS, on.PoolLost, lost)


def lost_pools_requests_are_forgotten(patch: Patch) -> None:
    unpark = State.unpark

    def forgetful(self: State, row: int) -> Any:
        line = self.waiting.get(int(self.requests["version"][row]), ())
        if row in line and row not in self.handoffs:
            line.remove(row)
        return unpark(self, row)

    def lost(state: State, event: on.PoolLost) -> bool:
        with patch.context() as forgetting:
            forgetting.setattr(State, "unpark", forgetful)
            return parking.lost(state, event)

    patch.setitem(machine._HANDLERS, on.PoolLost, lost)


def parked_claims_are_never_given_back(patch: Patch) -> None:
    unpark = State.unpark

    def leak(self: State, row: int) -> Any:
        claim = int(self.requests["claim"][row])
        pool = unpark(self, row)
        pool.kv_claimed += claim
        return pool

    patch.setattr(State, "unpark", leak)


def pool_takes_more_than_it_holds(patch: Patch) -> None:
    patch.setattr(Pool, "free", property(lambda self: self.kv_tokens))


def failed_resume_is_not_tried_again(patch: Patch) -> None:
    patch.setattr(handoff, "_wait_again", lambda state, handoff, signal: None)


def cancelled_request_stays_parked(patch: Patch) -> None:
    """The core lets it go, and does not tell the pool."""
    patch.setattr(parking, "forget", lambda state, row: state.unpark(row))


def resumed_request_stays_in_line(patch: Patch) -> None:
    resume = handoff.resume

    def lined_up(state: State, row: int, pool: Pool, target: Worker) -> None:
        resume(state, row, pool, target)
        state.wait_first(row)

    patch.setattr(handoff, "resume", lined_up)


# -------------------------------------------------------------------------------------------------- groups and trainer


def queue_drops_the_oldest(patch: Patch) -> None:
    patch.setattr(lifecycle, "deque", lambda: deque(maxlen=1))


def lease_ends_with_its_trainer(patch: Patch) -> None:
    def attach(state: State, event: on.TrainerAttached) -> None:
        lifecycle.attached(state, event)
        state.leased.clear()

    patch.setitem(machine._HANDLERS, on.TrainerAttached, attach)


def leased_groups_are_queued_again(patch: Patch) -> None:
    def attach(state: State, event: on.TrainerAttached) -> None:
        lifecycle.attached(state, event)
        for group in state.leased:
            state.finished.setdefault(int(state.groups["deadline"][group]), deque()).append(group)

    patch.setitem(machine._HANDLERS, on.TrainerAttached, attach)


def trainer_epoch_is_not_looked_at(patch: Patch) -> None:
    patch.setattr(lifecycle, "check_epoch", lambda given, present: None)


def commit_counts_twice(patch: Patch) -> None:
    """A commit asked for again, as its answer was lost, is taken for the next one."""
    patch.setattr(lifecycle, "check_commit", lambda state, trainer_epoch, step: None)


def straggler_is_dropped(patch: Patch) -> None:
    """Unfinished groups that are due are dropped silently, so that the step need not wait."""

    def commit(state: State, event: on.StepCommitted) -> None:
        lifecycle.commit(state, event)
        window = state.window
        for row, group_id in list(state.group_id.items()):
            due = state.groups["deadline"][row] == window.step
            if due and state.groups["status"][row] == admission.GroupStatus.OPEN:
                lifecycle.cancel(state, on.GroupCancelled(group_id, ""))

    patch.setitem(machine._HANDLERS, on.StepCommitted, commit)


def more_is_dropped_than_is_redundant(patch: Patch) -> None:
    patch.setattr(selection, "spare_groups", lambda fraction, groups_per_step: groups_per_step)


def step_ends_short_too_early(patch: Patch) -> None:
    def end(state: State) -> None:
        if state.exhausted and state.stream_step == state.window.step and state.leased:
            lifecycle._close(state, state.window.step, exhausted=True)

    patch.setattr(lifecycle, "end_if_exhausted", end)


# ---------------------------------------------------------------------------------------------------------- evaluation


def worker_without_tokens_stays(patch: Patch) -> None:
    patch.setattr(stalls, "overdue", lambda state: None)


def patience_is_short(patch: Patch) -> None:
    patch.setattr(stalls, "LEAST_S", 0.0)
    patch.setattr(stalls, "patience_s", lambda state, worker: worker.gap_s)


def lease_never_lapses(patch: Patch) -> None:
    patch.setattr(lease, "overdue", lambda state: None)


def lease_lapses_early(patch: Patch) -> None:
    patch.setattr(lease, "patience_s", lambda state: 1.0)


def evaluation_keeps_its_slots(patch: Patch) -> None:
    patch.setattr(evaluation, "_make_room", lambda state, worker: None)


def evaluations_die_with_their_worker(patch: Patch) -> None:
    def lost(self: RunningEvaluations, worker_id: str, now_s: float) -> None:
        self.placed.pop(worker_id, None)
        self.lent.discard(worker_id)

    patch.setattr(RunningEvaluations, "lost", lost)


def evaluation_outlives_its_weights(patch: Patch) -> None:
    """Its version is neither pinned, nor does the evaluation end."""
    patch.setattr(evaluation, "pins", lambda state, version: False)


def evaluation_ends_with_its_last_prompt(patch: Patch) -> None:
    """It is done as soon as nothing of it is left to begin."""

    def end(state: State, asked: evaluation.RunningEvaluation) -> None:
        if not asked.todo:
            evaluation._end(state, asked, "")

    patch.setattr(evaluation, "_end_if_done", end)


def preempted_evaluation_is_forgotten(patch: Patch) -> None:
    def wait(self: RunningEvaluations, request_id: str, now_s: float) -> None:
        self.leaves(self.requests[request_id])

    patch.setattr(RunningEvaluations, "wait", wait)


def evaluation_takes_more_than_its_share(patch: Patch) -> None:
    lend = evaluation._lend

    def more(state: State, worker: Worker) -> None:
        lend(state, worker)
        if worker.lent_slots and worker.slots > 1:
            worker.slots, worker.lent_slots = 1, worker.slots + worker.lent_slots - 1

    patch.setattr(evaluation, "_lend", more)


def core_draws_lots(patch: Patch) -> None:
    """The core depends on something that is in no event."""
    lots: Iterator[int] = itertools.count()
    push = WaitingRequests.push
    patch.setattr(WaitingRequests, "push", lambda self, row, rank: push(self, row, next(lots) * 7919 % 101))
