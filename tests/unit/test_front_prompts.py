"""What a request asks is in its prompt, or refused by name; long texts cost a front no more than a context does."""

import asyncio
import json
from typing import Any, Final

import aiohttp
import pytest

from dora.agents.chat.reply import ReplyParser
from dora.agents.chat.text import TextStream
from dora.agents.front.source import Sampled
from dora.agents.front.turns import Texts
from dora.data.stops import first_stop
from tests.unit.chat_templates import STYLES
from tests.unit.front_service import CONTEXT, front

ASK: Final = [{"role": "user", "content": "How many?"}]
IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


@pytest.mark.parametrize("style", STYLES)
async def test_an_image_is_refused_by_name_whatever_the_template_does(style: str) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]
    async with front(style) as (base, service, _), aiohttp.ClientSession() as http:
        for route, body in (
            ("chat/completions", {"messages": chat}),
            (
                "messages",
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 5},
            ),
            ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ):
            async with http.post(f"{base}/v1/{route}", json=body) as reply:
                assert reply.status == 400 and "content" in (await reply.json())["error"]["message"], route
    assert not service.openings


@pytest.mark.parametrize("style", STYLES)
async def test_tools_and_messages_that_a_template_leaves_out_are_refused(style: str) -> None:
    """A developer's message is shown or refused, and so are tools, in a first call and in a later one."""
    marked: Any = {
        "type": "function",
        "function": {"name": "look7up", "description": "x", "parameters": {"type": "object"}},
    }
    async with front(style) as (base, service, _), aiohttp.ClientSession() as http:

        async def ask(session: str, messages: list[Any], **more: Any) -> tuple[int, Any]:
            url = f"{base}/sessions/{session}/v1/chat/completions"
            body = {"messages": messages, "return_token_ids": True, **more}
            async with http.post(url, json=body) as reply:
                return reply.status, await reply.json()

        for name, more, mark, param in (
            ("tools", {"tools": [marked]}, "look7up", "tools"),
            ("developer", {}, "be7brief", "messages"),
        ):
            said = ASK if name == "tools" else [*ASK, {"role": "developer", "content": "be7brief"}]
            status, found = await ask(name, said, **more)
            if status == 200:
                assert mark in service.chat.decode(found["prompt_token_ids"], special_tokens=True), (style, name)
            else:
                assert status == 400 and found["error"]["param"].startswith(param), found
        status, found = await ask("later", ASK)
        history = [*ASK, found["choices"][0]["message"]]
        status, found = await ask("later", [*history, {"role": "developer", "content": "be7brief"}, *ASK])
        text = service.chat.decode(found.get("prompt_token_ids", ()), special_tokens=True)
        assert status == 400 or "be7brief" in text, (style, found)


async def test_a_templates_functions_are_no_options() -> None:
    async with front() as (base, _, _), aiohttp.ClientSession() as http:
        for name in ("raise_exception", "strftime_now", "range", "namespace", "messages", "tools", "documents"):
            body = {"messages": ASK, "chat_template_kwargs": {name: "x"}}
            async with http.post(f"{base}/v1/chat/completions", json=body) as reply:
                assert reply.status == 400 and name in (await reply.json())["error"]["param"]


@pytest.mark.parametrize("session", ["", "/sessions/s"])
async def test_a_text_beyond_the_context_is_refused_at_once_and_disturbs_nobody(session: str) -> None:
    """30 MB, with 128 choices, on each route; meanwhile others are answered. The code is that of a full context."""
    async with front() as (base, service, gateway), aiohttp.ClientSession() as http:
        longest = gateway.model.tokenizer.longest_token
        for size in (15_000_000, CONTEXT * longest - 200, 3 * CONTEXT * 4):
            chat = [{"role": "user", "content": "a b " * (size // 4)}]
            for route, body in (
                ("chat/completions", {"messages": chat, "n": 128}),
                ("responses", {"input": chat[0]["content"]}),
                ("messages", {"messages": chat, "max_tokens": 5}),
                ("messages/count_tokens", {"messages": chat, "max_tokens": 5}),
                ("completions", {"prompt": chat[0]["content"], "n": 128}),
            ):
                async with http.post(f"{base}{session}/v1/{route}", json=body) as reply:
                    error = (await reply.json())["error"]
                assert reply.status == 400 and "max_model_len_tokens" in error["message"], (route, size)
                assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert not service.openings


async def test_choices_are_tokenised_once_and_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bool]()
    async with front(context=100_000) as (base, _, gateway), aiohttp.ClientSession() as http:
        tokenizer, renders = gateway.model.tokenizer, [0]
        encode = tokenizer.encode

        def counted(text: str, special_tokens: bool = True) -> tuple[int, ...]:
            if "needle" in text:
                renders[0] += 1
                try:
                    seen.append(asyncio.get_running_loop() is not None)
                except RuntimeError:
                    seen.append(False)
            return encode(text, special_tokens)

        monkeypatch.setattr(tokenizer, "encode", counted)
        body = {"messages": [{"role": "user", "content": "needle " * 10}], "n": 64, "max_tokens": 1}
        for path, most in (("", 1), ("/sessions/s", 1), ("/sessions/s", 3)):
            before = renders[0]
            async with http.post(f"{base}{path}/v1/chat/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
            assert renders[0] - before <= most, path
    assert seen and not any(seen), "each in a thread of its own"


async def test_an_empty_prompt_is_refused() -> None:
    async with front() as (base, _, _), aiohttp.ClientSession() as http:
        for prompt in ("", ["x", ""], [[]], []):
            async with http.post(f"{base}/v1/completions", json={"prompt": prompt}) as reply:
                assert reply.status == 400 and "prompt" in (await reply.json())["error"]["param"], prompt


async def test_text_offsets_of_a_stream_go_on() -> None:
    async with (
        front(policy=lambda _: "Some words, more than a chunk.") as (base, _, _),
        aiohttp.ClientSession() as http,
    ):
        asked = {"prompt": "What", "logprobs": 0, "n": 2}
        async with http.post(f"{base}/v1/completions", json=asked) as reply:
            whole = [each["logprobs"]["text_offset"] for each in (await reply.json())["choices"]]
        async with http.post(f"{base}/v1/completions", json={**asked, "stream": True}) as reply:
            lines = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: {")]
    found: list[list[int]] = [[], []]
    for line in lines:
        for choice in json.loads(line)["choices"]:
            found[choice["index"]] += choice["logprobs"]["text_offset"]
    assert found == whole


@pytest.mark.parametrize(
    ("text", "stops", "said"),
    [
        ("a\n\nb", ("\n",), "a"),
        ("xyz", ("yz", "y"), "x"),
        ("ab", ("b", "ab"), ""),
        ("one, two. three", (".", ","), "one"),
        ("abcd", ("abc", "b"), "a"),
    ],
)
def test_the_stop_string_that_ends_first_ends_a_text(text: str, stops: tuple[str, ...], said: str) -> None:
    """In a last token that has several, as of a tokenizer with long tokens."""

    class OneToken:
        def decode(self, token_ids: list[int], special_tokens: bool = False) -> str:
            return text * len(token_ids)

    found = first_stop(text, stops)
    assert found is not None and text[: found[0]] == said
    texts = Texts(TextStream(OneToken()), ReplyParser(is_plain=True), (), stops)
    piece, reply = texts.push(Sampled((1,), (0.0,), "stop", found[1]))
    assert reply is not None and reply.content == piece.content == said
