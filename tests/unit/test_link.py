"""The stream between a worker and the service: what is sent together, and what its end is once it is over."""

import socket

import pytest

from dora.data.types import EngineCapability
from dora.orchestrator.rollout.streams import WorkerSession
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from dora.rpc.proven import Prover
from dora.session.link import OPEN_TIMEOUT_S, OUTCOMES_TOGETHER_MAX, SessionLink, one_by_one
from tests.refusals import refused

CAPABILITY = EngineCapability("f", 8, 4096, 32, 256, 64, "float32")


def test_a_stream_that_ended_is_a_plain_error_for_who_sends() -> None:
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        link = SessionLink(Prover(address, "token"), "w0", CAPABILITY)
        with pytest.raises(ServiceUnavailable):
            link.begin()
            link.take(OPEN_TIMEOUT_S)
        link._thread.join()
        with refused(ServiceUnavailable, field="address", value=address):
            link.send(pb.WorkerMessage(report=pb.WorkerReport()))
        link.close()


def command(number: int, kind: str) -> pb.WorkerCommand:
    order = {"start_request": pb.StartRequest, "remove_request": pb.RemoveRequest}[kind]
    return pb.WorkerCommand(command_id=number, **{kind: order(request_id=f"r{number}")})


@pytest.mark.parametrize("takes, messages", [(True, 3), (False, 6)])
async def test_requests_that_start_at_once_come_in_one_command_and_in_order(takes: bool, messages: int) -> None:
    session = WorkerSession("w0", 1, 1, "host", CAPABILITY)
    session.takes_start_requests = takes
    kinds = ("start_request", "start_request", "start_request", "remove_request", "start_request", "start_request")
    for number, kind in enumerate(kinds):
        session.send(command(number, kind))
    session.finish()
    sent = [each async for each in session.commands()]
    assert len(sent) == messages
    taken = [each for message in sent for each in one_by_one(message)]
    assert [(each.command_id, each.WhichOneof("kind")) for each in taken] == list(enumerate(kinds))
    assert [getattr(each, each.WhichOneof("kind") or "").request_id for each in taken] == [f"r{n}" for n in range(6)]


async def test_outcomes_that_are_ready_at_once_go_in_one_message_and_in_order() -> None:
    link = SessionLink(Prover("nowhere:1", "token"), "w0", CAPABILITY)
    outcomes = [pb.WorkerOutcome(command_id=number) for number in range(OUTCOMES_TOGETHER_MAX + 2)]
    report = pb.WorkerMessage(report=pb.WorkerReport())
    for message in (*(pb.WorkerMessage(outcome=each) for each in outcomes), report, None):
        link._put(message)
    hello, *sent = [message async for message in link._messages()]
    assert hello.hello.takes_start_requests
    assert [message.WhichOneof("kind") for message in sent] == ["outcomes", "outcomes", "report"]
    assert [each.command_id for message in sent for each in message.outcomes.outcomes] == list(range(len(outcomes)))
