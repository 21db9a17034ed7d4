"""A stranger on the port of a killed service gets nothing from its clients that is worth anything."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from dora.client import Operator, Prompts, Trainer
from dora.data.types import PoolCapability
from dora.errors import DoraError, InvalidValue
from dora.host.agent import AgentOptions, run_agent
from dora.ops.cli.app import app
from dora.ops.cli.control.service import COMMANDS
from dora.rpc import dora_pb2 as pb
from dora.rpc import proof, proven
from dora.rpc.challenge import Challenges
from dora.rpc.channel import server_options
from dora.rpc.errors import ServiceUnavailable, Unauthenticated, from_rpc_error
from dora.rpc.interceptor import server_interceptors
from dora.rpc.proven import Prover, proven_channel
from dora.rpc.roles import SERVICES, Role, ServiceTokens
from dora.rpc.sealed import sealed, unsealed
from dora.session.link import SessionLink
from tests.owner_token import owner_token
from tests.refusals import refused
from tests.sweeps import some_of

OWNER = owner_token("owner")
TOKENS = ServiceTokens(OWNER)
WORKER = TOKENS.started("w0")
METHODS = [
    f"/dora.v1.{service.name}/{method.name}"
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if service.name in SERVICES
]
ROLE_OF = {method: SERVICES[method.split("/")[1].rpartition(".")[2]] for method in METHODS}
Captured = list[tuple[str, tuple[tuple[str, Any], ...], list[bytes]]]


class Service(grpc.GenericRpcHandler):
    """Answers each method with an empty message, behind the interceptors of a service if it is a real one."""

    def __init__(self, challenge: Callable[[dict[str, Any]], bytes] | None = None, proof_sent: bytes = b"") -> None:
        """``challenge``: how a fake one answers it."""
        self.captured: Captured = []
        self._challenge = challenge
        self.proof_sent = proof_sent

    def service(self, details: Any) -> Any:
        metadata, messages = tuple(details.invocation_metadata), list[bytes]()
        self.captured.append((details.method, metadata, messages))
        challenge = self._challenge
        if details.method == proof.CHALLENGE and challenge is None:
            return None  # the interceptor's, or of an older release

        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            if self.proof_sent:
                await context.send_initial_metadata(((proof.ANSWER_KEY, proof.text_of(self.proof_sent)),))
            if details.method == proof.CHALLENGE and challenge is not None:
                yield challenge(dict(metadata))
                return
            if not details.method.endswith(("Connect", "Join")):
                async for message in requests:
                    messages.append(message)
            yield b""

        return grpc.stream_stream_rpc_method_handler(answer, request_deserializer=bytes)

    @property
    def secrets_shown(self) -> bytes:
        """All bytes that came."""
        return repr(self.captured).encode()


@asynccontextmanager
async def listening(service: Service, port: int = 0, tokens: ServiceTokens | None = None) -> AsyncIterator[int]:
    """The service, which is killed at the end. ``tokens``: of a real one."""
    interceptors = server_interceptors(tokens) if tokens is not None else ()
    server = grpc.aio.server(interceptors=interceptors, options=server_options())
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def nonsense(_: dict[str, Any]) -> bytes:
    """Proofs of every role, by whoever knows no key."""
    proofs = [pb.ServiceProof(holder=role, proof=secrets.token_bytes(32)) for role in (*Role, "worker/w0")]
    nonce = secrets.token_bytes(proof.SERVICE_NONCE_BYTES)
    return pb.ChallengeReply(nonce=nonce, proofs=proofs).SerializeToString()


def reflected(given: dict[str, Any]) -> bytes:
    """The client's own nonce comes back as the service's, and as each proof."""
    nonce = proof.bytes_of(given[proof.NONCE_KEY])
    proofs = [pb.ServiceProof(holder=role, proof=nonce * 2) for role in Role]
    return pb.ChallengeReply(nonce=(nonce * 3)[: proof.SERVICE_NONCE_BYTES], proofs=proofs).SerializeToString()


async def replayed(tokens: ServiceTokens) -> Callable[[dict[str, Any]], bytes]:
    """The recorded answers of the real service to a stranger."""
    async with listening(Service(), tokens=tokens) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        asked = ((proof.NONCE_KEY, proof.text_of(bytes(16))), (proof.WORKER_KEY, "w0"))
        reply = await channel.unary_unary(proof.CHALLENGE)(b"", metadata=asked)
    return lambda _: reply


def keeps_secret(captured: bytes) -> None:
    """No token, no key, and no credential of a call is among these bytes."""
    for token in (*TOKENS.of.values(), WORKER):
        for shown in (token.encode(), base64.b64encode(token.encode()), hashlib.sha256(token.encode()).digest()):
            assert shown not in captured and shown.hex().encode() not in captured
            assert repr(shown)[2:-1].encode() not in captured
    assert proof.SCHEME.encode() not in captured and b"authorization" not in captured


FAKES = ("older", "nonsense", "reflected", "replayed")
KINDS = some_of(FAKES, "older", "replayed")


async def fake(kind: str) -> Service:
    if kind == "older":
        return Service()
    answers = {"nonsense": nonsense, "reflected": reflected, "replayed": await replayed(TOKENS)}
    return Service(answers[kind], secrets.token_bytes(32))


def call_of(channel: Any, method: str) -> Awaitable[bytes]:
    """One call of any kind with one message."""

    async def sent() -> AsyncIterator[bytes]:
        yield b""

    async def first() -> Any:
        call = channel.stream_stream(method)(sent())
        try:
            return await call.read()
        finally:
            call.cancel()

    return first()


@pytest.mark.parametrize("kind", KINDS)
async def test_clients_of_a_killed_service_show_its_successor_nothing(kind: str) -> None:
    """Clients of each method and role treat it as absent, and continue once the service is back."""
    service, holders = Service(), {method: TOKENS.of[role] for method, role in ROLE_OF.items()}
    async with listening(service, tokens=TOKENS) as port:
        address = f"127.0.0.1:{port}"
        channels = {method: proven_channel(address, token) for method, token in holders.items()}
        started = proven_channel(address, Prover(address, WORKER, "w0"))
        for method, channel in channels.items():
            assert await call_of(channel, method) == b""
        assert await call_of(started, "/dora.v1.Worker/Connect") == b""
        honest = [(method, metadata) for method, metadata, _ in service.captured if method != proof.CHALLENGE]
    for channel in (*channels.values(), started):
        await disconnected(channel)
    stranger = await fake(kind)
    async with listening(stranger, port):
        for method, channel in (*channels.items(), ("/dora.v1.Worker/Connect", started)):
            with pytest.raises(ServiceUnavailable):
                await connected(lambda: call_of(channel, method))  # noqa: B023
    keeps_secret(stranger.secrets_shown)
    assert {method for method, _, _ in stranger.captured} == {proof.CHALLENGE}
    restarted = Service()
    async with listening(restarted, port, TOKENS):
        for method, channel in channels.items():
            assert await connected(lambda: call_of(channel, method)) == b""  # noqa: B023
        before = len(restarted.captured)
        async with grpc.aio.insecure_channel(address) as channel:
            for method, metadata in honest:  # even what the first one saw, as who listens to it would
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(method)(b"", metadata=clean(metadata))
                assert isinstance(error := from_rpc_error(caught.value), Unauthenticated)
                assert (error.field, error.value) == ("proof", "(of another incarnation)")
        assert all(method in METHODS for method, _ in honest) and len(honest) == len(METHODS) + 1
        assert len(restarted.captured) == before + len(honest)  # asked for a handler, and refused by the interceptor
    for channel in (*channels.values(), started):
        await channel.close()


async def connected(call: Callable[[], Awaitable[Any]]) -> Any:
    """Returns the result of a call once gRPC has reconnected, which it tries after pauses."""
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.02)


async def disconnected(channel: Any) -> None:
    """Waits until gRPC shows that the connection is gone, with which the session ends."""
    while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)


def clean(metadata: Any) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, value in metadata if key == proof.AUTHORIZATION)


@pytest.mark.parametrize("kind", KINDS)
async def test_commands_show_a_stranger_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have seen no other service there: the token may be the user's error."""
    stranger = await fake(kind)
    monkeypatch.setenv("DORA_TOKEN", OWNER)
    async with listening(stranger) as port:
        for name, (_, example) in COMMANDS.items():
            words = [*example.split()[1:], *(() if "--address" in example else ("--address", "x"))]
            words[words.index("--address") + 1] = f"127.0.0.1:{port}"
            result = await asyncio.to_thread(CliRunner().invoke, app, words)
            assert isinstance(result.exception, SystemExit | DoraError) and result.exit_code != 0, (name, result.output)
    keeps_secret(stranger.secrets_shown)
    assert {method for method, _, _ in stranger.captured} == {proof.CHALLENGE}


