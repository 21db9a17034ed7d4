"""A front under TLS: who may do what by certificate and key, and certificates that are replaced while it serves."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from dora.agents.front.app import ROUTES
from dora.agents.front.listening import listening_socket
from dora.agents.front.run import FrontOptions
from dora.agents.front.run import front as served_front
from dora.errors import InvalidValue
from dora.rpc.access import certified, may_call
from dora.rpc.roles import Role, ServiceTokens
from dora.tls import Tls
from dora.tls import http as tls_http
from dora.tls.authority import make_cluster
from dora.tls.http import HttpTls
from tests.refusals import refused
from tests.sweeps import some_of
from tests.tls_files import another, cluster, shows, tls
from tests.unit.front_service import front

CHAT: Final = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def client(own: Tls, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=shows(own)), **options) as http:
        yield http


async def status(own: Tls, url: str, key: str = "", verb: str = "POST", body: Any = None) -> int:
    """The status of one request over a connection of its own; 0: the connection does not come about."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with client(own) as http:
        try:
            async with http.request(verb, url, json=CHAT if body is None else body, headers=headers) as reply:
                await reply.read()
                return reply.status
        except aiohttp.ClientConnectionError:
            return 0


@pytest.mark.parametrize(
    "role", some_of([*Role, "service", "front", "nobody"], Role.SESSION, Role.OPERATOR, "front", "nobody")
)
async def test_a_certificate_may_what_its_role_may_do_in_the_service(role: str, folder: Path, tmp_path: Path) -> None:
    known = role in list(Role) and role != "host"
    own = tls(folder, role) if known else another(folder, role, tmp_path / role)
    async with front(tls=HttpTls(tls(folder, "service"), mutual=True)) as (base, service, _):
        for route in ROUTES:
            may = any(may_call(each, route.does) for each in certified(frozenset({role})))
            found = await status(own, base + route.path.format(session="s1"), verb=route.verb, body={})
            assert (found not in (0, 401, 403)) if may else found == 403, (route.verb, route.path, found)
        if role == "session":
            assert await status(own, f"{base}/v1/chat/completions") == 403, "it would open a session"
            opener = tls(folder, "environment")
            assert await status(opener, f"{base}/sessions/s9/v1/chat/completions") == 200
            assert await status(own, f"{base}/sessions/s9/v1/chat/completions") == 200
            assert len(service.sessions) == 1


