"""Faults of the host tier: what befalls pools, and the requests that are parked in them or on their way."""

from typing import Final

from dora.orchestrator.core import commands as do
from dora.orchestrator.core import events as on
from dora.sim.fault import Fault, pick
from dora.sim.pool import SimPool
from dora.sim.unreliable import SILENCE_LIMIT_S, UnreliableWorld

PARKS_MOST: Final = 4  # that one fault asks for
# Which commands fail, and how the pool, or the worker that is to park, says so.
POOL_REFUSALS: Final[tuple[tuple[type[do.WorkerCommand], str], ...]] = (
    (do.ReserveSlot, "refused"),
    (do.CopyIn, "refused"),
    (do.Resume, "unknown_request"),
    (do.Resume, "not_movable"),
)
PARK_REFUSALS: Final = ("refused", "not_movable", "unknown_request")


def befall_pool(world: UnreliableWorld, fault: Fault) -> None:
    """Some requests are to be parked, and something happens to a pool: now, or as they are on their way."""
    park(world, fault)
    pool = pick([pool for _, pool in sorted(world.pools.items())], fault.subject // 8)
    if pool is not None:
        world.after(fault.amount * 20.0 * world.scenario.cluster.link_latency_s, _befall, world, fault, pool)


def park(world: UnreliableWorld, fault: Fault) -> None:
    """Up to ``PARKS_MOST`` running requests are to go to a pool, as if an operator had asked."""
    state = world.machine.state
    for number in range(1 + fault.subject // 64 % PARKS_MOST):
        row = pick(sorted(row for worker in state.workers.values() for row in worker.rows), fault.subject + 31 * number)
        pool = pick(sorted(state.pools), fault.subject // 8)
        if row is not None and pool is not None:
            world.ask(on.MigrateAsked(state.request_id[row], pool))


def _befall(world: UnreliableWorld, fault: Fault, pool: SimPool) -> None:
    if not pool.alive:
        return
    match fault.subject % 8:
        case 0:
            world.kill(pool, fault.amount)
        case 1:
            world.lose(pool, "its stream broke")
        case 2:
            world.hang(pool, 2.0 * fault.amount * SILENCE_LIMIT_S)
        case 3:
            world.partition(pool, 2.0 * fault.amount * SILENCE_LIMIT_S, to_core=fault.subject // 512 % 2 == 0)
        case 4 | 5:
            if dropped := pool.drop(fault.subject // 512, fault.amount):
                world.to_core(pool, on.PoolDropped(pool.worker_id, pool.epoch, dropped, "the disk is full"))
        case 6:
            command, error_kind = POOL_REFUSALS[fault.subject // 512 % len(POOL_REFUSALS)]
            pool.refusals[command] = [error_kind] * (1 + int(fault.amount * 2.99))
        case 7:
            worker = pick(world.running(), fault.subject // 512)
            if worker is not None:
                error_kind = PARK_REFUSALS[fault.subject // 4096 % len(PARK_REFUSALS)]
                worker.refusals[do.Park] = [error_kind] * (1 + int(fault.amount * 2.99))
