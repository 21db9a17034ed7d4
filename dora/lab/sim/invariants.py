"""Invariants C1, C2 and C3 of the core's state after an event. Each check raises Violation with the facts.

The checks are ``if`` statements, not asserts, so they also work under ``python -O``. They read whole columns at once,
so that they can run after every event of every seed.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from dora.core import commands as do
from dora.core.fleet.hosting import HOSTING_COLUMNS, hosting_row
from dora.core.fleet.worker import Worker
from dora.core.handoff.table import FROM_POOL, LIVE, TO_POOL, Handoff, Phase
from dora.core.rules import precision
from dora.core.state import GroupStatus, RequestStatus, State, SuspectVersion
from dora.core.table import Table
from dora.lab.sim.ledger import Violation

# plain integers, as comparing enumerations would take most of the time
WAITING, RUNNING, SCORED = int(RequestStatus.WAITING), int(RequestStatus.RUNNING), int(RequestStatus.SCORED)
IDLE, DORMANT, SKIPPED = int(RequestStatus.IDLE), int(RequestStatus.DORMANT), int(RequestStatus.SKIPPED)
LEASED = int(GroupStatus.LEASED)


def check_state(state: State) -> None:
    """Raises Violation if the state breaks a promise or is inconsistent."""
    check_window(state)
    check_precision(state)
    check_rejection(state)
    check_hosting(state)
    check_requests(state)
    check_pools(state)
    check_groups(state)
    check_handoffs(state)
    check_pending(state)
    check_evaluations(state)
    check_idle(state)


def check_precision(state: State) -> None:
    """Checks that all workers of a version have its precision (C1)."""
    for worker in state.workers.values():
        if worker.loaded >= 0 and not precision.fits(state, worker, worker.loaded):
            raise Violation(f"{worker.worker_id} hosts version {worker.loaded} in another precision (C1)")


def check_window(state: State) -> None:
    """Checks C3: the window is feasible, and its counts agree with the groups."""
    check_feasible(state)
    window = state.window
    status, version, deadline = _columns(state.groups, state.group_id, "status", "version", "deadline")
    is_open = [row for row in state.group_id if status[row] != LEASED]
    by_deadline = Counter(deadline[row] for row in is_open)
    if window.open_by_deadline != by_deadline:
        counted = dict(window.open_by_deadline)
        raise Violation(f"open groups by deadline {dict(by_deadline)} are counted as {counted} (C3)")
    oldest = min((version[row] for row in is_open), default=window.oldest_live)
    if oldest < window.oldest_live:
        raise Violation(f"a group of version {oldest} is open, and {window.oldest_live} is the oldest live (C1)")


def check_feasible(state: State) -> None:
    """Checks C3 by the window's own counts, and the kept weights."""
    window = state.window
    if window.least_slack(window.step, max((window.step + window.size - 1, *window.open_by_deadline))) < 0:
        raise Violation(f"infeasible: {window.summary()} (C3)")
    if min(window.open_by_deadline, default=window.step) < window.step:
        raise Violation(f"overdue: {window.summary()} (C3)")
    sizes = state.config.window
    live = window.newest - window.oldest_live + 1
    if not sizes.least <= window.size <= sizes.most or live > sizes.most:
        raise Violation(f"{live} versions are live in a window of {window.size}, of {sizes.least} to {sizes.most} (C3)")
    if window.newest not in (window.step - 1, window.step):
        raise Violation(f"newest version {window.newest} at step {window.step}")
    if len(state.pinned) > state.config.evaluation_versions or max(state.pinned, default=-1) >= state.retired:
        raise Violation(f"versions {sorted(state.pinned)} are pinned")
    if state.retired > window.oldest_kept:
        raise Violation(f"the weights below version {state.retired} were let go, {window.oldest_kept} is kept (C1)")


