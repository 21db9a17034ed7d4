"""A lasting attack on a service's connections locks nobody out who proves a token."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from dora.client import Operator, Prompts, Trainer
from dora.orchestrator.main import ServiceHandle
from dora.orchestrator.services import server
from dora.rpc import channel, proof
from dora.rpc.errors import PermissionDenied
from dora.rpc.proven import Prover
from dora.rpc.roles import Role
from dora.rpc.room import CALLS_MAX, Room
from dora.session.link import SessionLink
from dora.worker.fake.engine import FakeEngine
from tests.abuse.test_idle_connections import GREETING
from tests.refusals import refused
from tests.service import configured, running

PLACES = 256
EACH = 400  # connections of each attacking address
READY_S = 60.0


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch, tiny_dense: Path) -> AsyncIterator[ServiceHandle]:
    """A service with few places, and clients that share no connection."""
    of_all = channel.channel_options
    monkeypatch.setattr(channel, "connections_most", lambda: PLACES)
    monkeypatch.setattr(server, "connections_most", lambda: PLACES)
    monkeypatch.setattr(
        channel, "channel_options", lambda *given: [*of_all(*given), ("grpc.use_local_subchannel_pool", 1)]
    )
    async with running(configured(tiny_dense, workers__engine="fake", workers__count=1)) as handle:
        yield handle


@asynccontextmanager
async def attack(address: str, sent: bytes, *hosts: str) -> AsyncIterator[None]:
    argv = ["-m", "tests.abuse.attackers", address.rpartition(":")[2], str(EACH), sent.hex(), *hosts]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), READY_S)
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("sent", "hosts"),
    [
        (GREETING, ("127.0.0.1",)),
        (b"", ("127.0.0.2", "127.0.0.3")),
    ],
    ids=["the clients' own address", "two others"],
)
async def test_who_proves_a_token_gets_in(service: ServiceHandle, sent: bytes, hosts: tuple[str, ...]) -> None:
    """An operator each time anew, a trainer, a worker; and a connection from before the attack stays."""
    engine = FakeEngine(slots=8, kv_tokens=4096, max_model_len_tokens=256, model=service.model)
    async with Operator(service.address, service.token) as early:
        await early.status()
        async with attack(service.address, sent, *hosts):
            for _ in range(3):
                async with Operator(service.address, service.token, timeout_s=READY_S) as operator:
                    await operator.status()
            async with Trainer(service.address, token=service.token) as trainer:
                await trainer.attach(groups=4)
            prover = Prover(service.address, service.tokens[Role.WORKER], "back")
            link = SessionLink(prover, "back", engine.capability)
            link.begin()
            welcome = await asyncio.to_thread(link.take, READY_S)
            assert welcome is not None and welcome.HasField("welcome")
            await asyncio.to_thread(link.close)
            await early.status()


@pytest.mark.parametrize("method", [proof.CHALLENGE, "/dora.v1.Operator/GetStatus"])
async def test_a_connection_that_only_calls_without_a_proof_is_ended(service: ServiceHandle, method: str) -> None:
    """And no other one, though it is from the same address and its calls are refused too."""
    token = service.tokens[Role.OPERATOR]
    async with Operator(service.address, token) as early, Prompts(service.address, token) as misled:
        await early.status()
        nonce = ((proof.NONCE_KEY, proof.text_of(bytes(proof.NONCE_BYTES))),)
        seen: Counter[grpc.StatusCode] = Counter()
        async with asyncio.timeout(READY_S), channel.open_channel(service.address) as stranger:
            while not seen[grpc.StatusCode.UNAVAILABLE]:
                call = stranger.unary_unary(method)(b"", metadata=nonce)
                seen[await call.code()] += 1
                with refused(PermissionDenied, field="token"):
                    await misled.end()
        assert seen.total() > CALLS_MAX
        await early.status()


class Sockets(Room):
    """A room whose sockets are made up."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.ended: list[int] = []

    def of(self, sockets: dict[int, Any]) -> list[int]:
        self._sockets = sockets
        return self._keep([fd for fd, each in sockets.items() if self._is_unproven(each)])

    def _end(self, descriptor: int) -> None:
        self.ended.append(descriptor)


@pytest.mark.parametrize("seed", range(20))
def test_the_address_that_has_most_gives_up_its_oldest_connections(seed: int) -> None:
    from dora.rpc.room import _Socket

    chance = random.Random(seed)
    room = Sockets(chance.randint(2, 40))
    sockets = {
        fd: _Socket(chance.randrange(1 << 20), fd, (f"10.0.0.{chance.choice('1112345')}", fd)) for fd in range(60)
    }
    for fd in chance.sample(range(60), chance.randrange(10)):
        room.proven(f"ipv4:{sockets[fd].peer[0]}:{fd}")  # type: ignore[index]
    proven = {fd for fd, each in sockets.items() if each.peer in room._proven}
    left = room.of(sockets)
    most = room._unproven_most()
    assert len(left) == min(most, 60 - len(proven))
    assert not proven & set(room.ended) and not set(left) & set(room.ended)
    hosts = [sockets[fd].peer[0] for fd in left]  # type: ignore[index]
    for fd in room.ended:
        peer = sockets[fd].peer
        assert peer is not None
        assert hosts.count(peer[0]) >= max(map(hosts.count, hosts)) - 1  # nobody keeps many more than the ended one's
        assert all(sockets[fd].number < sockets[other].number for other in left if sockets[other].peer[0] == peer[0])  # type: ignore[index]
