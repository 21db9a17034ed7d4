"""The one entry point of the core: an event in, commands out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dora.config import Config
from dora.core import commands as do
from dora.core import events as on
from dora.core.balance import Balance
from dora.core.commands import Command
from dora.core.groups.freshness import Freshness
from dora.core.handoff.table import Signal
from dora.core.policies import POLICIES, policy_of
from dora.core.policy import Policy
from dora.core.rules import (
    admission,
    arrival,
    evaluated_sessions,
    evaluation,
    handoff,
    lease,
    lifecycle,
    membership,
    notice,
    parking,
    placement,
    rejection,
    restoring,
    selection,
    sessions,
    stalls,
)
from dora.core.scheduler import Scheduler
from dora.core.state import Counters, State
from dora.core.table import Column


class Machine:
    """Window, admission, partition and handoff of a whole service, as a deterministic object.

    ``handle`` takes every event, in order, with its time, and returns the commands to run, in order. An event that is
    not allowed raises a DoraError and changes nothing; one of an ended epoch is ignored.
    """

    def __init__(self, config: Config, policy: Policy | None = None) -> None:
        """``policy`` replaces the configured one."""
        self._state = State(config)
        strategy = POLICIES.get(config.balance.policy)
        if strategy is not None and not strategy.by_freshness:
            self._state.freshness = Freshness(0.0)
        self._balance = Balance(self._state, policy or policy_of(config.balance, config.window))
        self._scheduler = Scheduler(self._state, self._balance)
        self._drops = config.selection.redundant_fraction > 0

    def handle(self, event: on.Event, now_s: float) -> list[Command]:
        state = self._state
        state.now_s = now_s
        assert not state.out
        try:
            counts = _HANDLERS[type(event)](state, event) is not False
            if state.suspects:
                rejection.judge(state)
            if state.unavailable:
                rejection.ask_for_unavailable(state)
            trigger = self._balance.trigger(event) if counts else None
            if trigger is not None:
                self._balance.rebalance(trigger)
            if self._drops:
                selection.drop_surplus(state)
            settled = self._scheduler.run()
            if settled or state.evaluations.stirred or not isinstance(event, on.TokensReported | on.Progress):
                evaluation.settle(state)  # a report alone takes no slot
            return state.out
        finally:
            state.out = []

    @property
    def counters(self) -> Counters:
        """A copy of the counters since the start."""
        return replace(self._state.counters)

    @property
    def policy(self) -> Policy:
        """The deciding strategy. A new instance may replace it at any time (policy.py)."""
        return self._balance.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._balance.policy = policy

    @property
    def state(self) -> State:
        """The state, for reading: operators' views, invariants. Only ``handle`` may change it."""
        return self._state

    def owned(self, worker_id: str, epoch: int, rows: Column) -> Column:
        """Marks the rows whose tokens in this worker's report count; bool (rows,).

        The shell ignores tokens of all others. Rows are below ``state.requests.capacity``.
        """
        state, worker = self._state, self._state.worker_at(worker_id, epoch)
        if worker is None:
            return np.zeros(len(rows), np.bool_)
        trained = state.reported(worker, rows)
        return trained | state.evaluations.reported(worker_id, rows) if state.evaluations.running else trained

    def check_commit(self, trainer_epoch: int, step: int) -> None:
        """Raises Conflict if StepCommitted would be refused; called before the weights are stored."""
        lifecycle.check_commit(self._state, trainer_epoch, step)

    def check_republish(self, trainer_epoch: int, version: int) -> None:
        """Raises Conflict if VersionRepublished would be refused; called before the weights are stored."""
        lifecycle.check_republish(self._state, trainer_epoch, version)

    def has_to_come(self, version: int) -> bool:
        return rejection.has_to_come(self._state, version)

    def was_found(self, version: int) -> bool:
        """Returns whether ``version`` was rejected since the last commit and need not be republished after all."""
        return rejection.was_found(self._state, version)

    def counts_load(self, worker_id: str, version: int) -> bool:
        """Returns whether a worker's load of ``version`` concerns the weights that are published now."""
        return not self.has_to_come(version) and not self._state.workers[worker_id].load_is_void


def _offered(state: State, event: on.PromptsOffered) -> None:
    admission.offered(state, event)
    lifecycle.end_if_exhausted(state)


def _prompt_cancelled(state: State, event: on.PromptCancelled) -> None:
    admission.take_back(state, event)
    lifecycle.end_if_exhausted(state)


def _arrived(state: State, event: on.VersionArrived) -> bool:
    is_news = arrival.arrived(state, event)
    if event.version in state.unavailable:
        rejection.found(state, event.version)
    return is_news