def check_rejection(state: State) -> None:
    """Checks C1: no worker has a rejected or suspect version, and only the worker that tries it may target it."""
    window, suspects, gone = state.window, state.suspects, state.unavailable.keys()
    named = {"rejected": window.rejected == state.rejected.keys()}
    named["withheld"] = window.quarantined == state.rejected.keys() | suspects.keys() | gone
    unsound = window.quarantined - gone  # the weights of unavailable versions were correct
    oldest_proven = min(state.proven - state.pinned, default=state.retired)
    named["proven"] = not state.proven & unsound and oldest_proven >= state.retired
    named["streamed"] = not state.rejected or state.stream_step is None
    if not all(named.values()):
        raise Violation(f"versions {sorted(state.rejected)} are rejected, {sorted(suspects)} in doubt: {named}")
    seconds = [suspect.second for suspect in suspects.values() if suspect.second]
    if len(set(seconds)) < len(seconds):
        raise Violation(f"{seconds} are to try the versions {sorted(suspects)}, one each")
    if not window.quarantined:
        return
    for version, suspect in suspects.items():
        able = {w.worker_id for w in state.workers.values() if not w.draining and not _has_refused(suspect, w)}
        if suspect.second not in able and able - set(seconds):
            raise Violation(f"version {version} is in doubt, and nobody tries it")
    for worker in state.workers.values():
        name, second = worker.worker_id, suspects[worker.target].second if worker.target in suspects else ""
        if worker.loaded in unsound:
            raise Violation(f"{name} has version {worker.loaded}, which is rejected or in doubt (C1)")
        if worker.target in unsound and name != second and not worker.draining:
            raise Violation(f"{name} is to host version {worker.target}, which is rejected or in doubt (C1)")


def _has_refused(suspect: SuspectVersion, worker: Worker) -> bool:
    refusal = suspect.refusals.get(worker.worker_id)
    return refusal is not None and refusal.epoch == worker.epoch


def check_hosting(state: State) -> None:
    """Checks C1: the hosting index, which all decisions use, agrees with the workers."""
    hosting, workers = state.hosting, [worker for worker in state.worker_list if worker is not None]
    for version in {v for worker in workers for v in (worker.loaded, worker.target, worker.loading)} - {-1}:
        listed = [
            _indexes(hosting.workers_of(version)),
            sorted(hosting.targeting(version)),
            sorted(hosting.loading(version)),
        ]
        found = [
            _indexes(worker for worker in workers if worker.hosts == version),
            _indexes(worker for worker in workers if worker.target == version),
            _indexes(worker for worker in workers if worker.loading == version),
        ]
        if listed != found:
            raise Violation(f"version {version} is listed at {listed}, while workers say {found}")
    vacating = [worker for worker in workers if worker.vacating]
    if list(hosting.vacating()) != vacating or set(hosting.leaving()) != {worker.loaded for worker in vacating}:
        raise Violation(f"indexes {_indexes(hosting.vacating())} are listed as vacated, while {_indexes(vacating)} are")
    kept = hosting.rows(len(state.worker_list))
    if kept != list(map(hosting_row, state.worker_list)):
        raise Violation(f"what a snapshot says of indexes is {kept}, of {', '.join(HOSTING_COLUMNS)}")
    if outdated := state.loads.outdated(state.worker_list):
        raise Violation(f"what a snapshot would say of the loads of indexes {outdated} is out of date")


def _indexes(workers: Iterable[Worker]) -> list[int]:
    return [worker.index for worker in workers]


