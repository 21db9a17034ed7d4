"""Faults of sessions: their environments fail, stand still, end early, or ask what the core must refuse."""

from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim.faults.fault import Fault, pick
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.ledger import SimResponse


def inject_into_session(world: UnreliableWorld, fault: Fault) -> None:
    """Something happens to an open session, if there is one. The seed selects what."""
    of_sessions = {
        name: each
        for name, each in world.ledger.responses.items()
        if each.prompt.sessions and not each.finished and name in world.machine.state.rows()
    }
    if fault.subject % 6 == 5:
        world.ask(on.TurnRequested("g-none.0", 3), refused=True)
        for worker in world.running():  # their next extensions fail
            worker.refusals[do.ExtendRequest] = [("unknown_request", "refused")[fault.subject // 8 % 2]]
        return
    evaluated = [name for name in of_sessions if name in world.machine.state.evaluations.requests]
    names = evaluated if evaluated and fault.subject // 8 % 2 else [*of_sessions]  # few sessions are evaluated
    request_id = pick(sorted(names), fault.subject // 16)
    if request_id is None:
        return
    response = of_sessions[request_id]
    match fault.subject % 6:
        case 0:
            response.troubled = True
            world.ask(on.SessionFailed(request_id, "its environment died"))
        case 1 | 2:
            response.troubled = True  # it asks nothing more
        case 3:
            _end(world, request_id, response)
        case 4:
            _ask_wrongly(world, request_id, response)


def _end(world: UnreliableWorld, request_id: str, response: SimResponse) -> None:
    was_ended, response.ended = response.ended, True
    if not world.ask(on.SessionEnded(request_id)):
        response.ended = was_ended


def _ask_wrongly(world: UnreliableWorld, request_id: str, response: SimResponse) -> None:
    world.ask(on.TurnRequested(request_id, 0), refused=True)
    if not response.idle or response.turn < 0:
        world.ask(on.TurnRequested(request_id, 5), refused=True)
    world.ask(on.TurnRequested(request_id, 5, after_tokens=-2), refused=True)
    world.ask(on.TurnRequested(request_id, 5, after_tokens=response.tokens + 1, is_on_branch=True), refused=True)
    if not response.tokens:
        world.ask(on.SessionEnded(request_id), refused=True)
