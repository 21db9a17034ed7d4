"""Generated attempts to get in without credentials, or with wrong ones, at every port, method and route of a guarded
run.
"""

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

import aiohttp
import grpc
import psutil
import pytest

from dora.agents.front.app import ROUTES
from dora.agents.front.callers import TURNS
from dora.agents.front.http import TINKER
from dora.agents.front.run import FrontOptions, front
from dora.client import Operator
from dora.errors import TransferFailed
from dora.kvtransfer.peer import SECRET_BYTES, Identity, Peer, greet
from dora.kvtransfer.wire import Stream
from dora.orchestrator.main import ServiceHandle
from dora.rpc.access import ACCESS, PACKAGE, certified, may_call
from dora.rpc.bearer import READS
from dora.rpc.channel import open_channel
from dora.rpc.roles import Role
from dora.tls import Tls
from dora.tls.contexts import Contexts
from tests.proofs import credentials
from tests.service import configured, running
from tests.tls_files import another, cluster, shows, tls

SHORT: Final = 240
AT_ONCE: Final = 16
CALL_S: Final = 20.0
REFUSED: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
PAGES: Final = ("/metrics", "/hosts/local/metrics", "/hosts/h9/metrics", "/sd", "/")
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
    routes: tuple[tuple[str, str, str], ...]  # of HTTP: verb, URL, and what it does as a method


@pytest.fixture
async def guarded(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Run]:
    folder, now = cluster(tmp_path / "tls"), datetime.now(UTC)
    stranger = cluster(tmp_path / "stranger")
    before = _listening()
    config = configured(
        tiny_dense,
        workers__engine="fake",
        workers__count=2,
        tls__folder=str(folder / "service"),
        service__metrics="127.0.0.1:0",
    )
    async with running(config) as handle:
        known = {int(address.rpartition(":")[2]) for address in (handle.address, handle.metrics)}
        ports = _listening() - before - known
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
        own = another(folder, "front", tmp_path / "front")
        options = FrontOptions(handle.address, "", "127.0.0.1:0", model=tiny_dense, key=secrets.token_hex(), tls=own)
        async with front(options) as url:
            routes = [(each.verb, url + each.path.format(session="s1"), each.does) for each in ROUTES]
            routes += [("POST", f"{url}{base}{TINKER}asample", TURNS) for base in ("", "/sessions/s1")]
            routes += [("GET", f"https://{handle.metrics}{page}", READS) for page in PAGES]
            yield Run(handle, folder, tuple(shown), tuple(sorted(ports)), tuple(routes))


@pytest.mark.parametrize("count", [SHORT, pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(1500)])])
async def test_no_attempt_gets_in(guarded: Run, count: int) -> None:
    chance, found = random.Random(count), Counter[str]()
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with room:
            shown, method = chance.choice(guarded.shown), chance.choice(sorted(ACCESS))
            token, port, route = chance.choice(TOKENS), chance.choice(guarded.ports), chance.choice(guarded.routes)
            match chance.choices(("gRPC", "HTTP", "KV and weights"), (4, 4, 2))[0]:
                case "gRPC":
                    said = await called(guarded, shown, method, token)
                case "HTTP":
                    said = await requested(guarded, shown, route, token)
                case _:
                    said = await asyncio.to_thread(greeted, port, shown)
            found["refused" if said else "let in"] += 1
            assert said, (number, shown, method, route, token, port)

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
    handle, name, secret = run.handle, f"{PACKAGE}{method}", secret_of(run, method, token)
    async with open_channel(handle.address, credentials=_credentials(shown.tls)) as channel:
        try:
            metadata = await credentials(channel, name, secret) if secret is not None else ()
            call = channel.unary_unary(name)(b"", metadata=metadata, timeout=CALL_S)
            await call
        except grpc.aio.AioRpcError as error:
            code = error.code()
            return code.name if code in REFUSED and (shown.opens or code is grpc.StatusCode.UNAVAILABLE) else ""
    return ""


async def requested(run: Run, shown: Shown, route: tuple[str, str, str], token: str) -> str:
    """Sends an HTTP request that must be refused. Returns how it was; empty: it was not."""
    verb, url, does = route
    is_certified = shown.opens and any(may_call(role, does) for role in certified(shown.roles))
    if is_certified or (token == "owner's" and does == READS):
        token = "wrong"  # the certificate alone would do, or the token; to a front the owner's is none of its keys
    secret = secret_of(run, does, token)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    if shown.tls is None:
        url = url.replace("https://", "http://")
    connector = aiohttp.TCPConnector(ssl=False if shown.tls is None else shows(shown.tls))
    async with aiohttp.ClientSession(connector=connector) as http:
        try:
            async with http.request(verb, url, headers=headers, json={}) as reply:
                return f"{reply.status}" if reply.status in (401, 403) and shown.opens else ""
        except aiohttp.ClientConnectionError as error:
            return "" if shown.opens else str(error)


def secret_of(run: Run, method: str, token: str) -> str | None:
    """The token of an attempt; None: it has none."""
    return {
        "wrong": secrets.token_urlsafe(24),
        "owner's": run.handle.token,
        "another role's": next(run.handle.tokens[role] for role in Role if not may_call(role, method)),
    }.get(token)


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
        return shows(self._own)

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
