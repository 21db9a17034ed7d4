"""Holding a handoff in one of its phases: both its ends are stopped, until it stands still there."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from dora.errors import Conflict, NotFound
from dora.rpc import dora_pb2 as pb
from tests.chaos.world import POLL_S, World

MOVES_ASKED: Final = 6
LOOKS: Final = 200  # at the handoffs that were asked for, at most
POOL: Final = "pool-0"
# Where a handoff has to be seen to be stopped in a phase: a short one is over once it is seen itself.
SEEN_IN: Final = {
    "RESERVED": ("RESERVED", "PLANNED"),
    "COPYING": ("COPYING", "RESERVED"),
    "FROZEN": ("FROZEN", "COPYING"),
    "COMMITTED": ("FROZEN", "COPYING"),
}
# Whether source and target are the pool.
_ENDS_AT_POOL: Final = {
    "move": (False, False),
    "park": (False, True),
    "resume": (True, False),
    "idle-move": (False, False),
    "idle-park": (False, True),
}


@dataclass(frozen=True, slots=True)
class Ends:
    """A stalled handoff, with the process ids of both ends."""

    trajectory_id: str
    source_id: str
    target_id: str
    source: int
    target: int


def send(pid: int, number: signal.Signals) -> None:
    """A process that has ended gets nothing."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def release(*pids: int) -> None:
    for pid in pids:
        send(pid, signal.SIGCONT)


async def held(world: World, kind: str, phase: str, end: str = "") -> Ends:
    """Asks for moves until one is in this phase while both its ends are stopped. Both are stopped on return.

    ``end``: a worker that has to be one of them, or empty; not for PLANNED.
    """
    tries = 0
    while True:
        tries += 1
        if phase == "PLANNED":  # nothing but its target's answer ends that
            ends = await _planned(world)
            if ends is not None:
                world.phases[f"{kind}:{phase}"] += 1
                return ends
            continue
        pids = await _ask(world, kind, end)
        wanted = SEEN_IN[phase][: 1 + tries % 2]
        for _ in range(LOOKS):
            found = await _moving(world, kind, end)
            seen = next((each for each in found if each.handoff in wanted), None)
            if seen is not None:
                ends = _ends(seen, pids)
                try:
                    if await _is_stopped_in(world, kind, phase, ends):
                        return ends
                except BaseException:
                    release(ends.source, ends.target)
                    raise
                release(ends.source, ends.target)
            if seen is not None or not found:
                break


async def _planned(world: World) -> Ends | None:
    """Asks for the move of a request to a worker that stands still already. None: there was none to move."""
    status = await world.operator.status()
    hosts = {worker.worker_id: worker for worker in status.workers if worker.state == "ready"}
    running = (await world.operator.trajectories("running", limit=1000)).trajectories
    for request in sorted(running, key=lambda each: each.tokens - each.max_tokens):
        others = [
            each for each in hosts.values() if each.version == request.version and each.worker_id != request.worker
        ]
        if not others or request.worker not in hosts:
            continue
        target, source = min(others, key=lambda each: each.running), hosts[request.worker]
        try:
            send(target.pid, signal.SIGSTOP)
            with suppress(Conflict, NotFound):
                await world.operator.migrate(request.trajectory_id, target.worker_id)
                send(source.pid, signal.SIGSTOP)
                if await stands(world, request.trajectory_id) == "PLANNED":
                    return Ends(request.trajectory_id, source.worker_id, target.worker_id, source.pid, target.pid)
        except BaseException:
            release(source.pid, target.pid)
            raise
        release(source.pid, target.pid)
        break
    await asyncio.sleep(POLL_S)
    return None


async def _is_stopped_in(world: World, kind: str, phase: str, ends: Ends) -> bool:
    """Stops both. COMMITTED comes after FROZEN once the target alone goes on: it is the owner then, and the source,
    which stands still, has not let the request go."""
    if not (ends.source and ends.target):
        return False
    for pid in (ends.source, ends.target):
        send(pid, signal.SIGSTOP)
    standing = await stands(world, ends.trajectory_id)
    if (phase, standing) == ("COMMITTED", "FROZEN"):
        release(ends.target)
        while await stands(world, ends.trajectory_id) == "FROZEN":
            continue
        if await _owner(world, ends) == ends.target_id:
            send(ends.target, signal.SIGSTOP)
            standing = phase
    world.phases[f"{kind}:{standing}"] += 1
    return standing == phase


async def _owner(world: World, ends: Ends) -> str:
    """Returns the present owner of the request; empty: nobody."""
    listed = (await world.operator.trajectories(limit=1000)).trajectories
    return next((each.worker for each in listed if each.trajectory_id == ends.trajectory_id), "")


def _ends(request: pb.TrajectoryStatus, pids: Mapping[str, int]) -> Ends:
    source, target = request.worker, request.target
    return Ends(request.trajectory_id, source, target, pids.get(source, 0), pids.get(target, 0))


async def stands(world: World, trajectory_id: str) -> str:
    """The phase of its handoff once it does not change any more: what was on its way has been taken in."""
    before, same = "", 0
    while same < 3:
        listed = (await world.operator.trajectories(limit=1000)).trajectories
        now = next((each.handoff for each in listed if each.trajectory_id == trajectory_id), "")
        same = same + 1 if now == before else 0
        before = now
        await asyncio.sleep(POLL_S / 2)
    return before


async def _moving(world: World, kind: str, end: str) -> list[pb.TrajectoryStatus]:
    listed = (await world.operator.trajectories("idle" if _is_idle(kind) else "moving", limit=1000)).trajectories
    asked = [each for each in listed if each.handoff and (not end or end in (each.worker, each.target))]
    return [each for each in asked if (each.worker == POOL, each.target == POOL) == _ENDS_AT_POOL[kind]]


def _is_idle(kind: str) -> bool:
    """Whether such a handoff is one in tool time."""
    return kind.startswith("idle-")


async def _ask(world: World, kind: str, end: str) -> dict[str, int]:
    """Moves or parks requests that have many tokens and many to go, or that wait for their tools; what is parked is
    resumed by itself. All who may be an end, with their process ids."""
    status = await world.operator.status()
    pids = {each.worker_id: each.pid for each in status.workers} | {each.pool_id: each.pid for each in status.pools}
    hosts = [worker for worker in status.workers if worker.state == "ready"]
    state = "idle" if _is_idle(kind) else "running"
    movable = (await world.operator.trajectories(state, limit=1000)).trajectories
    asked = 0
    for request in sorted(movable, key=lambda each: -min(each.tokens, each.max_tokens - each.tokens)):
        others = [each.worker_id for each in hosts if each.version == request.version]
        targets = [POOL] if not kind.endswith("move") else [each for each in others if each != request.worker]
        if end not in ("", request.worker):
            targets = [each for each in targets if each == end]
        if targets and request.tokens and asked < MOVES_ASKED:
            with suppress(Conflict, NotFound):  # it has ended or changed hands since
                await world.operator.migrate(request.trajectory_id, targets[asked % len(targets)])
                asked += 1
    if not asked:
        await asyncio.sleep(POLL_S)
    return pids
