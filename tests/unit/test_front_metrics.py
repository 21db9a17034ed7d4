"""A front's page for Prometheus: its figures are those of the requests, and its labels are bounded."""

import asyncio
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from dora.agents.front.figures import DISTRIBUTIONS, FRONT
from tests.unit.front_service import front

ASK: Final = [{"role": "user", "content": "How many?"}]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scraped(http: aiohttp.ClientSession, base: str, **headers: str) -> Samples:
    async with http.get(f"{base}/metrics", headers=headers) as reply:
        text = await reply.text()
        assert reply.status == 200 and reply.headers["Content-Type"].startswith("text/plain; version=0.0.4"), text
    families = text_string_to_metric_families(text)
    return {(each.name, tuple(sorted(each.labels.items()))): each.value for found in families for each in found.samples}


def total(found: Samples, name: str, **labels: str) -> float:
    return sum(value for (each, at), value in found.items() if each == name and labels.items() <= dict(at).items())


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> bytes:
    async with http.post(url, json=body) as reply:
        return await reply.read()


async def test_the_page_counts_what_agents_ask() -> None:
    gate = asyncio.Event()
    async with front(gate=gate) as (base, _, _), aiohttp.ClientSession() as http:
        chats = f"{base}/sessions/s/v1/chat/completions"
        async with http.post(chats, json={"messages": ASK, "stream": True}) as reply:
            await reply.content.readline()
            found = await scraped(http, base)
            assert total(found, "dora_front_streams_open") == total(found, "dora_front_requests_open") == 1
            assert total(found, "dora_front_first_token_seconds_count") == 1
            gate.set()
            sent = await reply.read()
        await post(http, chats, {"messages": [{"role": "user", "content": "Another history"}]})
        await post(http, chats, {"messages": "none"})
        await post(http, f"{base}/v1/chat/completions", {"messages": ASK, "model": "gpt-5"})
        for number in range(50):
            await post(http, f"{base}/nothing/{number}", {})
        found = await scraped(http, base)
    route = "/sessions/{session}/v1/chat/completions"
    assert total(found, "dora_front_requests_total", route=route, status="200") == 2
    assert total(found, "dora_front_requests_total", route=route, status="400") == 1
    assert total(found, "dora_front_requests_total", route="other", status="404") == 50
    assert total(found, "dora_front_requests_total", route="/metrics") == 1
    assert total(found, "dora_front_refused_total", type="not_found_error") == 1
    assert total(found, "dora_front_refused_total", type="invalid_request_error") == 1
    assert total(found, "dora_front_prefix_breaks_total") == 0 and total(found, "dora_front_sessions_open") == 1
    assert total(found, "dora_front_first_token_seconds_count") == 2
    assert total(found, "dora_front_sent_bytes_total") > len(sent) > 200
    assert total(found, "dora_front_received_bytes_total") > 100
    assert not total(found, "dora_front_streams_open") and not total(found, "dora_front_requests_open")
    assert total(found, "process_resident_memory_bytes") > 0
    names = {name for name, _ in found}
    assert {each.name for each in FRONT} <= names and {f"{each.name}_count" for each in DISTRIBUTIONS} <= names
    assert len([1 for name, _ in found if name == "dora_front_requests_total"]) == 5


async def test_a_client_that_leaves_is_counted_as_one() -> None:
    async with front(gate=asyncio.Event()) as (base, _, _), aiohttp.ClientSession() as http:
        async with http.post(f"{base}/sessions/s/v1/chat/completions", json={"messages": ASK, "stream": True}) as reply:
            await reply.content.readline()
        while not total(await scraped(http, base), "dora_front_requests_total", status="499"):
            pass  # until the front has noticed it


async def test_the_page_is_for_those_who_have_the_key() -> None:
    async with front(key="k") as (base, _, _), aiohttp.ClientSession() as http:
        for key, status in (("", 401), ("x", 401), ("k", 200)):
            async with http.get(f"{base}/metrics", headers={"Authorization": f"Bearer {key}"}) as reply:
                assert reply.status == status
