"""Sessions at any front, by their ids and keys; what a session's own key may do."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from dora.agents.chat.rendering import ChatRenderer
from dora.agents.chat.tool_calls import format_of
from dora.agents.front.gateway import FrontLimits
from dora.agents.front.keys import key_of, opened_id, service_id_of, session_of
from dora.agents.front.model import ServedModel
from tests.unit.chat_templates import STYLES
from tests.unit.chats import Chat
from tests.unit.front_service import FakeService, front, fronts

ASK: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "How many?"}]}
CHAT: Final = "v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_an_opened_session_is_the_same_at_every_front() -> None:
    """By id and by key, with the sampling of its opening; it is rewarded and closed at yet another."""
    service = FakeService(Chat(STYLES["qwen2.5"]))
    async with fronts(service, 3) as (urls, doors), aiohttp.ClientSession() as http:
        asked = {"group": "g", "size": 2, "sampling": {"temperature": 0.5}}
        async with http.post(f"{urls[0]}/sessions", json=asked) as reply:
            opened = (await reply.json())["sessions"]
        async with http.post(f"{urls[0]}/sessions/{opened[0]['id']}/{CHAT}", json=ASK) as reply:
            answer = (await reply.json())["choices"][0]["message"]
        more = {"messages": [*ASK["messages"], answer, {"role": "user", "content": "So?"}]}
        async with http.post(f"{urls[1]}/sessions/{opened[0]['id']}/{CHAT}", json=more) as reply:
            assert reply.status == 200, await reply.text()
        async with http.post(f"{urls[1]}/{CHAT}", json=ASK, headers=bearer(opened[1]["key"])) as reply:
            assert reply.status == 200, await reply.text()
        async with http.post(f"{urls[1]}/sessions", json=asked) as reply:
            again = (await reply.json())["sessions"]
        assert [(each["id"], each["key"]) for each in again] == [(each["id"], each["key"]) for each in opened]
        assert not doors[1].prefix_breaks
        for each in opened:
            async with http.post(f"{urls[2]}/sessions/{each['id']}/close", json={"reward": 1}) as reply:
                assert reply.status == 200, await reply.text()
        async with http.post(f"{urls[1]}/{CHAT}", json=ASK, headers=bearer(opened[0]["key"])) as reply:
            assert reply.status == 409
    assert [session.turn for session in service.sessions] == [2, 1] and len(service.openings) == 1
    assert [session.ended and session.ended[0] for session in service.sessions] == [1.0, 1.0]
    assert all(asked["temperature"] == 0.5 for session in service.sessions for asked in session.asked)


@pytest.mark.parametrize("key", ["", "front"])
async def test_an_unknown_id_or_key_opens_nothing(key: str) -> None:
    async with front(key=key) as (base, service, _), aiohttp.ClientSession(headers=bearer(key or "any")) as http:
        async with http.post(f"{base}/sessions", json={"group": "g"}) as reply:
            ((opened,),) = [(await reply.json())["sessions"]]
        capability, before = service.sessions[0].capability, len(service.openings)
        for name in ("g9.0", "g0.0", f"{opened['id']}x", opened["id"][:-1], "g0.0~1-", opened["key"], "dora-x"):
            async with http.post(f"{base}/sessions/{name}/{CHAT}", json=ASK) as reply:
                assert reply.status == 404, name
        wrong = ["dora-", "dora-x", "dora-\xe9", opened["key"][:-1], key_of("g0.0", capability), key_of("s", b"other")]
        for each in wrong:
            async with http.post(f"{base}/{CHAT}", json=ASK, headers=bearer(each)) as reply:
                assert reply.status in (400, 401), each
        assert len(service.openings) == before and not any(each.asked for each in service.sessions)


async def test_a_sessions_own_key_is_for_that_session_alone() -> None:
    async with front() as (base, service, _), aiohttp.ClientSession() as http:
        async with http.post(f"{base}/sessions", json={"group": "g", "size": 2}) as reply:
            one, two = (await reply.json())["sessions"]
        own, before = bearer(one["key"]), len(service.openings)
        for verb, path, status in (
            ("POST", "/sessions", 403),
            ("POST", f"/sessions/{two['id']}/reward", 401),
            ("POST", f"/sessions/{two['id']}/close", 401),
            ("GET", f"/sessions/{two['id']}", 401),
            ("POST", f"/sessions/{two['id']}/{CHAT}", 401),
            ("POST", f"/sessions/mine/{CHAT}", 401),
            ("POST", f"/{CHAT}", 200),
            ("GET", f"/sessions/{one['id']}", 200),
            ("POST", f"/sessions/{one['id']}/close", 200),
        ):
            body = ASK if path.endswith("completions") else {"group": "g", "size": 2} if path == "/sessions" else {}
            if path.endswith("reward"):
                body = {"reward": 1}
            async with http.request(verb, base + path, json=body, headers=own) as reply:
                said = await reply.text()
                assert reply.status == status, (path, said)
                assert two["key"] not in said
        assert len(service.openings) == before and service.sessions[1].ended is None


def test_ids_and_keys_follow_from_the_session_and_its_capability() -> None:
    first, other = b"a" * 32, b"b" * 32
    assert service_id_of(opened_id("g7.2~1", first)) == "g7.2~1" and opened_id("g7.2", first) != opened_id(
        "g7.2", other
    )
    for name in ("s", "task 17", "日本", "x" * 256):
        assert session_of(key_of(name, first)) == name and not service_id_of(name)
        assert key_of(name, first) != key_of(name, other)
    assert session_of("dora-!!!") == session_of("any") == ""


async def test_requests_of_other_sites_change_nothing() -> None:
    """Each route that changes something, by each sign of a page of another site."""
    evil = ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"})
    evil += ({"Sec-Fetch-Site": "same-site"}, {"Host": "evil.example:8000"})  # type: ignore[assignment]
    evil += tuple({"Content-Type": kind} for kind in ("text/plain", "multipart/form-data", FORM))  # type: ignore[assignment]
    async with front() as (base, service, _), aiohttp.ClientSession() as http:
        async with http.post(f"{base}/sessions", json={"group": "g"}) as reply:
            ((opened,),) = [(await reply.json())["sessions"]]
        own = f"/sessions/{opened['id']}"
        for path in ("/sessions", f"{own}/reward", f"{own}/close", f"/{CHAT}", f"{own}/{CHAT}", "/api/v1/asample"):
            for headers in evil:
                data = json.dumps(ASK).encode()
                said = {"Content-Type": "application/json", **headers}
                async with http.post(base + path, data=data, headers=said) as reply:
                    assert reply.status in (400, 403), (path, headers)
        async with http.get(f"{base}{own}", headers={"Host": "evil.example"}) as reply:
            assert reply.status == 403 and opened["key"] not in await reply.text()
        assert len(service.openings) == 1 and not service.sessions[0].asked
        for headers in (
            {"Origin": base},
            {"Sec-Fetch-Site": "same-origin", "Origin": "http://behind.a.proxy"},
            {"Host": "x.localhost"},
        ):
            async with http.post(f"{base}/{CHAT}", json=ASK, headers=headers) as reply:
                assert reply.status == 200, headers
    async with (
        front(key="k") as (base, _, _),
        aiohttp.ClientSession(headers=bearer("k")) as http,
        http.post(f"{base}/{CHAT}", json=ASK, headers={"Host": "front.example"}) as reply,
    ):
        assert reply.status == 200, "the key proves the client"


FORM: Final = "application/x-www-form-urlencoded"


async def test_malformed_requests_are_refused_without_a_word_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: %d\r\n" % len(body)
    names = (
        b"Authorization: Bearer ",
        b"X-API-Key: ",
        b"X-Session-ID: ",
        b"Idempotency-Key: ",
        b"Origin: http://",
        b"Host: ",
    )
    malformed = [
        head + name + b"\xff\xfe\r\n\r\n" + body for name in (*names, b"Content-Type: ", b"Cookie: ", b"X-Any: ")
    ]
    malformed += [
        b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    ]
    malformed += [head + b"Transfer-Encoding: chunked\r\n\r\n", b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n"]
    async with front() as (base, service, _):
        host, port = base.removeprefix("http://").split(":")
        for each in malformed:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(each)
            async with asyncio.timeout(20):
                said = await reader.read()
            assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), (each[:60], said[:200])
            writer.close()
    assert not service.sessions and not [each for each in caplog.records if each.exc_info or each.levelname == "ERROR"]


async def test_connections_that_ask_nothing_make_room() -> None:
    """Idle ones of strangers, and then a client's, which keeps its place as it has asked something."""
    async with front(key="k", limits=FrontLimits(connections=8)) as (base, _, _):
        host, port = base.removeprefix("http://").split(":")
        async with aiohttp.ClientSession(headers=bearer("k")) as http:
            async with http.get(f"{base}/health") as reply:
                assert reply.status == 200
            for _ in range(3):
                idle = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
                async with http.get(f"{base}/health") as reply:
                    assert reply.status == 200
                async with aiohttp.ClientSession(headers=bearer("k")) as other, other.get(f"{base}/health") as reply:
                    assert reply.status == 200
            ended = [asyncio.create_task(reader.read()) for reader, _ in idle]
            done, pending = await asyncio.wait(ended, timeout=0.5)
            assert len(done) >= 12 and len(http.connector._conns) == 1  # type: ignore[union-attr]
            for each in pending:
                each.cancel()
            for _, writer in idle:
                writer.close()


async def test_places_are_for_those_who_have_proved_themselves() -> None:
    async with (
        front(limits=FrontLimits(connections=2)) as (base, _, _),
        aiohttp.ClientSession() as one,
        aiohttp.ClientSession() as two,
        aiohttp.ClientSession() as three,
    ):
        for http, status in ((one, 200), (two, 200), (three, 503), (one, 200), (two, 200)):
            async with http.get(f"{base}/health") as reply:
                assert reply.status == status


def test_a_tokenizer_is_read_from_the_folder_that_tinkers_client_is_told(tmp_path: Path) -> None:
    """Its client takes the first two of three parts of a name."""
    chat = Chat(STYLES["qwen2.5"])
    for folder in (Path("/models"), Path("/models/mine"), tmp_path):
        about: Any = (chat, frozenset(chat.ends()), format_of(""), ChatRenderer(chat, chat.ends()), folder)
        name = ServedModel(*about).reference
        assert name.count("/") != 2 and Path(name).resolve() == folder.resolve()
