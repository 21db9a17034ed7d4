"""Requests that no client should send: each gets a refusal, none a 500, and nothing is left behind."""

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import psutil
import pytest

from dora.agents.front.gateway import FrontLimits
from tests.unit.chats import TOOLS
from tests.unit.front_service import front

AT_ONCE: Final = 50
CHAT: Final = [{"role": "user", "content": "hi"}]
FIELDS: Final = (
    *("model", "messages", "prompt", "token_ids", "sampling_params", "tools", "tool_choice", "n", "stop", "seed"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stream", "stream_options", "logprobs"),
    *("top_logprobs", "return_token_ids", "input", "instructions", "system", "group", "size", "tags", "sampling"),
    *("task", "reward", "components", "log", "turn", "request_ids", "request_id", "logit_bias", "response_format"),
    *("chat_template_kwargs", "stop_token_ids", "min_tokens", "thinking", "reasoning", "reasoning_effort", "text"),
    *("metadata", "user", "output_mode", "verifier", "stop_sequences", "session_id", "ignore_eos", "echo", "store"),
    *("num_samples", "seq_id", "sampling_session_id", "model_path", "base_model", "prompt_logprobs"),
    "sampling_session_seq_id",
)
VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 1e308, -0.5, 0.7, "", "x", "policy", "policy-v6", "policy-v9"),
    *("policy-v", "policy-v99999999999999999999", "auto", "none", "é\0\ud7ff", [], {}, [1, 2], [[1], [2]], ["a"]),
    *([None], {"a": 1}, CHAT, TOOLS, [{"role": "user"}], [{"role": 5, "content": "x"}], [{"type": "function"}]),
    *([{"role": "user", "content": [{"type": "image"}]}], {"logprobs": 1, "max_tokens": 2}, {"type": "enabled"}),
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *CHAT],
    [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}],
    [{"type": "function_call_output", "call_id": "c", "output": "1"}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text"}]}]}],
    *({"include_usage": True}, {"effort": "high"}, {"format": {"type": "json_schema"}}, [1.5], [-1], ["a"] * 40, 5),
)
SAMPLER: Final = f"tinker-{'0' * 32}.0.policy"
ASAMPLE: Final = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_session_id": SAMPLER, "seq_id": 0}
ROUTES: Final[Mapping[str, dict[str, Any]]] = {  # with a body that each accepts
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/inference/v1/generate": {"token_ids": [5, 6]},
    "/inference/v1/abort_requests": {"request_ids": ["x"]},
    "/sessions": {},
    "/sessions/s1/v1/chat/completions": {"messages": CHAT},
    "/sessions/s1/reward": {"reward": 1},
    "/sessions/s1/close": {},
    "/sessions/s1": {},
    f"/sessions/{'z' * 300}/v1/completions": {"prompt": "hi"},
    "/sessions/s%00x/v1/completions": {"prompt": "hi"},
    "/api/v1/create_sampling_session": {"session_id": SAMPLER.partition(".")[0], "sampling_session_seq_id": 0},
    "/api/v1/asample": {"prompt": ASAMPLE["prompt"]},
    "/sessions/s2/api/v1/asample": ASAMPLE,
    "/api/v1/retrieve_future": {"request_id": f"{SAMPLER}.0"},
    "/sessions/s2/api/v1/retrieve_future": {"request_id": f"{SAMPLER}.0"},
    "/api/v1/cancel_future": {"request_id": f"{SAMPLER}.0"},
    "/api/v1/samplers/x": {},
    "/api/v1/telemetry": {},
    "/api/v1/forward": {},
    "/v1/models": {},
    "/health": {},
    "/nothing": {},
}
BROKEN: Final = (b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"n":' + b"9" * 5000 + b"}", b'{"n": NaN}')
HEADERS: Final = (
    *({"X-Session-ID": value} for value in ("s1", "s2", "a b", "x" * 200)),
    *({"Content-Encoding": value} for value in ("gzip", "deflate", "br", "x")),
    *({"Authorization": value} for value in ("Bearer", "Bearer x", "Basic zz")),
    *({"Idempotency-Key": "k"}, {"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "x"}),
)


def body_of(chance: random.Random, accepted: Mapping[str, Any]) -> bytes:
    body = dict(accepted)
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        body[chance.choice(FIELDS)] = chance.choice(VALUES)
    text = json.dumps(body).encode()
    match chance.randrange(12):
        case 0:
            return text[: chance.randint(0, len(text))]
        case 1:
            return chance.choice((*BROKEN, chance.randbytes(50)))
    return text


async def storm(requests: int, seed: int) -> list[int]:
    """Returns the memory of this process, which has the front and its clients, after each tenth of the requests."""
    chance, memory_bytes = random.Random(seed), []
    async with front(limits=FrontLimits(sessions=200)) as (base, _, gateway), aiohttp.ClientSession() as http:

        async def one() -> int:
            route = chance.choice(list(ROUTES))
            method = chance.choice((*["POST"] * 9, "GET", "PUT"))
            headers = chance.choice(HEADERS) if chance.random() < 0.3 else {}
            body = body_of(chance, ROUTES[route])
            async with http.request(method, base + route, data=body, headers=headers) as reply:
                text = await reply.read()
                assert reply.status < 500 and b"api_error" not in text, (method, route, body[:300], headers, text[:300])
                return reply.status

        statuses: set[int] = set()
        rounds = requests // AT_ONCE
        for number in range(1, rounds + 1):
            statuses |= set(await asyncio.gather(*(one() for _ in range(AT_ONCE))))
            if number % (rounds // 10) == 0:
                memory_bytes.append(psutil.Process().memory_info().rss)
        assert {200, 400, 404, 405, 409} <= statuses
        assert not gateway._in_flight
    return memory_bytes


async def test_no_request_is_a_failure_of_the_front() -> None:
    await storm(2000, seed=0)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_no_request_of_many_is_a_failure_of_the_front() -> None:
    memory_bytes = await storm(100_000, seed=1)
    assert memory_bytes[-1] < 1.1 * memory_bytes[4], memory_bytes


async def test_half_a_request_disturbs_nobody() -> None:
    """A body that does not come in time is refused; a client that leaves within one is forgotten."""
    async with front(limits=FrontLimits(body_s=0.2)) as (base, _, gateway):
        host, port = base.removeprefix("http://").split(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{".encode()
        slow, leaving = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for _, writer in (slow, leaving):
            writer.write(head)
        leaving[1].close()
        assert (await slow[0].readline()).startswith(b"HTTP/1.1 400")
        slow[1].close()
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{base}/v1/chat/completions", json={"messages": CHAT}) as reply,
        ):
            assert reply.status == 200
        assert not gateway._in_flight
