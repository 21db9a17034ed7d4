"""Generated attempts to get in without credentials, or with wrong ones, at every port and method of a guarded run."""

import asyncio
import random
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import grpc
import psutil
import pytest

from dora.client import Operator
from dora.errors import TransferFailed
from dora.kvtransfer.peer import SECRET_BYTES, Identity, Peer, greet
from dora.kvtransfer.wire import Stream
from dora.orchestrator.main import ServiceHandle
from dora.rpc.access import ACCESS, PACKAGE, certified, may_call
from dora.rpc.channel import open_channel
from dora.rpc.roles import Role
from dora.tls import Tls
from dora.tls.contexts import Contexts
from tests.proofs import credentials
from tests.service import configured, running
from tests.tls_files import another, cluster, tls

SHORT: Final = 240
AT_ONCE: Final = 16
CALL_S: Final = 20.0
REFUSED: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
TOKENS: Final = ("none", "wrong", "another role's", "owner's")


@dataclass(frozen=True, slots=True)
class Shown:
    """A client's certificate in an attempt. ``opens``: a connection comes about; only role or token is wrong."""

    kind: str
    tls: Tls | None  # None: in the clear
    roles: frozenset[str] = frozenset()
    opens: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    handle: ServiceHandle
    folder: Path
    shown: tuple[Shown, ...]
    ports: tuple[int, ...]  # for KV and weights


@pytest.fixture
async def guarded(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Run]:
    folder, now = cluster(tmp_path / "tls"), datetime.now(UTC)
    stranger = cluster(tmp_path / "stranger")
    before = _listening()
    config = configured(tiny_dense, workers__engine="fake", workers__count=2, tls__folder=str(folder / "service"))
    async with running(config) as handle:
        ports = _listening() - before - {int(handle.address.rpartition(":")[2])}
        assert len(ports) == 3  # of two workers and the relay
        shown = [Shown("in the clear", None), Shown("no certificate", Tls(tls(folder, "operator").ca))]
        for role in ("operator", "trainer", "service", "worker", "host", "owner"):
            past = another(folder, role, tmp_path / f"past-{role}", now=now - timedelta(days=2))
            early = another(folder, role, tmp_path / f"early-{role}", now=now + timedelta(days=1))
            theirs = another(stranger, role, tmp_path / f"theirs-{role}")
            for kind, found in (("expired", past), ("not valid yet", early), ("another authority's", theirs)):
                shown.append(Shown(kind, Tls(tls(folder, "operator").ca, found.cert, found.key)))
        shown += [
            Shown("another role's", tls(folder, role), frozenset({role}), True) for role in Role if role != "host"
        ]
        nothing = another(folder, "nobody", tmp_path / "nobody", serves=True)
        shown.append(Shown("of no known role", nothing, frozenset({"nobody"}), True))
        yield Run(handle, folder, tuple(shown), tuple(sorted(ports)))


@pytest.mark.parametrize("count", [SHORT, pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(1500)])])
async def test_no_attempt_gets_in(guarded: Run, count: int) -> None:
    chance, found = random.Random(count), Counter[str]()
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with room:
            shown, method = chance.choice(guarded.shown), chance.choice(sorted(ACCESS))
            at_service = chance.random() < 0.7
            token, port = chance.choice(TOKENS), chance.choice(guarded.ports)
            if at_service:
                said = await called(guarded, shown, method, token)
            else:
                said = await asyncio.to_thread(greeted, port, shown)
            found["refused" if said else "let in"] += 1
            assert said, (number, shown, method, token, port)

    await asyncio.gather(*(one(number) for number in range(count)))
    assert found == {"refused": count}
    async with Operator(guarded.handle.address, tls=tls(guarded.folder, "operator")) as operator:
        status = await operator.status()
    assert [worker.state for worker in status.workers] == ["ready", "ready"]
    own = Shown("of the run", tls(guarded.folder, "worker"), opens=True)
    for port in guarded.ports:  # the certificate opens a connection, and the secret is another
        assert "secret of this run" in await asyncio.to_thread(greeted, port, own)


async def called(run: Run, shown: Shown, method: str, token: str) -> str:
    """Calls a method in a way that must be refused. Returns how it was; empty: it was not."""
    if shown.opens and any(may_call(role, method) for role in certified(shown.roles)):
        token = "wrong"  # the certificate alone would do
    handle, name = run.handle, f"{PACKAGE}{method}"
    secret = {
        "wrong": secrets.token_urlsafe(24),
        "owner's": handle.token,
        "another role's": next(handle.tokens[role] for role in Role if not may_call(role, method)),
    }.get(token)
    async with open_channel(handle.address, credentials=_credentials(shown.tls)) as channel:
        try:
            metadata = await credentials(channel, name, secret) if secret is not None else ()
            call = channel.unary_unary(name)(b"", metadata=metadata, timeout=CALL_S)
            await call
        except grpc.aio.AioRpcError as error:
            code = error.code()
            return code.name if code in REFUSED and (shown.opens or code is grpc.StatusCode.UNAVAILABLE) else ""
    return ""


def greeted(port: int, shown: Shown) -> str:
    """Greets a worker or a relay. Returns the refusal; empty: it has answered as to one of the run."""
    stream = Stream(socket.create_connection(("127.0.0.1", port)), CALL_S)
    try:
        if shown.tls is not None:
            stream.secure(_Reckless(shown.tls), server=False)
        own, peer = Identity("mine", 7, "f", "here"), Peer("w0", 1, f"127.0.0.1:{port}", ("tcp",))
        greet(stream, own, peer, secrets.token_bytes(SECRET_BYTES))
    except TransferFailed as error:
        return str(error)
    finally:
        stream.close()
    return ""


class _Reckless(Contexts):
    """Shows a certificate that the process itself would refuse."""

    def __init__(self, own: Tls) -> None:
        self._own = own

    def context(self, *, server: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._own.ca)
        context.check_hostname = False
        if self._own.cert:
            context.load_cert_chain(self._own.cert, self._own.key)
        return context

    def check_peer(self, der: bytes | None) -> None:
        pass


def _credentials(own: Tls | None) -> grpc.ChannelCredentials | None:
    if own is None:
        return None
    found = own.read()
    return grpc.ssl_channel_credentials(found.ca, found.key or None, found.cert or None)


def _listening() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
