"""Faults during handoffs: source or target die when a handoff reaches a phase, and faults of stranded handoffs."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import FROM_POOL, Handoff, Phase
from dora.lab.sim.faults.fault import Fault, pick
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.faults.unsteady import SILENCE_LIMIT_S
from dora.lab.sim.worker import SimWorker

PHASES: Final = (Phase.PLANNED, Phase.RESERVED, Phase.FROZEN, Phase.COMMITTED)  # phases in which a command is sent
STRANDED_MOST_S: Final = 3.0  # until a fault of a stranded handoff: copies take some seconds


def kill_in_handoff(world: UnreliableWorld, fault: Fault) -> None:
    """Ends the source or the target when a handoff reaches a phase for the first or second time, or shortly after."""
    kills_source = fault.subject // 4 % 2 == 0

    def kill(handoff: Handoff) -> None:
        worker = world.end(handoff.source if kills_source else handoff.target)
        if worker is not None:
            delay_s = fault.amount * 4.0 * world.scenario.cluster.link_latency_s
            world.after(delay_s, _if_alive, partial(world.kill, worker, fault.amount), worker)

    _at_phase(world, PHASES[fault.subject % 4], 1 + fault.subject // 8 % 2, kill)
    migrate(world, fault)


def strand(world: UnreliableWorld, fault: Fault) -> None:
    """Ends a source while its snapshot is copied in, so that only the snapshot remains. The seed selects the next
    event.

    The target dies, refuses the snapshot or hangs; the group is cancelled; the source returns and dies again; or
    nothing happens, and the target takes the request.
    """
    injected = AFTERMATHS[fault.subject // 64 % len(AFTERMATHS)]

    def end_source(handoff: Handoff) -> None:
        source, target = world.end(handoff.source), world.end(handoff.target)
        if source is None or target is None:
            return
        world.lose(source, "killed")
        if injected is _refuse:  # must take effect before the target is asked to copy in
            _refuse(world, handoff, target)
        else:
            world.after(fault.amount * STRANDED_MOST_S, _if_stranded, world, handoff, target, injected)

    _at_phase(world, Phase.FROZEN, 1, end_source)
    migrate(world, fault)


def migrate(world: UnreliableWorld, fault: Fault) -> None:
    """Asks for a request's move, mostly to a host of its version or to a pool, otherwise to any worker."""
    state = world.machine.state
    row = pick(sorted(row for worker in state.workers.values() for row in worker.rows), fault.subject)
    if row is None:
        return
    version, owner = state.requests["version"][row], state.owner(row)
    hosts = [host.worker_id for host in state.workers.values() if host.hosts == version and host is not owner]
    hosts += state.pools
    strays = not hosts or fault.subject // 64 % 8 == 0
    target = pick(list(state.workers) if strays else hosts, fault.subject // 512)
    if target is not None:
        world.ask(on.MigrationRequested(state.request_id[row], target))


def _at_phase(world: UnreliableWorld, phase: Phase, count: int, act: Callable[[Handoff], None]) -> None:
    left = count

    def trap(command: do.WorkerCommand) -> bool:
        nonlocal left
        pending = world.machine.state.pending.get(command.command_id)
        handoff = pending.handoff if pending is not None else None
        if handoff is None or handoff.phase is not phase:
            return False
        left -= 1
        if left:
            return False
        act(handoff)
        return True

    world.traps.append(trap)


def _if_alive(action: Callable[[], Any], worker: SimWorker) -> None:
    if worker.alive:
        action()


# ------------------------------------------------------------------------------------------ what befalls a stranded one

Aftermath = Callable[[UnreliableWorld, Handoff, SimWorker], None]  # the last is the target


def _if_stranded(world: UnreliableWorld, handoff: Handoff, target: SimWorker, injected: Aftermath) -> None:
    if handoff.phase is Phase.STRANDED:
        injected(world, handoff, target)


def _refuse(_world: UnreliableWorld, handoff: Handoff, target: SimWorker) -> None:
    target.refusals[do.CopyIn] = ["not_movable" if handoff.row % 2 else "refused"]


def _end_target(world: UnreliableWorld, _handoff: Handoff, target: SimWorker) -> None:
    if target.alive:
        world.lose(target, "killed")


def _hang_target(world: UnreliableWorld, _handoff: Handoff, target: SimWorker) -> None:
    """The target hangs slightly less than the silence limit, so that a shorter handoff timeout applies first."""
    if target.alive:
        world.hang(target, 0.9 * SILENCE_LIMIT_S)


def _cancel_group(world: UnreliableWorld, handoff: Handoff, _target: SimWorker) -> None:
    state = world.machine.state
    world.ask(on.GroupCancelled(state.group_id[int(state.requests["group"][handoff.row])], "asked for"))


def _end_source_again(world: UnreliableWorld, handoff: Handoff, _target: SimWorker) -> None:
    if world.end(handoff.source) is None:
        again = world.join_pool if handoff.kind in FROM_POOL else world.join
        world.lose(again(handoff.source), "killed")


def _nothing(_world: UnreliableWorld, _handoff: Handoff, _target: SimWorker) -> None:
    """The target takes the request."""


AFTERMATHS: Final[tuple[Aftermath, ...]] = (
    _end_target,
    _refuse,
    _hang_target,
    _cancel_group,
    _end_source_again,
    _nothing,
)