def check_requests(state: State) -> None:
    """C2: each unfinished request is in exactly one place. C1: its worker has its version. Claims agree with both."""
    status, version = _columns(state.requests, state.request_id, "status", "version")
    unplaced = {row for row, value in status.items() if value in (WAITING, RUNNING, IDLE)}
    inbound: dict[str, list[int]] = defaultdict(list)
    for row, handoff in state.handoffs.items():
        inbound[handoff.target].append(row)
        if status[row] == WAITING or (handoff.phase is Phase.STRANDED and status[row] == RUNNING):
            _place(unplaced, (row,), state)
    for of_version, idle in state.idle.items():
        _place(unplaced, idle, state)
        if not idle or any((status[row], version[row]) != (IDLE, of_version) for row in idle):
            raise Violation(f"{_names(state, idle)} are listed as idle under version {of_version} (C1)")
    for worker in state.workers.values():
        if state.worker_list[worker.index] is not worker:
            raise Violation(f"{worker.worker_id} is not on its index {worker.index}")
        _place(unplaced, worker.rows, state)
        check_worker(state, worker, inbound[worker.worker_id])
    for of_version, rows in state.waiting.items():
        _place(unplaced, rows, state)
        for row in rows:
            if (status[row], version[row]) != (WAITING, of_version):
                raise Violation(f"{state.request_id[row]} of version {version[row]} waits for {of_version} (C1)")
    if unplaced:
        raise Violation(f"{', '.join(state.request_id[row] for row in sorted(unplaced))}: nowhere (C2)")
    left = state.requests["left"]
    if (odd := np.flatnonzero((left > 0) & (state.requests["status"] != WAITING))).size:
        raise branch_counts(state, odd.tolist())
    waiting_turns_at = {worker.index for worker in state.workers.values() if worker.waiting_turns}
    on_workers = sum(len(worker.rows) + len(worker.kept) for worker in state.workers.values())
    if waiting_turns_at != state.waiting_turns_at or np.count_nonzero(state.requests["worker"]) != on_workers:
        raise Violation(
            f"turns are asked at {sorted(state.waiting_turns_at)}, while workers say {sorted(waiting_turns_at)}"
        )


def check_worker(state: State, worker: Worker, inbound: Sequence[int] | None = None) -> None:
    """Checks all requests of one worker, including C1. ``inbound`` has the rows of its incoming handoffs, if known."""
    name, requests = worker.worker_id, state.requests
    rows = np.fromiter(worker.rows, dtype=np.intp, count=len(worker.rows))
    if inbound is None:
        inbound = [row for row, handoff in state.handoffs.items() if handoff.target == name]
    status, index, version = (requests[column][rows] for column in ("status", "worker", "version"))
    wrong = rows[(status != RUNNING) | (index != worker.index + 1) | (version != worker.loaded)]
    if len(wrong):
        row = int(wrong.min())
        raise Violation(
            f"{state.request_id.get(row, row)} of version {requests['version'][row]} stands on {name} with version "
            f"{worker.loaded}, as if on index {requests['worker'][row] - 1} of {worker.index} (C1)"
        )
    kept = np.fromiter(worker.kept, dtype=np.intp, count=len(worker.kept))
    status, index, version = (requests[column][kept] for column in ("status", "worker", "version"))
    odd = ((status != WAITING) & (status != IDLE)) | (index != worker.index + 1) | (version != worker.loaded)
    if odd.any() or (requests["pool"][kept] > 0).any():
        raise Violation(
            f"{name} with version {worker.loaded} keeps {_names(state, kept.tolist())}: one is not its own (C1)"
        )
    waiting = {row for row in kept[status == WAITING].tolist() if row not in state.handoffs}
    if waiting != worker.waiting_turns.keys():
        raise Violation(
            f"{name} has the KV of requested turns {_names(state, waiting)}, "
            f"and lists {_names(state, worker.waiting_turns)}"
        )
    if worker.inbound != len(inbound):
        raise Violation(f"{name} counts {worker.inbound} inbound handoffs, not {len(inbound)}")
    claimed = int(requests["claim"][rows].sum() + requests["claim"][kept].sum())
    if inbound:
        claimed += int(requests["claim_inbound"][list(inbound)].sum())
    if worker.kv_claimed != claimed:
        raise Violation(f"{name} has {worker.kv_claimed} KV tokens claimed, not {claimed}")