@pytest.mark.parametrize("kind", KINDS)
async def test_members_and_clients_show_a_stranger_nothing(kind: str, tmp_path: Path, tiny_dense: Path) -> None:
    """Worker, pool, host's agent, trainer, prompts, operator: what they would send stays with them."""
    stranger = await fake(kind)
    async with listening(stranger) as port:
        address = f"127.0.0.1:{port}"
        for prover in (Prover(address, WORKER, "w0"), Prover(address, TOKENS.of[Role.WORKER], "mine")):
            link = SessionLink(prover, prover.worker_id, PoolCapability(1 << 20, 0))
            link.begin()
            with pytest.raises(Unauthenticated):
                await asyncio.to_thread(link.take, 30.0)
            await asyncio.to_thread(link.close)
        async with Operator(address, OWNER) as operator, Prompts(address, OWNER) as prompts:
            for call in (operator.status(), anext(operator.watch()), prompts.submit([{"text": "mine"}])):
                with pytest.raises(Unauthenticated):
                    await call
        async with Trainer(address, token=TOKENS.of[Role.TRAINER]) as trainer:
            with pytest.raises(Unauthenticated):
                await trainer.attach()
        options = AgentOptions(address, OWNER, "h1", model=str(tiny_dense), folder=str(tmp_path), rejoin_s=0)
        with pytest.raises(Unauthenticated):
            await run_agent(options, asyncio.Event(), lambda _: None)
    keeps_secret(stranger.secrets_shown)
    assert {method for method, _, _ in stranger.captured} == {proof.CHALLENGE}


