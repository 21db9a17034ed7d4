"""A caller is known before its message is read, and reading is bounded for all callers."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from dora.client import Operator
from dora.errors import Conflict, InvalidValue
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.rollout.telemetry import METRICS_KEPT, STEPS_KEPT, Telemetry
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc import interceptor
from dora.rpc.channel import open_channel, server_options
from dora.rpc.errors import LimitExceeded
from dora.rpc.proven import ProvenChannel, proven_channel
from dora.rpc.roles import Role, ServiceTokens
from tests.abuse.callers import METHODS, answer
from tests.owner_token import owner_token
from tests.refusals import refused, refused_call
from tests.sweeps import full

MEGABYTE = 1 << 20


# --------------------------------------------------------------------------------------------------------- memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


FLOOD = """
import asyncio, sys, grpc
from tests.proofs import credentials
async def one(channel, method, token):
    try:
        metadata = await credentials(channel, method, token)
        return await channel.unary_unary(method)(bytes(60 << 20), metadata=metadata, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code().name
async def main(address, method, token):
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        print(sorted(set(await asyncio.gather(*(one(channel, method, token) for _ in range(8))))))
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("role", "method", "status", "most_bytes"),
    [
        (None, "/dora.v1.Operator/GetStatus", "UNAUTHENTICATED", 24 * MEGABYTE),
        *full(
            (Role.OPERATOR, "/dora.v1.Operator/GetStatus", "RESOURCE_EXHAUSTED", 200 * MEGABYTE),
            (None, "/dora.v1.Prompts/Submit", "UNAUTHENTICATED", 24 * MEGABYTE),
            (Role.OPERATOR, "/dora.v1.Trainer/CommitStep", "PERMISSION_DENIED", 24 * MEGABYTE),
            (Role.SUBMITTER, "/dora.v1.Prompts/Submit", "INVALID_ARGUMENT", 200 * MEGABYTE),
        ),
    ],
)
async def test_eight_messages_of_60_megabytes_at_once(
    role: Role | None, method: str, status: str, most_bytes: int, handle: ServiceHandle
) -> None:
    """A stranger's messages are not read; of a caller's, two at once, each briefly as gRPC's bytes and as ours."""
    await asyncio.sleep(0)
    before = most = resident_bytes()
    argv = ["-c", FLOOD, handle.address, method, handle.tokens[role] if role else "wrong"]
    child = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    reading = asyncio.ensure_future(child.communicate())
    while not reading.done():
        await asyncio.wait({reading}, timeout=0.01)
        most = max(most, resident_bytes())
    printed, _ = await reading
    assert printed.decode().strip() == f"['{status}']"
    assert most - before < most_bytes


# ---------------------------------------------------------------------------------------------------------- limits


async def test_nobody_is_served_before_a_trainer_has_attached(handle: ServiceHandle) -> None:
    """The first epoch is 1: a call of epoch 0 would wait for ever, or take another's groups."""
    async with proven_channel(handle.address, handle.tokens[Role.TRAINER]) as channel:
        trainer = stubs.TrainerStub(channel)
        for call in (
            trainer.StreamStep(pb.StreamStepRequest()),
            trainer.KeepAlive(pb.KeepAliveRequest()),
        ):
            with refused_call(Conflict, field="trainer_epoch", value=0):
                await call.read()
        with refused_call(Conflict, field="trainer_epoch", value=0):
            await trainer.CommitStep(pb.CommitStepRequest(version=1))


async def test_bytes_that_are_no_message_are_the_senders_error(handle: ServiceHandle) -> None:
    async with open_channel(handle.address) as channel:
        for method, needed in METHODS.items():
            found = await answer(channel, method, b"\x0a\xff\xff\xff\xff\x0f", handle.tokens[needed])
            assert type(found) is InvalidValue and (found.field, found.value) == ("message", "6 bytes"), method


async def test_a_message_larger_than_its_methods_is_refused(handle: ServiceHandle) -> None:
    async with open_channel(handle.address) as channel:
        commit = pb.CommitStepRequest(metrics={f"metric {number}": 0.0 for number in range(600_000)})
        token = handle.tokens[Role.TRAINER]
        found = await answer(channel, "/dora.v1.Trainer/CommitStep", commit.SerializeToString(), token)
        assert isinstance(found, LimitExceeded) and str(interceptor.COMMIT_BYTES) in found.allowed
        for method, needed in METHODS.items():
            if needed is Role.WORKER or method.endswith(("Submit", "UploadWeights")):
                continue
            found = await answer(channel, method, bytes(interceptor.SMALL_BYTES + 1), handle.tokens[needed])
            assert isinstance(found, LimitExceeded) and str(interceptor.SMALL_BYTES) in found.allowed, method


