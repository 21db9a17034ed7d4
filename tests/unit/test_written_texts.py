"""Whatever the policy writes is a reply that clients of each protocol read, whole and streamed (generated, seed 7)."""

import json
import random
from typing import Any, Final

import aiohttp
import pytest

from tests.sweeps import tenth_of
from tests.unit.chats import TOOLS
from tests.unit.front_service import front

SEED: Final = 7
ESCAPES: Final = (
    *(r"\ud83d", r"\ude00", r"\ud83d\ude00", r"\ude00\ud83d", r"\ud83d\ud83d", r"\u0000", r"\u2028", r"\uffff"),
    *(r"\"", r"\\", r"\/", r"\b\f\n\r\t", r"\u00e9", r"\x41", r"\u12", "\x7f\x85\u2028\u2029", "é日本😀", "\\"),
)
NUMBERS: Final = (
    *("0", "-0", "-0.0", "1e999", "-1e999", "1E-999", "NaN", "Infinity", "-Infinity", "01", "1.", ".5", "+1", "0x1F"),
    *("9" * 300, "9" * 400, "9" * 4400, "1" + "0" * 400 + ".5", "1e308", "123456789012345678901234567890", "true"),
)
DEPTHS: Final = (1, 47, 48, 49, 65, 1100)
KEYS: Final = ('""', '"a": 1, "a"', r'"\ud83d"', '"__proto__"', '"é"', '"' + "k" * 300 + '"', "1", "null", r'"\u0000"')


def written(chance: random.Random) -> list[str]:
    """Texts with each escape, number form, depth and key, in each place of a call, and a few mixtures."""
    values = [f'"{each}"' for each in ESCAPES] + list(NUMBERS)
    values += ["[" * depth + "1" + "]" * depth for depth in DEPTHS]
    values += ['{"a": ' * depth + "1" + "}" * depth for depth in DEPTHS]
    arguments = [f'{{"x": {value}}}' for value in values] + [f"{{{key}: 1}}" for key in KEYS]
    arguments += [json.dumps(each) for each in arguments[:20]]  # as a text within the call
    calls = [f'{{"name": "look_up", "arguments": {each}}}' for each in arguments]
    calls += [f'{{"name": "{each}", "arguments": {{}}}}' for each in ESCAPES]
    xml = [f"<function=look_up>\n<parameter=x>\n{each}\n</parameter>\n</function>" for each in values]
    texts = [f"<tool_call>\n{each}\n</tool_call>" for each in calls + xml] + values
    texts += ["".join(chance.sample(texts, 3)) + chance.choice(ESCAPES) for _ in range(20)]
    return [*texts, *(f"<think>{each}</think>{each}" for each in chance.sample(texts, 20))]


ANTHROPIC: Final = [{"name": "look_up", "input_schema": {"type": "object", "properties": {}}}]
ASKED: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS},
    "/v1/responses": {"input": "?", "tools": [{"type": "function", "name": "look_up", "parameters": {}}]},
    "/v1/completions": {"prompt": "?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "?"}], "max_tokens": 20_000, "tools": ANTHROPIC},
}


def read(said: bytes) -> Any:
    """Reads a reply as strict clients do."""
    value = json.loads(said.decode(), parse_constant=lambda name: pytest.fail(name))
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


@pytest.mark.parametrize("part", tenth_of(range(10)))
async def test_whatever_is_written_is_a_reply(part: int) -> None:
    written_now = [""]
    texts = written(random.Random(SEED))[part::10]
    seen = set[str]()
    async with (
        front("qwen3", policy=lambda _: written_now[0], context=1 << 20) as (base, _, _),
        aiohttp.ClientSession() as http,
    ):
        for text in texts:
            written_now[0] = text
            for route, asked in ASKED.items():
                body = {"max_tokens": 20_000, **asked}
                if route == "/v1/responses":
                    body["max_output_tokens"] = body.pop("max_tokens")
                async with http.post(f"{base}{route}", json=body) as reply:
                    assert reply.status == 200, (route, text[:100], await reply.text())
                    whole = read(await reply.read())
                async with http.post(f"{base}{route}", json={**body, "stream": True}) as reply:
                    stream = (await reply.read()).decode()
                assert "api_error" not in stream and stream.endswith("\n\n"), (route, text[:100])
                events = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
                if events[-1] == "[DONE]":
                    events.pop()
                assert len(stream.split("\n\n")) - 1 == stream.count("data: "), "no event has another line"
                for each in events:
                    read(each.encode())
                if route == "/v1/chat/completions":
                    seen.add(whole["choices"][0]["finish_reason"])
    assert seen >= {"stop", "tool_calls"}, "the texts have calls, and texts that are none"


async def test_a_call_can_be_sent_back() -> None:
    """What a client of Anthropic was told as an object, a request may hold."""
    texts = iter(
        f'<tool_call>{{"name": "look_up", "arguments": {{"x": {"[" * n + "]" * n}}}}}</tool_call>' for n in DEPTHS
    )
    async with (
        front("qwen3", policy=lambda _: next(texts), context=1 << 20) as (base, _, _),
        aiohttp.ClientSession() as http,
    ):
        for number, _ in enumerate(DEPTHS):
            url, asked = f"{base}/sessions/s{number}/v1/messages", dict(ASKED["/v1/messages"])
            async with http.post(url, json=asked) as reply:
                content = (await reply.json())["content"]
            said = [{"role": "assistant", "content": content}, {"role": "user", "content": "More."}]
            async with http.post(
                f"{url}/count_tokens", json={**asked, "messages": [*asked["messages"], *said]}
            ) as reply:
                assert reply.status == 200, await reply.text()


async def test_a_reply_that_failed_is_not_kept_for_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    from dora.agents.front.protocols import chat

    async with front() as (base, service, _), aiohttp.ClientSession(headers={"Idempotency-Key": "k"}) as http:
        with monkeypatch.context() as broken:
            broken.setattr(chat, "head", lambda *_: {"broken": object()})
            async with http.post(
                f"{base}/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}]}
            ) as reply:
                assert reply.status == 500
        async with http.post(
            f"{base}/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}]}
        ) as reply:
            assert reply.status == 200
    assert len(service.sessions) == 2