def check_pools(state: State) -> None:
    """C2: a request whose KV is in a pool is parked or being resumed. Claims of pools agree and fit."""
    requests, pool_of = state.requests, state.requests["pool"]
    inbound: dict[str, list[int]] = defaultdict(list)
    for row, handoff in state.handoffs.items():
        inbound[handoff.target].append(row)
        if handoff.kind in FROM_POOL and bool(pool_of[row]) != (handoff.phase is not Phase.STRANDED):
            raise Violation(f"{handoff.request_id} is resumed in {handoff.phase.name}, from index {pool_of[row]} (C2)")
    parked = 0
    for pool in state.pools.values():
        parked += len(pool.rows)
        rows, coming = list(pool.rows), inbound[pool.pool_id]
        if state.pool_list[pool.index] is not pool or (pool_of[rows] != pool.index + 1).any():
            raise Violation(f"{pool.pool_id} holds {_names(state, rows)}, which do not all lie there (C2)")
        away = [row for row in rows if not _waits(state, row)]
        if away:
            raise Violation(f"{pool.pool_id} holds {_names(state, away)}: not waiting, nor being resumed (C2)")
        claimed = int(requests["claim"][rows].sum() + requests["claim_inbound"][coming].sum())
        if (pool.kv_claimed, pool.inbound) != (claimed, len(coming)) or claimed > pool.kv_tokens:
            counted = f"{pool.kv_claimed} KV tokens of {pool.kv_tokens} claimed, {pool.inbound} inbound handoffs"
            raise Violation(f"{pool.pool_id} counts {counted}, not {claimed} and {len(coming)}")
    if np.count_nonzero(pool_of) != parked:
        raise Violation(f"{np.count_nonzero(pool_of)} requests are parked, while pools hold {parked} (C2)")


def _waits(state: State, row: int) -> bool:
    if row in state.handoffs:
        return state.handoffs[row].kind in FROM_POOL
    version = int(state.requests["version"][row])
    return row in state.waiting.get(version, ()) or row in state.idle.get(version, ())


def _names(state: State, rows: Iterable[int]) -> str:
    return ", ".join(str(state.request_id.get(row, row)) for row in rows)


def check_groups(state: State) -> None:
    """Counts of unfinished and unscored responses agree with the requests. Finished groups wait exactly once."""
    (status,) = _columns(state.requests, state.request_id, "status")
    unfinished, unscored = _columns(state.groups, state.group_id, "unfinished", "unscored")
    queued = Counter(row for rows in state.finished.values() for row in rows)
    queued.update(state.leased)
    for group, rows in state.members.items():
        values = [status[row] for row in rows]
        open_ones = values.count(WAITING) + values.count(RUNNING) + values.count(IDLE)
        rests = values.count(DORMANT) + values.count(SKIPPED)
        found = (open_ones, len(values) - values.count(SCORED) - rests)
        if (unfinished[group], unscored[group]) != found:
            raise counts_differ(state, group, found)
        if queued[group] != (found[1] == 0):
            raise Violation(f"{state.group_id[group]} waits {queued[group]} times for a step (C2)")
        if rests or group in state.undecided:
            check_growth(state, group, found[1])


def check_growth(state: State, group: int, unscored: int) -> None:
    """A dormant member has no place and waits for a verdict that is due; a skipped one is of a finished group."""
    name, rows = state.group_id[group], np.array(state.members[group])
    status = state.requests["status"][rows]
    resting = rows[(status == DORMANT) | (status == SKIPPED)]
    kinds = np.unique(state.requests["status"][resting]).tolist()
    if kinds not in ([DORMANT], [SKIPPED]) or (kinds == [DORMANT]) != (group in state.undecided):
        raise Violation(f"{name} has members in the states {kinds}, of {DORMANT} while it is undecided")
    if bool(unscored) != (kinds == [DORMANT]) or len(state.undecided.get(group, ())) > 1:
        raise Violation(f"{name} lacks {unscored} verdicts, and has members in the state {kinds}: it is stuck (C2)")
    for column in ("tokens", "worker", "pool", "claim", "moving", "starting", "began_s"):
        if state.requests[column][resting].any():
            raise Violation(f"{name}: a member that has not started has a {column}")


def branch_counts(state: State, rows: Sequence[int]) -> Violation:
    """The error for requests whose KV of an earlier branch counts, though no fork of theirs waits."""
    return Violation(f"{_names(state, rows)}: the KV of an earlier branch counts, and no fork of it waits")


def counts_differ(state: State, group: int, found: tuple[int, int]) -> Violation:
    """The error for a group whose counts of (unfinished, unscored) responses differ from those found."""
    return Violation(f"{state.group_id[group]}: (unfinished, unscored) responses are {found}, counted otherwise")


def check_handoffs(state: State) -> None:
    for row, handoff in state.handoffs.items():
        check_handoff(state, row, handoff)