@pytest.mark.parametrize("answer", [b"", bytes(32), b"no"], ids=["none", "another", "of another size"])
async def test_an_answer_without_its_proof_is_not_believed(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its challenge was answered well: another has the connection now. A stream's messages wait for it."""
    if not answer:  # it does not begin to answer before it has the message
        monkeypatch.setattr(proven, "PROOF_S", 0.1)
    challenges = Challenges(TOKENS)
    stranger = Service(lambda given: challenges.answer(proof.bytes_of(given[proof.NONCE_KEY]), "").SerializeToString())
    stranger.proof_sent = answer
    async with listening(stranger) as port, proven_channel(f"127.0.0.1:{port}", OWNER) as channel:
        for method in METHODS:
            with pytest.raises(ServiceUnavailable):
                await call_of(channel, method)
    assert not any(messages for _, _, messages in stranger.captured)


async def test_what_was_heard_is_accepted_once() -> None:
    """A credential of a living service, too, is for one call of one method."""
    service = Service()
    async with listening(service, tokens=TOKENS) as port:
        async with proven_channel(f"127.0.0.1:{port}", OWNER) as channel:
            assert await call_of(channel, "/dora.v1.Operator/GetStatus") == b""
        (metadata,) = (clean(each) for method, each, _ in service.captured if method.endswith("GetStatus"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method, value in (("GetStatus", "(used before)"), ("Drain", "(wrong)")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(f"/dora.v1.Operator/{method}")(b"", metadata=metadata)
                found = from_rpc_error(caught.value)
                assert isinstance(found, Unauthenticated) and found.value == value


async def test_a_client_of_an_older_release_is_told_what_it_lacks() -> None:
    async with listening(Service(), tokens=TOKENS) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            bearer = (("authorization", f"Bearer {OWNER}"),)
            await channel.unary_unary("/dora.v1.Operator/GetStatus")(b"", metadata=bearer)
        found = from_rpc_error(caught.value)
        assert isinstance(found, Unauthenticated) and found.field == "authorization" and OWNER not in str(found)


def test_secrets_in_orders_are_sealed_for_their_session() -> None:
    mine, other = secrets.token_bytes(32), secrets.token_bytes(32)
    kv = pb.KvSettings(secret=bytes(range(32)))
    for order in (
        pb.WorkerCommand(welcome=pb.Welcome(epoch=1, kv=kv)),
        pb.HostOrder(welcome=pb.HostWelcome(epoch=1, relay_secret=bytes(range(32)), pool_token=WORKER)),
        pb.HostOrder(start_worker=pb.StartWorker(worker_id="w0", token=WORKER)),
        pb.HostOrder(stop_worker=pb.StopWorker(worker_id="w0", token=WORKER)),
        pb.HostOrder(stop_worker=pb.StopWorker(worker_id="w0")),
    ):
        sent = sealed(order, mine)
        assert WORKER.encode() not in sent.SerializeToString() and bytes(range(32)) not in sent.SerializeToString()
        if sent != order:
            with refused(InvalidValue, field="secret"):
                unsealed(type(order).FromString(sent.SerializeToString()), other)
        assert unsealed(type(order).FromString(sent.SerializeToString()), mine) == order
