"""The three promises, checked on the core's state after an event. Each check raises Violation with the facts.

They are plain ``if``s, not asserts, so that they hold under ``python -O``; whole columns are read at once, so that they
may run after every event of every seed.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from dora.orchestrator.core import commands as do
from dora.orchestrator.core.handoff import LIVE, Phase
from dora.orchestrator.core.hosting import EMPTY_SEAT, SEATED, seated_row
from dora.orchestrator.core.state import GroupStatus, RequestStatus, State, Worker
from dora.orchestrator.core.table import Table
from dora.sim.ledger import Violation

# plain integers: a comparison of enumerations would take most of the time
WAITING, RUNNING, SCORED = int(RequestStatus.WAITING), int(RequestStatus.RUNNING), int(RequestStatus.SCORED)
LEASED = int(GroupStatus.LEASED)


def check_state(state: State) -> None:
    """Raises Violation where the state breaks a promise, or contradicts itself."""
    check_window(state)
    check_hosting(state)
    check_requests(state)
    check_groups(state)
    check_handoffs(state)
    check_pending(state)
    check_idle(state)


def check_window(state: State) -> None:
    """C3: the state is feasible, and the counts agree with the groups."""
    window = state.window
    slack = window.slack()
    if min(slack) < 0:
        raise Violation(f"infeasible: slack {slack} at step {window.step} (C3)")
    if window.newest not in (window.step - 1, window.step):
        raise Violation(f"newest version {window.newest} at step {window.step}")
    if state.retired > window.oldest_kept:
        raise Violation(f"the weights below version {state.retired} were let go, {window.oldest_kept} is kept (C1)")
    status, version = _columns(state.groups, state.group_id, "status", "version")
    by_deadline = Counter(window.deadline(version[row]) for row in state.group_id if status[row] != LEASED)
    counted = {window.step + k: n for k, n in enumerate(window._open) if n}
    if counted != by_deadline:
        raise Violation(f"open groups by deadline {dict(by_deadline)} are counted as {counted} (C3)")


def check_hosting(state: State) -> None:
    """C1: who hosts which version, as every decision looks it up, is what the workers themselves have."""
    hosting, workers = state.hosting, [worker for worker in state.seats if worker is not None]
    for version in {v for worker in workers for v in (worker.loaded, worker.target, worker.loading)} - {-1}:
        listed = [_seats(hosting.hosts(version)), sorted(hosting.targeting(version)), sorted(hosting.loading(version))]
        found = [
            _seats(worker for worker in workers if worker.hosts == version),
            _seats(worker for worker in workers if worker.target == version),
            _seats(worker for worker in workers if worker.loading == version),
        ]
        if listed != found:
            raise Violation(f"version {version} is listed at {listed}, while workers say {found}")
    vacating = [worker for worker in workers if worker.vacating]
    if list(hosting.vacating()) != vacating or set(hosting.leaving()) != {worker.loaded for worker in vacating}:
        raise Violation(f"seats {_seats(hosting.vacating())} are listed as vacated, while {_seats(vacating)} are")
    kept = hosting._seated[: len(state.seats)].tolist()
    if kept != [list(EMPTY_SEAT if worker is None else seated_row(worker)) for worker in state.seats]:
        raise Violation(f"what a snapshot says of seats is {kept}, of {', '.join(SEATED)}")


def _seats(workers: Iterable[Worker]) -> list[int]:
    return [worker.seat for worker in workers]


def check_requests(state: State) -> None:
    """C2: each unfinished request is in exactly one place; C1: on a worker of its version; claims agree with both."""
    status, version, seat, claim, claim_inbound = _columns(
        state.requests, state.request_id, "status", "version", "worker", "claim", "claim_inbound"
    )
    unplaced = {row for row, value in status.items() if value in (WAITING, RUNNING)}
    inbound = Counter(handoff.target for handoff in state.handoffs.values())
    claims_inbound: Counter[str] = Counter()
    for row, handoff in state.handoffs.items():
        claims_inbound[handoff.target] += claim_inbound[row]
        if handoff.phase is Phase.STRANDED:
            _place(unplaced, row, state)
    for worker in state.workers.values():
        name = worker.worker_id
        if state.seats[worker.seat] is not worker:
            raise Violation(f"{name} is not on its seat {worker.seat}")
        for row in worker.rows:
            _place(unplaced, row, state)
            if (status[row], seat[row], version[row]) != (RUNNING, worker.seat + 1, worker.loaded):
                raise Violation(
                    f"{state.request_id[row]} of version {version[row]} stands on {name} with version {worker.loaded}, "
                    f"as if on seat {seat[row] - 1} of {worker.seat} (C1)"
                )
        if worker.inbound != inbound[name]:
            raise Violation(f"{name} counts {worker.inbound} inbound handoffs, not {inbound[name]}")
        claimed = sum(claim[row] for row in worker.rows) + claims_inbound[name]
        if worker.kv_claimed != claimed:
            raise Violation(f"{name} has {worker.kv_claimed} KV tokens claimed, not {claimed}")
    for of_version, rows in state.waiting.items():
        for row in rows:
            _place(unplaced, row, state)
            if (status[row], version[row]) != (WAITING, of_version):
                raise Violation(f"{state.request_id[row]} of version {version[row]} waits for {of_version} (C1)")
    if unplaced:
        raise Violation(f"{', '.join(state.request_id[row] for row in sorted(unplaced))}: nowhere (C2)")


def check_groups(state: State) -> None:
    """Counts of unfinished and unscored responses agree with the requests; finished groups wait exactly once."""
    (status,) = _columns(state.requests, state.request_id, "status")
    unfinished, unscored = _columns(state.groups, state.group_id, "unfinished", "unscored")
    queued = Counter(row for rows in state.finished.values() for row in rows)
    queued.update(state.leased)
    for group, rows in state.members.items():
        values = [status[row] for row in rows]
        found = (values.count(WAITING) + values.count(RUNNING), len(values) - values.count(SCORED))
        if (unfinished[group], unscored[group]) != found:
            raise Violation(f"{state.group_id[group]}: (unfinished, unscored) responses are {found}, counted otherwise")
        if queued[group] != (found[1] == 0):
            raise Violation(f"{state.group_id[group]} waits {queued[group]} times for a step (C2)")


def check_handoffs(state: State) -> None:
    """A live handoff is between its owner and another living worker; STRANDED: its owner is gone."""
    for row, handoff in state.handoffs.items():
        owner = state.owner(row)
        source = None if handoff.phase is Phase.STRANDED else handoff.source
        if handoff.phase not in LIVE or (owner and owner.worker_id) != source or handoff.target not in state.workers:
            raise Violation(
                f"handoff of {handoff.request_id} from {handoff.source} to {handoff.target} is {handoff.phase.name}, "
                f"its owner {owner and owner.worker_id} (C2)"
            )


def check_pending(state: State) -> None:
    """Only living workers are waited for, and a worker that loads has been told to."""
    loading = set()
    for pending in state.pending.values():
        command = pending.command
        worker = state.workers.get(command.worker_id)
        if worker is None or worker.epoch != command.epoch:
            raise Violation(f"{command} waits for a worker that is gone")
        if isinstance(command, do.LoadVersion):
            loading.add(command.worker_id)
    for worker in state.workers.values():
        if (worker.loading >= 0) != (worker.worker_id in loading):
            raise Violation(f"{worker.worker_id} waits for version {worker.loading}, which it was not told to load")


def check_idle(state: State) -> None:
    """Who is idle, and what is to stay, is counted as the workers say. Last: it follows from the others."""
    workers = [worker for worker in state.seats if worker is not None]
    idle = [worker for worker in workers if not worker.held and worker.loading < 0 and not worker.draining]
    if sorted(state.idle) != _seats(idle):
        raise Violation(f"seats {sorted(state.idle)} are listed as idle, while {_seats(idle)} are")
    staying = [worker for worker in workers if not worker.draining]
    if state.hosting.staying() != (len(staying), sum(worker.kv_tokens for worker in staying)):
        raise Violation(f"(workers, KV) to stay are {state.hosting.staying()}, while {_seats(staying)} do")


def check_empty(state: State) -> None:
    """After a drain: nothing is left of what was admitted, no worker holds a place for anything, all have answered."""
    left = [*state.group_row, *state.request_row, *(str(pending.command) for pending in state.pending.values())]
    if left:
        raise Violation(f"left after the last step: {', '.join(left)}")
    for worker in state.workers.values():
        if worker.held or worker.kv_claimed or worker.kv_inbound:
            raise Violation(f"{worker.worker_id} still claims {worker.kv_claimed} KV tokens after the last step")


def _columns(table: Table, rows: Iterable[int], *names: str) -> list[dict[int, int]]:
    """Cells of some rows, as one mapping a column."""
    rows = list(rows)
    index = np.array(rows, dtype=np.intp)
    return [dict(zip(rows, table[name][index].tolist(), strict=True)) for name in names]


def _place(unplaced: set[int], row: int, state: State) -> None:
    """An unfinished request was found somewhere: the first time."""
    if row not in unplaced:
        raise Violation(f"{state.request_id.get(row, row)} is in two places, or finished and still in one (C2)")
    unplaced.remove(row)


def fingerprint(state: State) -> dict[str, str]:
    """All of the state but the clock: equal for equal contents, of one machine before and after, or of two machines.

    Without the index of hosts, which follows from the workers (``check_hosting``) and is made up when somebody looks.
    """
    apart = ("now_s", "config", "policy", "hosting")
    return {name: _plain(value) for name, value in vars(state).items() if name not in apart}


def _plain(value: Any) -> str:
    """A text that follows from the contents alone, never from an object's identity."""
    if isinstance(value, np.ndarray):
        return value.tobytes().hex()
    if value is None or isinstance(value, (str, int, float, Enum)):
        return repr(value)
    if isinstance(value, Mapping):
        return str([(repr(key), _plain(part)) for key, part in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return str([part if type(part) is int else _plain(part) for part in value])  # long lists are of rows
    if isinstance(value, (set, frozenset)):
        return str(sorted(_plain(part) for part in value))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(value, "__dict__", ())]
    return str([(name, _plain(getattr(value, name))) for name in names])