class Slow(stubs.OperatorServicer):
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)
        self.go = asyncio.Event()

    async def GetStatus(self, request: pb.StatusRequest, context: Any) -> pb.Status:
        self.asked.release()
        await self.go.wait()
        return pb.Status()


@pytest.fixture
async def slow() -> AsyncIterator[tuple[Slow, ProvenChannel]]:
    service = Slow()
    server = grpc.aio.server(
        interceptors=interceptor.server_interceptors(ServiceTokens(owner_token("mine"))), options=server_options()
    )
    stubs.add_OperatorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with proven_channel(f"127.0.0.1:{port}", owner_token("mine")) as channel:
        yield service, channel
    await server.stop(None)


async def test_open_calls_are_bounded(slow: tuple[Slow, ProvenChannel]) -> None:
    service, channel = slow
    call = stubs.OperatorStub(channel).GetStatus
    most = interceptor.CALLS_AT_ONCE[Role.OPERATOR]
    held = [asyncio.ensure_future(call(pb.StatusRequest())) for _ in range(most)]
    for _ in held:
        await service.asked.acquire()
    with refused_call(LimitExceeded, field="calls of the operator service", value=most + 1, names=(most,)):
        await call(pb.StatusRequest())
    service.go.set()
    await asyncio.gather(*held)
    assert await call(pb.StatusRequest()) == pb.Status()


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def test_callers_that_never_send_their_message_make_room(
    slow: tuple[Slow, ProvenChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "SMALL_S", 0.05)
    service, channel = slow
    service.go.set()
    silent = [
        asyncio.ensure_future(channel.stream_unary("/dora.v1.Operator/GetStatus")(never()))
        for _ in range(2 * interceptor.LARGE_AT_ONCE)
    ]
    assert await stubs.OperatorStub(channel).GetStatus(pb.StatusRequest()) == pb.Status()
    for call in silent:
        with refused_call(InvalidValue, field="message", names=("0.05 s",)):
            await call


async def test_connections_are_bounded_and_those_that_there_are_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.rpc.channel.CONNECTIONS_MAX", 4)
    server = grpc.aio.server(
        interceptors=interceptor.server_interceptors(ServiceTokens(owner_token("mine"))), options=server_options()
    )
    service = Slow()
    service.go.set()
    stubs.add_OperatorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with proven_channel(f"127.0.0.1:{port}", owner_token("mine")) as channel:
        call = stubs.OperatorStub(channel).GetStatus
        assert await call(pb.StatusRequest()) == pb.Status()
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        ended = {asyncio.ensure_future(_ended(reader)) for reader, _ in strangers}
        done: set[asyncio.Future[None]] = set()
        while len(done) < 17:
            done, _ = await asyncio.wait(ended, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert done, "nothing was closed"
            if len(done) < 17:
                await asyncio.sleep(0)
        assert await call(pb.StatusRequest()) == pb.Status()
        for each in ended:
            each.cancel()
        for _, writer in strangers:
            writer.close()
    await server.stop(None)


async def _ended(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass
    except ConnectionError:
        pass


async def test_watches_are_bounded(handle: ServiceHandle) -> None:
    async with Operator(handle.address, handle.tokens[Role.OPERATOR]) as operator:
        watches = [operator.watch(1000) for _ in range(32)]
        for watch in watches:
            await anext(watch)
        with refused(LimitExceeded, field="watches", value="33"):
            await anext(operator.watch(1000))
        for watch in watches:
            await watch.aclose()
        async with asyncio.timeout(30):
            while True:
                try:
                    return await _one(operator)
                except LimitExceeded:  # the service has not heard of the end yet
                    continue


async def _one(operator: Operator) -> None:
    watch = operator.watch(1000)
    try:
        await anext(watch)
    finally:
        await watch.aclose()


def test_metrics_of_all_steps_together_are_bounded() -> None:
    """Else 512 steps with 128 metrics each would make every status of 9 MB, and hold up the service to write it."""
    telemetry = Telemetry()
    for step in range(STEPS_KEPT + 8):
        telemetry.step(step, [], {f"metric {number}": 1.0 for number in range(128)}, 1.0, 1.0)
    assert len(telemetry.steps) == STEPS_KEPT
    assert sum(len(step.metrics) for step in telemetry.steps) == METRICS_KEPT
    assert telemetry.steps[-1].metrics and not telemetry.steps[0].metrics
