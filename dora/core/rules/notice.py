"""Hosts that leave by a deadline: a scheduler takes the machine, or an operator gives it back.

A notice drains the host's workers and its pool at once. Their KV leaves to workers of its version that have room, then
to pools of other hosts. A parked request does not decode, so a running one is parked only when the deadline is near.
Everything else decodes on; what is left at the deadline is lost with the host, and the next worker computes it again.

The link carries the KV whose loss would cost most first. A response that ends before the deadline loses nothing, so it
goes last. Computing a context again takes time in proportion to its length, and so does its copy, but a copy also has a
fixed cost: the longest context saves most per second of the link.
"""

from collections import Counter
from math import inf
from typing import Final

import numpy as np

from dora.core import events as on
from dora.core.fleet.worker import QUEUE_SLOTS, Worker
from dora.core.handoff.choice import TYPICAL
from dora.core.handoff.table import NOTICE
from dora.core.rules import arrival, handoff, placement
from dora.core.state import IDLE, RUNNING, Notice, State
from dora.errors import InvalidValue

ENDS_WITHIN: Final = 0.8  # share of the time left in which a response must be expected to end to go last
LEAD_S: Final = 10.0  # before the deadline running requests are parked, or
LEAD_COPIES: Final = 3.0  # times the time of their copies before it, if that is longer
MISSES_MAX: Final = 16  # requests of one version without room, after which its other requests wait


def noticed(state: State, event: on.HostNoticed) -> None:
    """Drains a host's workers and pool by a deadline, even if they are the last. Of two notices the earlier one counts.

    Raises InvalidValue for a time that is not positive and finite.
    """
    if not 0.0 < event.within_s < inf:
        raise InvalidValue("within_s", event.within_s, "a positive number of seconds")
    known, deadline_s = state.notices.get(event.host), state.now_s + event.within_s
    if known is not None and known.deadline_s <= deadline_s:
        return
    state.notices[event.host] = Notice(deadline_s, event.cause)
    state.counters.hosts_noticed += known is None
    for worker in state.workers.values():
        if worker.host == event.host and not worker.draining:
            worker.draining = True
            state.rehosted(worker)
    for pool in state.pools.values():
        pool.leaving |= pool.host == event.host
    state.worklist.wake()


def lost(state: State, event: on.HostLost) -> bool:
    """Forgets a host, with its notice. Returns whether the core knew either."""
    had_notice = state.notices.pop(event.host, None) is not None
    state.places.forget(event.host)
    return arrival.lost(state, event) or had_notice


def is_emptied(state: State, host: str) -> bool:
    """Returns whether a host holds no request and no KV of one, so that it may leave before its deadline."""
    if any(worker.host == host for worker in state.workers.values()):
        return False
    return not any(pool.host == host and (pool.inbound or pool.rows) for pool in state.pools.values())


def leave(state: State) -> None:
    """Begins the moves off noticed hosts, up to the limit of concurrent handoffs."""
    for host, notice in state.notices.items():
        left_s, misses = notice.deadline_s - state.now_s, Counter[int]()
        rows, copy_s = _dearest_first(state, host, left_s)
        parks_running = left_s <= max(LEAD_S, LEAD_COPIES * copy_s)
        for row in rows:
            if len(state.handoffs) >= state.config.balance.moves_at_once:
                return
            version = int(state.requests["version"][row])
            if misses[version] < MISSES_MAX and not _moves(state, row, left_s, parks_running):
                misses[version] += 1


def _dearest_first(state: State, host: str, left_s: float) -> tuple[list[int], float]:
    """The rows whose KV is on the host and may move now, and the time that their copies take one after the other."""
    vacating = (worker for worker in state.hosting.vacating() if worker.host == host)
    rows = {row for worker in vacating for row in (*worker.rows, *worker.kept)}
    rows.update(row for pool in state.pools.values() if pool.host == host for row in pool.rows)
    at, requests = np.array(sorted(rows), np.int64), state.requests
    at = at[~requests["moving"][at] & (requests["rests_until_s"][at] <= state.now_s)]
    remaining_s = (requests["expected"][at] - requests["tokens"][at]) * state.rates.pace_s
    ends = (requests["status"][at] == RUNNING) & (state.rates.pace_s > 0.0) & (remaining_s <= ENDS_WITHIN * left_s)
    context = requests["prompt_tokens"][at] + requests["tokens"][at]
    copy_s = (state.cost or TYPICAL).copy_s(float(context.sum()), len(at))
    return at[np.lexsort((-context, ends))].tolist(), copy_s


def _moves(state: State, row: int, left_s: float, parks_running: bool) -> bool:
    """Begins to move a request with its KV. Returns whether the time suffices and some worker or pool has room."""
    kv_tokens, home, parked_in = state.kv_of(row), state.owner(row), state.pool_of(row)
    if not kv_tokens or (state.cost or TYPICAL).copy_s(kv_tokens) > left_s:
        return False
    is_running, is_idle = home is not None and row in home.rows, state.requests["status"][row] == IDLE
    stays_parked = parked_in is not None and is_idle
    host = home.host if home is not None else parked_in.host if parked_in is not None else ""
    worker = None if stays_parked else _roomiest(state, row, host, left_s, needs_slot=home is None or is_running)
    may_park = worker is None and (parks_running or not is_running)
    pool = state.pool_with(state.parked_kv_of(row), host) if may_park else None
    if worker is not None and parked_in is not None:
        placement.leave_queue(state, row)
        handoff.resume(state, row, parked_in, worker, NOTICE)
    elif pool is not None and parked_in is not None:
        handoff.carry(state, row, parked_in, pool)
    elif (target := worker or pool) is not None:
        handoff.begin(state, row, target, NOTICE)
    return bool(worker or pool)


def _roomiest(state: State, row: int, host: str, left_s: float, *, needs_slot: bool) -> Worker | None:
    """The worker of the request's version with the most free slots that has room for its KV, of the host's zone if one
    has.
    """
    queue, pressure = 1 if state.pools else QUEUE_SLOTS, state.config.balance.pressure
    kv_tokens, places = state.kv_of(row), state.places
    fit = [
        worker
        for worker in state.workers_of(int(state.requests["version"][row]))
        if (worker.assigned < queue * worker.slots or not needs_slot)
        and worker.rests_until_s <= state.now_s
        and (worker.is_empty or worker.kv_expected + kv_tokens <= pressure * worker.kv_tokens)
        and places.crosses(host, worker.host, kv_tokens)
        and places.copy_s(host, worker.host, kv_tokens) <= left_s
    ]

    def preference(each: Worker) -> tuple[bool, int, int, int]:
        return places.are_near(host, each.host), each.slots - each.assigned, -each.kv_expected, -each.index

    return max(fit, key=preference, default=None)
