"""Workers join, load versions, leave and are lost. A loss costs time, never a sample."""

from collections.abc import Iterable, Mapping

import numpy as np

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.worker import Worker, one_of_workers
from dora.core.rules import arrival, handoff, precision, rejection
from dora.core.rules.placement import orphan
from dora.core.state import IDLE, WAITING, Pending, State
from dora.errors import Conflict, NotFound

LOAD_ATTEMPTS = 3


def joined(state: State, event: on.WorkerJoined) -> None:
    """Begins a new epoch of a worker. Raises Conflict while the earlier epoch is alive, or a pool has the id."""
    if event.worker_id in state.workers or event.worker_id in state.pools:
        raise Conflict("worker_id", event.worker_id, "an id that no connected worker has", why="is taken")
    index = state.free_index()
    worker = Worker(event.worker_id, event.epoch, index, event.slots, event.kv_tokens, event.host)
    worker.full_precision = event.full_precision
    window = state.window
    is_another = event.version in window.rejected  # its weights may differ from the version's next publication
    is_another |= event.version in state.unavailable and rejection.is_unproven(state, event.version)
    is_another |= not precision.fits(state, worker, event.version)
    if event.version in range(state.retired, window.newest + 1) and not is_another:
        worker.loaded = worker.target = event.version
        rejection.proves(state, event.version)
    worker.draining = event.host in state.notices
    state.add_worker(worker)
    if event.requests:
        _adopt(state, worker, event)


def _adopt(state: State, worker: Worker, event: on.WorkerJoined) -> None:
    """Gives a worker of an earlier incarnation its requests back, unless another worker has them."""
    rows, kept = adoptable(state, worker.loaded, event.requests), keepable(state, worker.loaded, event.requests)
    names = [state.request_id[row] for row in rows]
    if (waiting_requests := state.waiting.get(worker.loaded)) is not None:
        for row in rows:
            if row in waiting_requests:
                waiting_requests.remove(row)
    state.give_all(rows, worker, [event.requests[name] for name in names])
    for row in kept:
        state.keep(row, worker)
        worker.kv_change += state.kv_of(row)
        if state.requests["status"][row] == WAITING:
            state.asks(row, worker)
    names += [state.request_id[row] for row in kept]
    for name in event.requests.keys() - set(names):
        state.send(do.RemoveRequest(worker.worker_id, worker.epoch, state.command_id(), name))


def adoptable(state: State, version: int, requests: Mapping[str, int]) -> list[int]:
    """The rows of those requests that a reattached worker, which hosts ``version``, may continue: they wait, are of
    that version, on no other worker, and this one has all of the service's tokens. ``requests`` has its tokens of each.
    """
    known = [(state.request_row[name], held) for name, held in requests.items() if name in state.request_row]
    if not known:
        return []
    rows, held = np.array(known, np.int64).T
    columns = state.requests.columns("status", "version", "tokens", "pool", "worker", "moving")
    status, of_version, tokens, pool, worker, moving = columns
    free = (status[rows] == WAITING) & (pool[rows] == 0) & (worker[rows] == 0) & ~moving[rows]
    found: list[int] = rows[free & (of_version[rows] == version) & (held >= tokens[rows])].tolist()
    return found


def keepable(state: State, version: int, requests: Mapping[str, int]) -> list[int]:
    """The rows of those sessions between two turns of which a reattached worker has exactly what was sampled and given
    before the next turn. ``requests`` has its tokens of each.
    """
    columns = state.requests.columns("status", "version", "tokens", "input_tokens", "pool", "worker", "moving")
    found: list[int] = []
    for name, held in requests.items():
        if (row := state.request_row.get(name)) is not None:
            status, of_version, tokens, input_tokens, pool, worker, moving = (int(column[row]) for column in columns)
            is_between = status == IDLE or (status == WAITING and input_tokens > 0)
            if (
                is_between
                and of_version == version
                and held == tokens - input_tokens
                and not (pool or worker or moving)
            ):
                found.append(row)
    return found