def check_handoff(state: State, row: int, handoff: Handoff) -> None:
    """Checks that a handoff connects the request's owner with another living member. STRANDED: the owner is lost."""
    owner = state.pool_of(row) if handoff.kind in FROM_POOL else state.owner(row)
    source = None if handoff.phase is Phase.STRANDED else handoff.source
    targets = state.pools if handoff.kind in TO_POOL else state.workers
    if handoff.phase not in LIVE or (owner and owner.worker_id) != source or handoff.target not in targets:
        raise Violation(
            f"handoff of {handoff.request_id} from {handoff.source} to {handoff.target} is {handoff.phase.name}, "
            f"its owner {owner and owner.worker_id} (C2)"
        )


def check_pending(state: State) -> None:
    """Outcomes are expected from living workers only, and a worker that loads has been ordered to."""
    loading = set()
    for pending in state.pending.values():
        command = pending.command
        end = state.end(command.worker_id)
        if end is None or end.epoch != command.epoch:
            raise Violation(f"{command} waits for a worker or a pool that is gone")
        if isinstance(command, do.LoadVersion):
            loading.add(command.worker_id)
    for worker in state.workers.values():
        check_load(worker, worker.worker_id in loading)


def check_load(worker: Worker, is_ordered: bool) -> None:
    """A worker loads a version exactly while an order to load (``is_ordered``) is unanswered."""
    if (worker.loading >= 0) != is_ordered:
        raise Violation(f"{worker.worker_id} waits for version {worker.loading}, which it was not told to load")


def check_evaluations(state: State) -> None:
    """Evaluations keep C1 and C2, and take from training no more than their allotment and idle workers."""
    evaluations, running = state.evaluations, state.evaluations.running
    for evaluation in running.values():
        begun = {name for name, each in evaluations.requests.items() if each.evaluation_id == evaluation.evaluation_id}
        waiting, idle = set(evaluation.waiting), set(evaluation.idle)
        held = {name for name in begun if evaluations.requests[name].worker_id}
        over = {name for name in begun if evaluations.requests[name].finished or evaluations.requests[name].scored}
        if begun - waiting - held - idle != over:
            nowhere = sorted(begun - waiting - held - idle - over)
            raise Violation(f"{evaluation.evaluation_id}: {nowhere} are nowhere (C2)")
        if idle & (waiting | held) or not all(evaluations.requests[name].is_session for name in idle):
            raise Violation(f"{evaluation.evaluation_id}: {sorted(idle)} are between two turns, or wait or run (C2)")
        if waiting & held or len(waiting) < len(evaluation.waiting) or not waiting <= begun:
            raise Violation(f"{evaluation.evaluation_id}: {sorted(waiting)} wait, {sorted(held)} run (C2)")
        if not (state.retired <= evaluation.version <= state.window.newest or evaluation.version in state.pinned):
            raise Violation(f"{evaluation.evaluation_id} runs, and the weights of {evaluation.version} are let go (C1)")
    unowned = [name for name, each in evaluations.requests.items() if each.evaluation_id not in running]
    by_worker = {worker_id: list(names) for worker_id, names in evaluations.placed.items()}
    held_by = {name: each.worker_id for name, each in evaluations.requests.items() if each.worker_id}
    if unowned or held_by != {name: worker_id for worker_id, names in by_worker.items() for name in names}:
        raise Violation(f"evaluations hold {by_worker}, their requests say {held_by}; of none that runs: {unowned}")
    for worker_id, names in by_worker.items():
        worker = state.workers[worker_id]
        versions = {running[evaluations.requests[name].evaluation_id].version for name in names}
        if versions != {worker.hosts}:
            raise Violation(f"{worker_id} hosts {worker.hosts} and evaluates versions {sorted(versions)} (C1)")
        if len(names) > max(worker.lent_slots, worker.slots + worker.lent_slots - worker.assigned):
            slots = f"{worker.slots} slots beside {worker.lent_slots} lent, {worker.assigned} in use"
            raise Violation(f"{worker_id} evaluates {len(names)} requests: {slots}")
    for worker in state.workers.values():
        share = sum(each.share for each in running.values() if each.version == worker.hosts)
        all_slots, kv_tokens = worker.slots + worker.lent_slots, worker.kv_tokens + worker.lent_kv_tokens
        if worker.lent_slots > max(1, share * all_slots) or worker.lent_kv_tokens > share * kv_tokens:
            lent_slots = f"{worker.lent_slots} of {all_slots} slots"
            raise Violation(f"{worker.worker_id} has lent {lent_slots} for a share of {share}")
    lent = {worker.worker_id for worker in state.workers.values() if worker.lent_slots or worker.lent_kv_tokens}
    if lent != evaluations.lent or any(worker.slots < 1 for worker in state.workers.values()):
        raise Violation(f"{sorted(lent)} have lent slots, {sorted(evaluations.lent)} are listed")


