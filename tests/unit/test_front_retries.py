"""Repeated requests, and clients that leave: a turn is one request's, and nothing waits for a client that has gone."""

import asyncio
from contextlib import suppress
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from tests.unit.front_service import front

ASK: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "How many?"}]}
RETRY: Final = {"x-stainless-retry-count": "1"}


async def leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  nobody tells when
            await asyncio.sleep(0)


def counting() -> Any:
    numbers = iter(range(1000))
    return lambda _: f"Sample {next(numbers)}."


class Agent:
    """A client of its own, with connections of its own."""

    def __init__(self, base: str) -> None:
        self.base = base

    async def ask(self, path: str = "/v1", **headers: str) -> str:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.base}{path}/chat/completions", json=ASK, headers=headers) as reply,
        ):
            body = await reply.json()
            assert reply.status == 200, body
            return str(body["choices"][0]["message"]["content"])


async def test_a_retry_without_a_session_gets_no_siblings_sample() -> None:
    async with front(policy=counting()) as (base, service, gateway):
        agent = Agent(base)
        seen = [await agent.ask() for _ in range(3)] + [await agent.ask(**RETRY) for _ in range(3)]
        assert len({*seen}) == len(service.sessions) == 6
        service.gate = asyncio.Event()
        lost = [asyncio.create_task(agent.ask()) for _ in range(2)]
        await until(lambda: len(service.sessions) == 8)
        for each in lost:
            await leave(each)
        await until(lambda: not gateway._in_flight)
        service.gate.set()
        again = await asyncio.gather(*(agent.ask(**RETRY) for _ in range(2)))
        assert {*again} == {"Sample 6.", "Sample 7."} and len(service.sessions) == 8
        assert await agent.ask(**RETRY) == "Sample 8."


@pytest.mark.parametrize("path", ["/v1", "/sessions/s/v1"])
async def test_a_broken_connection_leaves_its_turn_to_the_same_request(path: str) -> None:
    """Also in mid-turn: the next one reads the turn that is under way."""
    async with front(policy=counting(), gate=asyncio.Event()) as (base, service, gateway):
        agent = Agent(base)
        first = asyncio.create_task(agent.ask(path))
        await until(lambda: service.sessions and service.sessions[0].is_busy)
        await leave(first)
        await until(lambda: not gateway._in_flight)
        second = asyncio.create_task(agent.ask(path))
        await asyncio.sleep(0)
        service.gate.set()
        assert await second == "Sample 0."
        assert len(service.sessions) == 1 and service.sessions[0].turn == 1


async def test_requests_with_one_key_are_one_request() -> None:
    async with front(policy=counting(), gate=asyncio.Event()) as (base, service, _):
        agent = Agent(base)
        both = [asyncio.create_task(agent.ask(**{"Idempotency-Key": "k"})) for _ in range(2)]
        await until(lambda: service.sessions)
        service.gate.set()
        assert await asyncio.gather(*both) == ["Sample 0.", "Sample 0."] and len(service.sessions) == 1
        other = {"messages": [{"role": "user", "content": "Another?"}]}
        async with (
            aiohttp.ClientSession(headers={"Idempotency-Key": "k"}) as http,
            http.post(f"{base}/v1/chat/completions", json=other) as reply,
        ):
            assert reply.status == 409 and (await reply.json())["error"]["param"] == "Idempotency-Key"
    assert len(service.sessions) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/sessions/s/v1/chat/completions", "/sessions"])
async def test_a_client_that_leaves_while_the_window_is_full_leaves_nothing(path: str) -> None:
    async with front(window=asyncio.Event()) as (base, service, gateway), aiohttp.ClientSession() as http:
        body: dict[str, Any] = {"group": "g"} if path == "/sessions" else ASK
        waiting = [asyncio.create_task(http.post(base + path, json=body)) for _ in range(2)]
        openings = 2 if path == "/v1/chat/completions" else 1
        await until(lambda: gateway._in_flight.total() == 2 and len(service.waiting) == openings)
        await leave(waiting[0])
        await until(lambda: gateway._in_flight.total() == 1)
        if path != "/v1/chat/completions":
            assert not service.taken_back, "the other one waits for it"
        await leave(waiting[1])
        await until(lambda: len(service.taken_back) == openings)
        assert not service.openings
        service.window.set()
        async with http.post(base + path, json=body) as reply:
            assert reply.status == 200
        assert len(service.sessions) == 1


async def test_a_call_that_comes_while_an_opening_is_taken_back_opens_anew() -> None:
    async with front(window=asyncio.Event()) as (base, service, gateway), aiohttp.ClientSession() as http:
        url = f"{base}/sessions/s/v1/chat/completions"
        first = asyncio.create_task(http.post(url, json=ASK))
        await until(lambda: service.waiting)
        await leave(first)
        await until(lambda: not gateway._in_flight)
        service.window.set()
        async with http.post(url, json=ASK) as reply:
            assert reply.status == 200
        assert [each.turn for each in service.sessions] == [1]


async def test_a_request_is_aborted_by_its_own_caller_alone() -> None:
    gate = asyncio.Event()
    async with front(gate=gate) as (base, service, _), aiohttp.ClientSession() as http:
        async with http.post(f"{base}/sessions", json={"group": "g", "size": 2}) as reply:
            one, two = (await reply.json())["sessions"]

        async def abort(**headers: str) -> None:
            body = {"request_ids": ["r"]}
            async with http.post(f"{base}/inference/v1/abort_requests", json=body, headers=headers) as reply:
                assert reply.status == 200

        own, other = ({"Authorization": f"Bearer {each['key']}"} for each in (one, two))
        asked = {"token_ids": [300], "request_id": "r", "stream": True}
        async with http.post(f"{base}/inference/v1/generate", json=asked, headers=own) as reply:
            await reply.content.readline()
            for headers in (other, {}, {"X-Session-ID": two["id"]}):
                await abort(**headers)
            assert service.sessions[0].is_busy
            await abort(**own)
            assert '"finish_reason":"abort"' in (await reply.read()).decode()
        gate.set()


async def test_clients_that_leave_streams_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with front(gate=asyncio.Event()) as (base, service, gateway):
        for _ in range(5):
            async with aiohttp.ClientSession() as http:
                reply = await http.post(f"{base}/v1/chat/completions", json={**ASK, "stream": True})
                await reply.content.readline()
                reply.close()
        await until(lambda: not gateway._in_flight)
        service.gate.set()
    assert not [each for each in caplog.records if each.exc_info or "never retrieved" in each.getMessage()]


async def test_a_reply_to_a_closed_connection_is_no_fault_of_the_fronts(caplog: pytest.LogCaptureFixture) -> None:
    """The front notices only as it writes. Its own faults are in the log."""

    async def left(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.close()
        await response.write(b"more")
        return response

    async def broken(request: web.Request) -> web.StreamResponse:
        raise RuntimeError("a bug")

    def mount(app: web.Application) -> None:
        app.router.add_get("/left", left)
        app.router.add_get("/broken", broken)

    async with front(mount=mount) as (base, _, _), aiohttp.ClientSession() as http:
        with suppress(aiohttp.ClientError):
            async with http.get(f"{base}/left") as reply:
                await reply.read()
        assert not [each for each in caplog.records if each.exc_info]
        async with http.get(f"{base}/broken") as reply:
            assert reply.status == 500
    assert [str(each.exc_info) for each in caplog.records if each.exc_info]