def lost(state: State, event: on.WorkerLost) -> bool:
    """Removes a lost worker and its requests. Returns whether the core still counted it as alive."""
    worker = state.worker_at(event.worker_id, event.epoch)
    if worker is None:
        return False
    state.answers_no_more(event.worker_id, event.epoch)
    handoff.lost(state, worker)
    for row in sorted(worker.rows, reverse=True):  # appended left: the earliest comes first in the queue
        state.take_away(row)
        if row not in state.handoffs:  # otherwise its snapshot is on the way to another worker
            orphan(state, row)
    for row in sorted(worker.kept):  # they stay idle or queued, without KV
        state.take_away(row)
    state.evaluations.lost(worker.worker_id, state.now_s)
    state.remove_worker(worker)
    state.counters.workers_lost += worker.evicted or not worker.stopping
    return True


def drain(state: State, event: on.DrainRequested) -> None:
    """Marks a worker to be drained; it leaves once it is empty."""
    worker = state.workers.get(event.worker_id)
    if worker is None:
        raise NotFound("worker_id", event.worker_id, one_of_workers(state.workers, event.worker_id))
    if worker.draining:
        raise Conflict("worker_id", event.worker_id, "a worker that is not draining", why="is draining already")
    if not any(not other.draining for other in state.workers.values() if other is not worker):
        allowed = "one of several workers, so that others can take over its requests"
        raise Conflict("worker_id", event.worker_id, allowed, why="is the last working one")
    worker.draining = True
    state.rehosted(worker)


def settle(state: State, indexes: Iterable[int]) -> None:
    """Loads target versions into workers that are empty and ready; lets drained ones leave.

    A target whose weights are deleted waits for the next plan, and one that the worker's host lacks for its arrival.
    """
    for index in indexes:
        worker = state.worker_list[index]
        if worker is None or not worker.is_empty or worker.loading >= 0 or worker.stopping:
            continue
        if worker.draining:
            worker.stopping = True
            state.hosting.moved(index, worker)
            state.out.append(do.StopWorker(worker.worker_id, worker.epoch))
        elif (
            state.keeps_weights(worker.target)
            and worker.target != worker.loaded
            and arrival.is_within_reach(state, worker)
            and rejection.may_load(state, worker)
        ):
            if precision.fits(state, worker, worker.target):
                load(state, worker)
            else:
                precision.restart(state, worker)


def load(state: State, worker: Worker) -> None:
    worker.loaded, worker.loading = -1, worker.target
    worker.load_began_s = state.now_s
    state.uses(worker, 0)
    state.rehosted(worker)
    state.send(do.LoadVersion(worker.worker_id, worker.epoch, state.command_id(), worker.target))


def load_done(state: State, pending: Pending, event: on.CommandDone) -> None:
    worker = state.workers[pending.command.worker_id]
    version, worker.loading = worker.loading, -1
    void, worker.load_is_void = worker.load_is_void, False
    state.rehosted(worker)
    if void or rejection.has_to_come(state, version):
        return  # its report concerns weights that were replaced
    if event.ok:
        worker.loaded, worker.load_failures = version, 0
        rejection.proves(state, version)
        return
    state.counters.loads_failed += 1
    if event.error_kind == "weights" and rejection.is_unproven(state, version):
        rejection.refused(state, worker, version, event)
        return
    if event.error_kind == "missing":
        arrival.missed(state, worker.host, version)
    worker.load_failures += 1
    if worker.load_failures >= LOAD_ATTEMPTS:
        reason = f"version {version} failed to load {LOAD_ATTEMPTS} times: {event.error}"
        evict(state, worker, reason)


def overdue(state: State) -> None:
    """Replaces workers that exceed the load time limit: an endless load would retain its version and all later ones."""
    limit_s = state.config.workers.load_timeout_s
    for worker in state.workers.values():
        if worker.loading >= 0 and not worker.stopping and state.now_s - worker.load_began_s >= limit_s:
            state.counters.loads_failed += 1
            evict(state, worker, f"version {worker.loading} was not loaded in {limit_s:g} s")


def evict(state: State, worker: Worker, reason: str) -> None:
    """Asks the shell to end the worker, whose loss follows as an event. Nothing new is assigned to it meanwhile."""
    if not worker.stopping:
        worker.stopping = worker.draining = worker.evicted = True
        state.rehosted(worker)
        state.out.append(do.EvictWorker(worker.worker_id, worker.epoch, reason))
