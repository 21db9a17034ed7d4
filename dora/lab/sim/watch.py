"""Checks after every event the state that it can have changed, so that each event of a large cluster is checked too.

``check_state`` (invariants.py) reads the whole state, which takes as long as hundreds of events with tens of thousands
of requests. Here the window and the running evaluations are checked as a whole, and only the requests, groups, workers
and handoffs that the event or its commands name. The watch records the last place of each request. So it finds a
request that remains in a second place, or that is in none. Changes that no event names are found by the next whole
check.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.state import GroupStatus, RequestStatus, State
from dora.lab.sim.invariants import (
    branch_counts,
    check_evaluations,
    check_feasible,
    check_handoff,
    check_handoffs,
    check_load,
    check_pools,
    check_rejection,
    check_worker,
    counts_differ,
    is_idle,
)
from dora.lab.sim.ledger import Violation

WAITING, RUNNING, IDLE = int(RequestStatus.WAITING), int(RequestStatus.RUNNING), int(RequestStatus.IDLE)
DORMANT = int(RequestStatus.DORMANT)
LEASED = int(GroupStatus.LEASED)
# The place of a request that is on no index:
IN_QUEUE: Final = -1
STRANDED: Final = -2  # its source is lost, and its snapshot is in transit
NOWHERE: Final = -3  # not admitted, or ended
RESUMED: Final = -4  # in transit to a worker that will run it
BETWEEN: Final = -5  # an idle session
TO_ENDS: Final = tuple(kind for kind in get_args(do.Command) if issubclass(kind, do.WorkerCommand))
REPORTS: Final = 7  # full reports between two whole checks of a worker: prime, so that all workers are checked


@dataclass(slots=True)
class WatchedGroup:
    """A recorded group: ``rows`` of its requests, and the numbers of responses that run and that have no verdict.

    ``late`` has the rows of members that have not started, ``rewards`` the distinct valid ones.
    """

    deadline: int
    rows: Sequence[int]
    unfinished: int
    unscored: int
    late: Sequence[int] = ()
    rewards: set[float] = field(default_factory=set)


@dataclass(slots=True)
class Named:
    """Rows, groups and indexes that an event and its commands name. They are checked after all are recorded."""

    rows: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    indexes: set[int] = field(default_factory=set)

    def clear(self) -> None:
        self.rows.clear()
        self.groups.clear()
        self.indexes.clear()


class Watch:
    """The watch of one run. ``saw`` receives each event with its commands, and raises Violation."""

    def __init__(self, machine: Callable[[], Machine]) -> None:
        """``machine`` returns the present one. A machine that replaces it must have the same state."""
        self._machine = machine
        self._places: dict[int, int] = {}  # row of an unfinished request -> index, or one of the places above
        self._at: dict[int, int] = {}  # index -> number of its requests
        self._open: dict[int, int] = {}  # deadline -> open groups: admitted, neither taken by a step nor cancelled
        self._groups: dict[str, WatchedGroup] = {}
        self._complete = 0  # groups whose responses are all scored
        self._sent: dict[int, do.WorkerCommand] = {}  # commands to workers that await an outcome
        self._loading: dict[str, int] = {}  # worker -> its LoadVersion
        self._counted = 0  # changes of the two counts above
        self._stood = (-1, -1, -1, -1)  # the window at the last event, and ``_counted``
        self._size = machine().state.window.size  # the present size, as reported by the core
        self._reports = 0  # full reports since the last whole check of a worker
        self._storage_fault = ""
        self._named = Named()
        self._notes: dict[type, Callable[[State, Any, Named], None]] = {
            on.Progress: self._reported,
            on.CommandDone: self._done,
            on.RequestScored: self._scored,
            on.WorkerLost: self._lost,
            on.StorageChanged: self._stored,
            do.ResizeWindow: self._resized,
            do.AdmitGroup: self._admitted,
            do.DeliverGroup: self._delivered,
            do.DropGroup: self._gone,
            do.ForgetGroup: self._gone,
            do.ScoreRequest: self._ended,
            do.BreakOffSession: self._ended,
            do.ReplaceRequest: self._replaced,
            on.TurnRequested: self._turn_requested,
            on.PoolLost: self._pool_lost,
            on.PoolDropped: self._pool_dropped,
            **dict.fromkeys(TO_ENDS, self._ordered),
        }
        self._begin(machine().state)

    def _begin(self, state: State) -> None:
        """Records the commands of the core's first events: workers are loading already."""
        for pending in state.pending.values():
            self._ordered(state, pending.command, self._named)
        self._named.clear()
        if state.group_row:
            raise ValueError("a watch begins with the run, not in its middle")

    def saw(self, _now_s: float, event: on.Event, commands: Sequence[do.Command]) -> None:
        state, named = self._machine().state, self._named
        for each in (event, *commands):
            if note := self._notes.get(type(each)):
                note(state, each, named)
        for row in named.rows:
            self._stands(state, row, named)
        for group in named.groups:
            self._check_group(state, group)
        for index in named.indexes:
            self._holds(state, index)
        if state.rejected or state.suspects or state.unavailable:
            check_rejection(state)
        evaluations = state.evaluations
        if evaluations.running or evaluations.requests or evaluations.lent:
            check_evaluations(state)
        window = state.window
        stands = window.step, window.left, window.newest, self._counted
        if stands != self._stood:
            self._stood = stands
            check_feasible(state)
            self._check_counts(state)
        named.clear()

    # --------------------------------------------------------------------------------------------------------- commands

    def _stored(self, _state: State, event: on.StorageChanged, _named: Named) -> None:
        self._storage_fault = event.fault

    def _resized(self, _state: State, command: do.ResizeWindow, _named: Named) -> None:
        self._size = command.size

    def _admitted(self, state: State, command: do.AdmitGroup, named: Named) -> None:
        if self._storage_fault:
            raise Violation(f"{command.group_id} is admitted while storage is at fault: {self._storage_fault}")
        deadline = command.version + self._size - 1
        self._count(deadline, 1)
        group, size = state.group_row.get(command.group_id), len(command.request_ids)
        rows = state.members[group] if group is not None else ()  # otherwise the same event cancelled it
        late = [row for row in rows if state.requests["status"][row] == DORMANT]
        self._groups[command.group_id] = WatchedGroup(deadline, rows, size - len(late), size - len(late), late)
        named.rows.update(rows)

    def _delivered(self, state: State, command: do.DeliverGroup, _named: Named) -> None:
        group, watched = state.group_row.get(command.group_id), self._groups[command.group_id]
        if group is None or state.groups["status"][group] != LEASED:
            raise Violation(f"{command.group_id} is delivered, and no step holds it (C2)")
        if not command.again:
            self._count(watched.deadline, -1)

    def _gone(self, state: State, command: do.DropGroup | do.ForgetGroup, named: Named) -> None:
        watched, names = self._groups.pop(command.group_id), state.request_row
        left = [name for n in range(len(watched.rows)) if (name := f"{command.group_id}.{n}") in names]
        if left or command.group_id in state.group_row:
            raise Violation(f"{command.group_id} has gone, and {', '.join(left) or 'it'} is known still (C2)")
        if isinstance(command, do.DropGroup):
            self._count(watched.deadline, -1)
        self._complete -= not watched.unscored
        for row in watched.rows:
            self._moved(row, NOWHERE, named)

    def _ended(self, state: State, command: do.ScoreRequest | do.BreakOffSession, named: Named) -> None:
        row = state.request_row.get(command.request_id)
        if row is not None:  # otherwise the same event cancelled its group
            group = int(state.requests["group"][row])
            self._groups[state.group_id[group]].unfinished -= 1
            named.rows.add(row)
            named.groups.add(group)

    def _replaced(self, state: State, command: do.ReplaceRequest, named: Named) -> None:
        row = state.request_row.get(command.replacement_id)
        if row is None:
            return  # the same event cancelled its group
        named.rows.add(row)
        named.groups.add(int(state.requests["group"][row]))

    def _turn_requested(self, state: State, event: on.TurnRequested, named: Named) -> None:
        if (row := state.request_row.get(event.request_id)) is not None:
            named.rows.add(row)

    def _ordered(self, state: State, command: do.WorkerCommand, named: Named) -> None:
        self._sent[command.command_id] = command
        if isinstance(command, do.LoadVersion):
            self._loading[command.worker_id] = command.command_id
        self._names(state, command, named)

    # ----------------------------------------------------------------------------------------------------------- events

    def _reported(self, state: State, event: on.Progress, named: Named) -> None:
        worker = state.worker_at(event.worker_id, event.epoch)
        if worker is not None:
            named.indexes.add(worker.index)
            rows = (state.request_row.get(name) for name in event.finished)
            named.rows.update(row for row in rows if row is not None and state.requests["session"][row])
            self._reports += len(event.tokens) > len(event.finished)  # a report of all running requests
            if self._reports == REPORTS:
                self._reports = 0
                check_worker(state, worker)

    def _done(self, state: State, event: on.CommandDone, named: Named) -> None:
        command = self._sent.get(event.command_id)
        if command is not None and (command.worker_id, command.epoch) == (event.worker_id, event.epoch):
            del self._sent[event.command_id]
            if isinstance(command, do.LoadVersion):
                self._loading.pop(command.worker_id, None)
            self._names(state, command, named)

    def _scored(self, state: State, event: on.RequestScored, named: Named) -> None:
        row = state.request_row.get(event.request_id)
        if row is not None:
            group = int(state.requests["group"][row])
            watched = self._groups[state.group_id[group]]
            watched.unscored -= 1
            if event.valid:
                watched.rewards.add(event.reward)
            if len(watched.rewards) > 1:
                named.rows.update(watched.late)
                watched.unfinished += len(watched.late)
                watched.unscored += len(watched.late)
                watched.late = ()
            named.groups.add(group)
            if not watched.unscored:
                self._complete += 1
                self._counted += 1

    def _lost(self, state: State, event: on.WorkerLost, named: Named) -> None:
        over = [n for n, each in self._sent.items() if (each.worker_id, each.epoch) == (event.worker_id, event.epoch)]
        for command_id in over:
            if isinstance(self._sent.pop(command_id), do.LoadVersion):
                del self._loading[event.worker_id]
        left = {STRANDED, RESUMED, *(index for index, worker in enumerate(state.worker_list) if worker is None)}
        named.rows.update(row for row, place in self._places.items() if place in left)
        check_handoffs(state)

    def _pool_lost(self, state: State, event: on.PoolLost, named: Named) -> None:
        over = [n for n, each in self._sent.items() if (each.worker_id, each.epoch) == (event.pool_id, event.epoch)]
        for command_id in over:
            del self._sent[command_id]
        named.rows.update(row for row, place in self._places.items() if place in (IN_QUEUE, STRANDED, RESUMED))
        check_handoffs(state)
        check_pools(state)

    def _pool_dropped(self, state: State, _event: on.PoolDropped, _named: Named) -> None:
        check_pools(state)

    # ---------------------------------------------------------------------------------------------------------- looking

    def _names(self, state: State, command: do.WorkerCommand, named: Named) -> None:
        worker = state.workers.get(command.worker_id)
        if worker is not None:
            named.indexes.add(worker.index)
        row = state.request_row.get(getattr(command, "request_id", ""))
        if row is not None:
            named.rows.add(row)
            if row in state.handoffs:
                check_handoff(state, row, state.handoffs[row])

    def _stands(self, state: State, row: int, named: Named) -> None:
        place, before = self._place(state, row), self._places.get(row, NOWHERE)
        if state.requests["left"][row] > 0 and state.requests["status"][row] != WAITING:
            raise branch_counts(state, [row])
        if place != before:
            if before >= 0:
                worker = state.worker_list[before]
                doubled = worker is not None and row in worker.rows
            else:
                version = int(state.requests["version"][row])
                doubled = (before == IN_QUEUE and row in state.waiting.get(version, ())) or (
                    before == BETWEEN and row in state.idle.get(version, ())
                )
            if doubled:
                raise Violation(f"{state.request_id[row]} is in two places (C2)")
            self._moved(row, place, named)

    def _moved(self, row: int, place: int, named: Named) -> None:
        before = self._places.pop(row, NOWHERE)
        if place != NOWHERE:
            self._places[row] = place
        at = self._at
        if before >= 0:
            at[before] -= 1
            named.indexes.add(before)
        if place >= 0:
            at[place] = at.get(place, 0) + 1
            named.indexes.add(place)

    def _place(self, state: State, row: int) -> int:
        requests = state.requests
        status, index, version = requests["status"][row], int(requests["worker"][row]) - 1, requests["version"][row]
        if status == RUNNING and index >= 0:
            worker = state.worker_list[index]
            if worker is None or row not in worker.rows:
                raise Violation(f"{state.request_id[row]} should stand on index {index}: nowhere (C2)")
            if version != worker.loaded:
                named = f"{worker.worker_id} with version {worker.loaded}"
                raise Violation(f"{state.request_id[row]} of version {version} stands on {named} (C1)")
            return index
        if status == RUNNING and row in state.handoffs:
            return STRANDED
        if status == WAITING and row in state.handoffs:
            if row in state.waiting.get(int(version), ()):
                raise Violation(f"{state.request_id[row]} is in line, and being resumed (C2)")
            return RESUMED
        if status == WAITING and row in state.waiting.get(int(version), ()):
            return IN_QUEUE
        if status == IDLE and row in state.idle.get(int(version), ()):
            return BETWEEN
        if status in (WAITING, RUNNING, IDLE):
            raise Violation(f"{state.request_id[row]}: nowhere (C2)")
        return NOWHERE

    def _holds(self, state: State, index: int) -> None:
        worker = state.worker_list[index] if index < len(state.worker_list) else None
        held = 0 if worker is None else len(worker.rows)
        if held != self._at.get(index, 0):
            raise Violation(f"index {index} holds {held} requests, while {self._at.get(index, 0)} stand there (C2)")
        if worker is not None:
            check_load(worker, worker.worker_id in self._loading)
            if is_idle(worker) != (index in state.worklist.idle):
                raise Violation(
                    f"{worker.worker_id} is {'not ' * (index not in state.worklist.idle)}listed as idle, wrongly"
                )

    # ----------------------------------------------------------------------------------------------------------- counts

    def _count(self, deadline: int, more: int) -> None:
        self._counted += 1
        self._open[deadline] = self._open.get(deadline, 0) + more
        if not self._open[deadline]:
            del self._open[deadline]

    def _check_group(self, state: State, group: int) -> None:
        watched = self._groups[state.group_id[group]]
        counted = int(state.groups["unfinished"][group]), int(state.groups["unscored"][group])
        if counted != (watched.unfinished, watched.unscored):
            raise counts_differ(state, group, (watched.unfinished, watched.unscored))

    def _check_counts(self, state: State) -> None:
        if self._open != state.window.open_by_deadline:
            counted = dict(state.window.open_by_deadline)
            raise Violation(f"open groups by deadline {self._open} are counted as {counted} (C3)")
        waiting = sum(map(len, state.finished.values())) + len(state.leased)
        if waiting != self._complete:
            raise Violation(f"{waiting} groups wait for a step or are in one, {self._complete} have all verdicts (C2)")
