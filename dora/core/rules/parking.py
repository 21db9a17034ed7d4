"""Parked requests: waiting ones whose KV lies in a pool. Pools come, are lost, and drop what they cannot keep.

A parked request stands in its version's line like any other. Whoever places it thereby resumes it; where the pool no
longer has its KV, it is re-prefilled. handoff.py brings requests into a pool and out of it.
"""

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.pool import Pool
from dora.core.rules import handoff
from dora.core.state import WAITING, State
from dora.errors import Conflict, InvalidValue


def joined(state: State, event: on.PoolJoined) -> None:
    """A new epoch of a pool. Raises Conflict while the id is another living pool's or worker's."""
    if event.pool_id in state.pools or event.pool_id in state.workers:
        raise Conflict("pool_id", event.pool_id, "an id that no living pool or worker has", why="is taken")
    if event.kv_tokens < 1:
        raise InvalidValue("kv_tokens", event.kv_tokens, "at least 1")
    pool = state.add_pool(event.pool_id, event.epoch, event.kv_tokens, event.host)
    for request_id, tokens in event.requests.items():
        row = state.request_row.get(request_id)
        if row is not None and tokens == state.requests["tokens"][row] and _parks_again(state, row, pool):
            state.park(row, pool, handoff.kv_tokens(state, row))
        else:
            state.send(do.RemoveRequest(pool.pool_id, pool.epoch, state.command_id(), request_id))
    state.worklist.wake()


def _parks_again(state: State, row: int, pool: Pool) -> bool:
    """Whether a pool that has outlived the service may keep this request: it waits, and lies nowhere else."""
    requests = state.requests
    waits = requests["status"][row] == WAITING and not requests["moving"][row] and not requests["pool"][row]
    return bool(waits) and handoff.kv_tokens(state, row) <= pool.free


def lost(state: State, event: on.PoolLost) -> bool:
    """What was parked there has lost its KV, and keeps its place in line. Returns whether the pool was alive."""
    pool = _pool_at(state, event.pool_id, event.epoch)
    if pool is None:
        return False
    state.answers_no_more(event.pool_id, event.epoch)
    handoff.lost(state, pool)
    for row in sorted(pool.rows):
        state.unpark(row)
        state.counters.parked_lost += row not in state.handoffs  # else its target has all of it
    state.remove_pool(pool)
    state.worklist.wake()
    return True


def dropped(state: State, event: on.PoolDropped) -> bool:
    """The pool has lost some snapshots. One that it was told to resume it will refuse: that handoff's end is enough."""
    pool = _pool_at(state, event.pool_id, event.epoch)
    if pool is None:
        return False
    for request_id in event.request_ids:
        row = state.request_row.get(request_id)
        if row in pool.rows and row not in state.handoffs:
            state.unpark(row)
            state.counters.parked_lost += 1
    state.worklist.wake()
    return True


def forget(state: State, row: int) -> None:
    """A parked request needs its KV no more: its pool is told to free it."""
    pool = state.unpark(row)
    state.send(do.RemoveRequest(pool.pool_id, pool.epoch, state.command_id(), state.request_id[row]))


def _pool_at(state: State, pool_id: str, epoch: int) -> Pool | None:
    """The living pool of this id and epoch; None if either is over."""
    pool = state.pools.get(pool_id)
    return pool if pool is not None and pool.epoch == epoch else None
