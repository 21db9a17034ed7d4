"""Faults of the pools: faults of their processes and of requests that are parked in them or in transit."""

from typing import Final

from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim.faults.fault import Fault, pick
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.faults.unsteady import SILENCE_LIMIT_S
from dora.lab.sim.pool import SimPool
from dora.lab.sim.worker import SimWorker

PARKS_MAX: Final = 4  # parks per fault
LATER_MOST_S: Final = 4.0  # until the fault of the parking worker, and then of the pool
# Commands that fail, with the error kind that the pool, or a parking or resuming worker, reports.
POOL_REFUSALS: Final[tuple[tuple[type[do.WorkerCommand], str], ...]] = (
    (do.ReserveSlot, "refused"),
    (do.CopyIn, "refused"),
    (do.CopyIn, "not_movable"),
    (do.Resume, "unknown_request"),
    (do.Resume, "not_movable"),
)
WORKER_REFUSALS: Final[tuple[tuple[type[do.WorkerCommand], str], ...]] = (
    (do.Park, "refused"),
    (do.Park, "not_movable"),
    (do.ReserveSlot, "refused"),
    (do.CopyIn, "refused"),
    (do.CopyIn, "not_movable"),
)


def inject_into_pool(world: UnreliableWorld, fault: Fault) -> None:
    """Makes a worker park some requests, and in half of the cases die meanwhile. Then a fault hits a pool."""
    worker = pick(world.running(), fault.subject // 16)
    pool = pick([pool for _, pool in sorted(world.pools.items())], fault.subject // 8)
    if worker is None or pool is None:
        return
    park(world, worker, pool, fault)
    if fault.subject // 128 % 2 or fault.subject % 9 == 8:
        world.after(fault.amount * LATER_MOST_S, _lose, world, worker)
    world.after(fault.amount * LATER_MOST_S * (1.0 + fault.subject // 256 % 4 / 3.0), _inject, world, fault, pool)


def park(world: UnreliableWorld, worker: SimWorker, pool: SimPool, fault: Fault) -> None:
    """Asks to park up to ``PARKS_MAX`` requests of a worker, as an operator would."""
    state = world.machine.state
    known = state.worker_at(worker.worker_id, worker.epoch)
    for row in sorted(known.rows)[: 1 + fault.subject // 64 % PARKS_MAX] if known is not None else ():
        world.ask(on.MigrationRequested(state.request_id[row], pool.worker_id))


def _lose(world: UnreliableWorld, worker: SimWorker) -> None:
    if worker.alive:
        world.lose(worker, "killed")


def _inject(world: UnreliableWorld, fault: Fault, pool: SimPool) -> None:
    if not pool.alive:
        return
    match fault.subject % 9:
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
            command, error_kind = WORKER_REFUSALS[fault.subject // 512 % len(WORKER_REFUSALS)]
            for worker in world.running():
                worker.refusals[command] = [error_kind] * (1 + int(fault.amount * 2.99))
        case 8:
            _cancel_parked(world, fault)


def _cancel_parked(world: UnreliableWorld, fault: Fault) -> None:
    state = world.machine.state
    parked = sorted(row for pool in state.pools.values() for row in pool.rows)
    row = pick([row for row in parked if row not in state.handoffs] or parked, fault.subject // 512)
    if row is not None:
        world.ask(on.GroupCancelled(state.group_id[int(state.requests["group"][row])], "asked for"))
