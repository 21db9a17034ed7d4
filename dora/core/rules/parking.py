"""Parked requests: waiting requests whose KV is in a pool. Pools join, are lost, and drop KV that they cannot keep.

A parked request waits in its version's queue like any other. Placing it resumes it; if the pool has lost its KV, it is
re-prefilled. handoff.py moves requests into pools and out of them.
"""

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.pool import Pool
from dora.core.rules import handoff
from dora.core.state import IDLE, WAITING, State
from dora.errors import Conflict, InvalidValue


def joined(state: State, event: on.PoolJoined) -> None:
    """Begins a new epoch of a pool. Raises Conflict while another connected pool or worker has the id."""
    if event.pool_id in state.pools or event.pool_id in state.workers:
        raise Conflict("pool_id", event.pool_id, "an id that no connected pool or worker has", why="is taken")
    if event.kv_tokens < 1:
        raise InvalidValue("kv_tokens", event.kv_tokens, "at least 1")
    pool = state.add_pool(event.pool_id, event.epoch, event.kv_tokens, event.host)
    pool.leaving = event.host in state.notices
    for request_id, tokens in event.requests.items():
        row = state.request_row.get(request_id)
        if row is not None and _parks_again(state, row, pool, tokens):
            state.park(row, pool, state.parked_kv_of(row))
        else:
            state.send(do.RemoveRequest(pool.pool_id, pool.epoch, state.command_id(), request_id))
    state.worklist.wake()


def _parks_again(state: State, row: int, pool: Pool, tokens: int) -> bool:
    """Returns whether a reattached pool may keep this request: it has all tokens but those of a requested turn, and the
    request has its KV nowhere else.
    """
    status, input_tokens, moving, of_pool, worker = (
        state.requests[name][row] for name in ("status", "input_tokens", "moving", "pool", "worker")
    )
    waits = status in (WAITING, IDLE) and not (moving or of_pool or worker)
    has_all = tokens == state.requests["tokens"][row] - input_tokens
    return bool(waits) and has_all and state.parked_kv_of(row) <= pool.free


def lost(state: State, event: on.PoolLost) -> bool:
    """Marks requests of a lost pool as without KV; they keep their order. Returns whether the pool was alive."""
    pool = _pool_at(state, event.pool_id, event.epoch)
    if pool is None:
        return False
    state.answers_no_more(event.pool_id, event.epoch)
    handoff.lost(state, pool)
    for row in sorted(pool.rows):
        state.unpark(row)
        state.counters.parked_lost += row not in state.handoffs  # otherwise its target has all of it
    state.remove_pool(pool)
    state.worklist.wake()
    return True


def dropped(state: State, event: on.PoolDropped) -> bool:
    """Notes snapshots that the pool has dropped. A handoff that resumes one of them ends by the pool's refusal."""
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
    """Tells the pool to free the KV of a parked request that needs it no longer."""
    pool = state.unpark(row)
    state.send(do.RemoveRequest(pool.pool_id, pool.epoch, state.command_id(), state.request_id[row]))


def _pool_at(state: State, pool_id: str, epoch: int) -> Pool | None:
    pool = state.pools.get(pool_id)
    return pool if pool is not None and pool.epoch == epoch else None