async def test_certificate_and_key_must_both_permit_a_request(folder: Path, tmp_path: Path) -> None:
    past = another(folder, "environment", tmp_path / "past", now=datetime.now(UTC) - timedelta(days=2))
    stranger = cluster(tmp_path / "stranger")
    theirs = Tls(tls(folder, "session").ca, *(str(stranger / "session" / f"{part}.pem") for part in ("cert", "key")))
    async with front(key="k", tls=HttpTls(tls(folder, "service"), mutual=True)) as (base, _, _):
        url = f"{base}/v1/chat/completions"
        assert base.startswith("https://")
        assert await status(tls(folder, "environment"), url) == 200
        assert await status(tls(folder, "environment"), url, "k") == 200
        assert await status(tls(folder, "environment"), url, "other") == 401
        assert await status(tls(folder, "trainer"), url, "k") == 403
        for own in (past, theirs, Tls(tls(folder, "session").ca)):
            assert await status(own, url, "k") == 0
        with pytest.raises(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as http, http.post(url.replace("https", "http"), json=CHAT):
                pass


async def test_only_names_of_the_domain_give_roles(folder: Path) -> None:
    elsewhere = HttpTls(replace(tls(folder, "service"), domain="elsewhere"), mutual=True)
    for key, statuses in (("k", (200, 401, 401)), ("", (401, 401, 401))):
        async with front(key=key, tls=elsewhere) as (base, _, _):
            url = f"{base}/v1/chat/completions"
            assert tuple([await status(tls(folder, "environment"), url, each) for each in ("k", "x", "")]) == statuses


async def test_clients_may_need_no_certificate(folder: Path) -> None:
    async with front(key="k", tls=HttpTls(tls(folder, "service"), mutual=False)) as (base, _, _):
        url, plain = f"{base}/v1/chat/completions", Tls(tls(folder, "session").ca)
        assert await status(plain, url, "k") == 200
        assert await status(plain, url, "x") == 401 and await status(plain, url) == 401
        assert await status(tls(folder, "environment"), url) == 200
        assert await status(tls(folder, "trainer"), url, "k") == 403
        async with client(plain) as http, http.post(f"{base}/sessions", json={}, headers={"X-API-Key": "k"}) as reply:
            (opened,) = (await reply.json())["sessions"]
        assert opened["base_url"].startswith("https://")
        assert await status(plain, f"{base}/sessions/{opened['id']}/v1/chat/completions", opened["key"]) == 200


async def test_metrics_are_for_readers_by_certificate_or_token(folder: Path) -> None:
    tokens = ServiceTokens()
    async with front(key="k", tls=HttpTls(tls(folder, "service"), mutual=False), tokens=tokens) as (base, _, _):
        url, plain = f"{base}/metrics", Tls(tls(folder, "session").ca)
        for token, code in (("", 401), ("k", 401), (tokens.of[Role.SESSION], 403), (tokens.of[Role.METRICS], 200)):
            assert await status(plain, url, token, "GET") == code, token
        assert await status(tls(folder, "metrics"), url, verb="GET") == 200
        assert await status(tls(folder, "metrics"), url, tokens.of[Role.SESSION], "GET") == 403
        assert await status(tls(folder, "environment"), url, tokens.of[Role.METRICS], "GET") == 403


async def test_a_certificate_that_ends_ends_its_connections_requests(folder: Path, tmp_path: Path) -> None:
    own = another(folder, "environment", tmp_path / "short", ends_s=3.0)
    async with front(tls=HttpTls(tls(folder, "service"), mutual=True)) as (base, _, _), client(own) as http:
        while True:  # on one connection
            async with http.get(f"{base}/health") as reply:
                said = await reply.text()
            if reply.status != 200:
                break
    assert reply.status == 401 and "certificate" in said and "valid until" in said


async def test_certificates_are_replaced_while_turns_stream(tmp_path: Path) -> None:
    """Every connection and stream goes on. Then the earlier authority is dropped, and its certificates with it."""
    folder, gate = cluster(tmp_path / "tls"), asyncio.Event()
    old = another(folder, "environment", tmp_path / "old")
    async with (
        front(gate=gate, tls=HttpTls(tls(folder, "service"), mutual=True)) as (base, service, _),
        client(old) as http,
    ):
        url = f"{base}/v1/chat/completions"
        async with http.post(url, json={**CHAT, "stream": True}) as reply:
            first = await reply.content.readline()
            roles = [*Role]
            make_cluster(folder, ["127.0.0.1"], roles, days=30, authority_days=365, new_authority=True)
            new = tls(folder, "environment")
            assert await status(old, f"{base}/health", verb="GET") == 0, "it does not know the new authority"
            both = Tls(new.ca, old.cert, old.key)
            assert await status(both, f"{base}/health", verb="GET") == 200
            assert await status(new, f"{base}/health", verb="GET") == 200
            gate.set()
            rest = await reply.read()
        assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
        whole = (tmp_path / "tls/service/ca.pem").read_text()
        newest = whole[: whole.index("-----END CERTIFICATE-----")] + "-----END CERTIFICATE-----\n"
        (tmp_path / "tls/service/ca.pem").write_text(newest)
        assert await status(both, f"{base}/health", verb="GET") == 0
        assert await status(new, f"{base}/health", verb="GET") == 200
        async with http.post(url, json=CHAT) as reply:  # on the first connection
            assert reply.status == 200
    assert len(service.sessions) == 2


async def test_files_that_do_not_belong_together_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cluster(tmp_path / "tls")
    async with front(tls=HttpTls(tls(folder, "service"), mutual=True)) as (base, _, _):
        (folder / "service/key.pem").write_bytes((folder / "trainer/key.pem").read_bytes())
        for _ in range(3):
            assert await status(tls(folder, "session"), f"{base}/health", verb="GET") == 200
    told = [line for line in caplog.messages if "not used yet" in line]
    assert len(told) == 1 and "does not fit" in told[0]


async def test_a_handshake_that_hangs_disturbs_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_http, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(tls_http, "HANDSHAKES_MAX", 4)
    async with front(tls=HttpTls(tls(folder, "service"), mutual=True)) as (base, _, _):
        host, port = base.removeprefix("https://").split(":")
        hanging = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        ended = await asyncio.gather(*(reader.read() for reader, _ in hanging), return_exceptions=True)
        assert len(ended) == 8, "those too many at once, the others after their time"
        assert await status(tls(folder, "session"), f"{base}/health", verb="GET") == 200
        for _, writer in hanging:
            writer.close()


async def test_a_front_refuses_bad_files_and_addresses_in_one_line(folder: Path, tmp_path: Path) -> None:
    service, now = folder / "service", datetime.now(UTC)
    readable = tmp_path / "readable.pem"
    readable.write_bytes((service / "key.pem").read_bytes())
    readable.chmod(0o644)
    paths = [str(service / f"{part}.pem") for part in ("ca", "cert", "key")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        for given, listen, field in (
            (Tls(paths[0], paths[1], str(folder / "trainer/key.pem")), "127.0.0.1:0", "tls.key"),
            (Tls(paths[0], paths[1], str(readable)), "127.0.0.1:0", "tls.key"),
            (Tls(paths[0], paths[1], str(tmp_path / "none")), "127.0.0.1:0", "tls.key"),
            (Tls(paths[0]), "127.0.0.1:0", "tls.cert"),
            (tls(folder, "session"), "127.0.0.1:0", "tls.cert"),  # it is none of a server
            (another(folder, "front", tmp_path / "a", now=now - timedelta(days=2)), "127.0.0.1:0", "tls.cert"),
            (another(folder, "front", tmp_path / "b", now=now + timedelta(days=2)), "127.0.0.1:0", "tls.cert"),
            (tls(folder, "service"), "127.0.0.2:0", "tls.cert"),
            (tls(folder, "service"), busy, "--http"),
        ):
            with refused(InvalidValue, field=field) as found:
                async with served_front(FrontOptions("127.0.0.1:9", "t", listen, tls=given)):
                    pass
            assert "\n" not in str(found.value)


def test_a_front_of_certificates_needs_no_key_to_be_reached(folder: Path) -> None:
    listening_socket("0.0.0.0:0", has_key=True).close()


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with refused(InvalidValue, field="--http", value=address, names=("Address already in use",)):
            listening_socket(address, has_key=False)
    with refused(InvalidValue, field="--key-file"):
        listening_socket("0.0.0.0:0", has_key=False)
