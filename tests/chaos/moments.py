"""The moments at which a fault strikes, but those of handoffs: what is waited for, and who is the victim then."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from dora.errors import Conflict, NotFound
from dora.rpc import dora_pb2 as pb
from tests.chaos import family, faults
from tests.chaos.faults import TOOL_TIME, Fault
from tests.chaos.handoffs import POOL
from tests.chaos.setting import HOST
from tests.chaos.world import Condition, World

OF_SERVICE = ("state", "record", "run folder", "port", "kept weights")  # what the service has


class Missed(Exception):
    """The moment did not come."""


async def come(world: World, moment: str) -> None:
    """Returns as soon as it is seen. Raises Missed."""
    match moment:
        case "taking" | "committing" | "publishing":
            await world.trainer.reaches(moment)
        case "published":
            step = (await world.trainer.reaches("publishing"))["step"]
            await _seen(world, lambda status: status.newest_version > step)
        case "loading":
            await _seen(world, lambda status: any(worker.state == "loading" for worker in status.workers))
        case "scoring":
            await _grows(world, "trajectories_finished")
        case "admission":
            await _grows(world, "groups_admitted")
        case "submitting":
            if not await world.submitting.submit():
                raise Missed
        case "decoding":
            await _seen(world, lambda status: any(worker.running for worker in status.workers))
        case faults.TOOL_TIME:
            while not await _idle(world):
                continue
        case faults.POOLED_TOOL_TIME:
            while POOL not in {each.worker for each in await _idle(world)}:
                await _park(world)
        case faults.TURN:
            await world.environment.reaches("asking")
        case "chat asking" | "chat turn" | "chat answered" | "chat closing":
            await world.chats.reaches(moment)


async def victim_of(world: World, fault: Fault) -> int:
    """Its process id; 0: there is none now."""
    own: dict[str, Callable[[], int]] = {
        "trainer": lambda: world.trainer.pid,
        "environment": lambda: world.environment.pid,
        "environments": lambda: world.environments.pid,
        "front": lambda: world.fronts[world.chats.last["front"]].pid,
        "agent": lambda: world.agent.pid,
        "from host": lambda: world.agent.pid,
        "to host": lambda: world.agent.pid,
        "verifier": lambda: family.verifier(world.service.pid),
        "keeper": lambda: family.supervisor(world.service.pid),
        "orchestrator": lambda: world.service.pid,
        **dict.fromkeys(OF_SERVICE, lambda: world.service.pid),
    }
    whose = fault.whose
    if whose in own:
        return own[whose]()
    status = await world.operator.status()
    if whose == "pool":
        return next((pool.pid for pool in status.pools if pool.host == "local"), 0)
    host = HOST if whose == "host worker" else "local"
    workers = [worker for worker in status.workers if worker.host == host and worker.pid]
    state = "loading" if fault.moment == "loading" else "ready"
    idle = Counter(each.worker for each in await _idle(world)) if fault.moment == TOOL_TIME else Counter[str]()
    worker = max(workers, key=lambda each: (each.state == state, idle[each.worker_id], each.running), default=None)
    if worker is None:
        return 0
    return family.rank(worker.pid) if whose == "rank" else worker.pid


async def _idle(world: World) -> list[pb.TrajectoryStatus]:
    """The sessions that wait for their environment."""
    return list((await world.operator.trajectories("idle", limit=1000)).trajectories)


async def _park(world: World) -> None:
    """Asks for the moves of all idle sessions to the pool."""
    for each in await _idle(world):
        with suppress(Conflict, NotFound):  # it has no KV, or is on its way, or its next turn has begun
            await world.operator.migrate(each.trajectory_id, POOL)


async def _seen(world: World, condition: Condition) -> pb.Status:
    """As soon as may be."""
    while True:
        status = await world.status()
        if status is not None and condition(status):
            return status


async def _grows(world: World, counter: str) -> None:
    before = (await world.operator.status()).counters[counter]
    await _seen(world, lambda status: status.counters[counter] > before)