def _tick(state: State, _event: on.Tick) -> None:
    handoff.overdue(state)
    membership.overdue(state)
    stalls.overdue(state)
    lease.overdue(state)
    sessions.overdue(state)
    sessions.rest(state)
    evaluated_sessions.overdue(state)
    evaluation.claim_workers(state)
    state.worklist.wake()  # pauses may be over


def _of_session(rule: Callable[[State, Any], None], evaluated: Callable[[State, Any], None]) -> Callable[..., None]:
    def handler(state: State, event: on.TurnRequested | on.SessionEnded | on.SessionFailed) -> None:
        (evaluated if event.request_id in state.evaluations.requests else rule)(state, event)

    return handler


def _done(state: State, event: on.CommandDone) -> None:
    pending = state.pending.get(event.command_id)
    if pending is None or (pending.command.worker_id, pending.command.epoch) != (event.worker_id, event.epoch):
        return  # of an ended epoch
    del state.pending[event.command_id]
    if pending.handoff is not None:
        handoff.done(state, pending, event)
    elif isinstance(pending.command, do.LoadVersion):
        membership.load_done(state, pending, event)
        if not event.ok:
            evaluation.not_loaded(state, pending.command.version, event.error)
    elif isinstance(pending.command, do.StartRequest | do.ExtendRequest):
        _turn_begun(state, pending.command, event)


def _copy_began(state: State, event: on.CopyBegan) -> None:
    pending = state.pending.get(event.command_id)
    if pending is None or (pending.command.worker_id, pending.command.epoch) != (event.worker_id, event.epoch):
        return  # of an ended epoch or handoff
    handoff.copy_began(state, pending)


def _turn_begun(state: State, command: do.StartRequest | do.ExtendRequest, event: on.CommandDone) -> None:
    """Cancels a request that no engine can take, with the reason; a worker that disagrees is replaced. A session that
    its worker no longer has is re-prefilled.
    """
    if command.request_id in state.evaluations.requests and isinstance(command, do.StartRequest):
        evaluation.started(state, command, event)
        return
    row = state.request_row.get(command.request_id)
    worker = state.workers[command.worker_id]
    if row is None or row not in worker.rows or state.requests["starting"][row] != command.command_id:
        return  # it has moved elsewhere
    if event.ok:
        state.requests["starting"][row] = 0
    elif event.error_kind == "unknown_request" and isinstance(command, do.ExtendRequest):
        handoff.signal_row(state, row, Signal.UNDO)
        state.move_off(row)
        placement.queue_again(state, row)
    elif event.error_kind == "invalid":
        group_id = state.group_id[int(state.requests["group"][row])]
        lifecycle.cancel(state, on.GroupCancelled(group_id, event.error))
    else:
        verb = "start" if isinstance(command, do.StartRequest) else "be extended"
        membership.evict(state, worker, f"{command.request_id} could not {verb}: {event.error}")


# a handler returns False for an event of an ended epoch
_HANDLERS: dict[type, Callable[[State, Any], bool | None]] = {
    on.PromptsOffered: _offered,
    on.GroupRequested: admission.requested,
    on.PromptCancelled: _prompt_cancelled,
    on.AdmissionEnded: lifecycle.end_admission,
    on.RequestScored: lifecycle.scored,
    on.TurnRequested: _of_session(sessions.requested, evaluated_sessions.requested),
    on.SessionEnded: _of_session(sessions.ended, evaluated_sessions.ended),
    on.SessionFailed: _of_session(sessions.failed, evaluated_sessions.failed),
    on.GroupCancelled: lifecycle.cancel,
    on.EvaluationRequested: evaluation.requested,
    on.EvaluationCancelled: evaluation.cancelled,
    on.WorkerJoined: membership.joined,
    on.WorkerLost: membership.lost,
    on.TokensReported: lifecycle.tokens_reported,
    on.Progress: lifecycle.progress,
    on.CommandDone: _done,
    on.CopyBegan: _copy_began,
    on.HostJoined: arrival.joined,
    on.HostDescribed: lambda state, event: state.places.describe(event),
    on.HostLost: notice.lost,
    on.HostNoticed: notice.noticed,
    on.VersionArrived: _arrived,
    on.VersionUnavailable: rejection.unavailable,
    on.PoolJoined: parking.joined,
    on.PoolLost: parking.lost,
    on.PoolDropped: parking.dropped,
    on.TrainerAttached: lifecycle.attached,
    on.StepRequested: lifecycle.step_requested,
    on.StepCommitted: lifecycle.commit,
    on.VersionRepublished: lifecycle.republished,
    on.Restored: restoring.restored,
    on.Tick: _tick,
    on.StorageChanged: admission.storage_changed,
    on.MigrationRequested: handoff.requested,
    on.DrainRequested: membership.drain,
    on.RebalanceRequested: lambda _state, _event: None,  # balance.TRIGGERS has it
}