def check_idle(state: State) -> None:
    """The lists of idle and staying workers agree with the workers. It runs last, as it depends on the others."""
    workers = [worker for worker in state.worker_list if worker is not None]
    idle = [worker for worker in workers if is_idle(worker)]
    if sorted(state.worklist.idle) != _indexes(idle):
        raise Violation(f"indexes {sorted(state.worklist.idle)} are listed as idle, while {_indexes(idle)} are")
    staying = [worker for worker in workers if not worker.draining]
    if state.hosting.staying() != (len(staying), sum(worker.kv_tokens for worker in staying)):
        raise Violation(f"(workers, KV) to stay are {state.hosting.staying()}, while {_indexes(staying)} do")


def is_idle(worker: Worker) -> bool:
    """Whether the worker holds nothing, loads nothing and is not leaving."""
    return worker.is_empty and worker.loading < 0 and not worker.draining


def check_empty(state: State) -> None:
    """Checks, after a drain, that no group remains, no worker holds a reservation, and all commands are answered."""
    left = [*state.group_row, *state.request_row, *(str(pending.command) for pending in state.pending.values())]
    if left:
        raise Violation(f"left after the last step: {', '.join(left)}")
    for worker in state.workers.values():
        if not worker.is_empty or worker.kv_claimed or worker.kv_inbound:
            raise Violation(f"{worker.worker_id} still claims {worker.kv_claimed} KV tokens after the last step")
    if state.evaluations.running or state.evaluations.requests or state.evaluations.lent:
        raise Violation(f"evaluations are left: {', '.join(state.evaluations.running)}")
    for pool in state.pools.values():
        if pool.rows or pool.inbound or pool.kv_claimed:
            raise Violation(f"{pool.pool_id} still claims {pool.kv_claimed} KV tokens after the last step")


def _columns(table: Table, rows: Iterable[int], *names: str) -> list[dict[int, int]]:
    rows = list(rows)
    index = np.array(rows, dtype=np.intp)
    return [dict(zip(rows, table[name][index].tolist(), strict=True)) for name in names]


def _place(unplaced: set[int], rows: Iterable[int], state: State) -> None:
    for row in rows:
        if row not in unplaced:
            raise Violation(f"{state.request_id.get(row, row)} is in two places, or finished and still in one (C2)")
        unplaced.remove(row)


def fingerprint(state: State) -> dict[str, str]:
    """A digest of the state without the clock, equal for equal contents, in one machine over time or in two machines.

    It excludes data that is derived from the workers (``check_hosting``) and computed on demand.
    """
    apart = ("now_s", "config", "policy", "hosting", "loads")
    return {name: _plain(value) for name, value in vars(state).items() if name not in apart}


def _plain(value: Any) -> str:
    """A text that depends only on the contents, never on an object's identity."""
    if isinstance(value, np.ndarray):
        return value.tobytes().hex()
    if value is None or isinstance(value, (str, int, float, Enum)):
        return repr(value)
    if isinstance(value, Mapping):
        items = [(repr(key), _plain(part)) for key, part in value.items()]
        return str(items + [(name, _plain(part)) for name, part in getattr(value, "__dict__", {}).items()])
    if isinstance(value, (list, tuple, deque)):
        return str([part if type(part) is int else _plain(part) for part in value])  # long lists hold rows
    if isinstance(value, (set, frozenset)):
        return str(sorted(_plain(part) for part in value))
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(value, "__dict__", ())]
    return str([(name, _plain(getattr(value, name))) for name in names])
