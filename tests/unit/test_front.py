"""The front with OpenAI's own client: what agents send, what they get, and what the service then has."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from dora.agents.front.errors import openai_body
from dora.agents.front.gateway import FrontLimits
from dora.errors import InvalidValue
from tests.unit.chat_templates import STYLES
from tests.unit.chats import TOOLS, Chat
from tests.unit.front_service import FakeService, front, fronts, prompt_logprobs_of

ASK: Any = [{"role": "user", "content": "How many?"}]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"a": false}}\n</tool_call>'


@asynccontextmanager
async def client(base: str, key: str = "any", **named: Any) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{base}/v1", api_key=key, max_retries=named.pop("max_retries", 0), **named
    ) as found:
        yield found


async def until_ended(service: Any) -> None:
    for session in service.sessions:
        await session.has_ended.wait()


async def test_a_chat_is_a_session_of_one_turn() -> None:
    async with front() as (base, service, _), client(base) as api:
        reply = await api.chat.completions.create(
            model="policy", messages=ASK, logprobs=True, extra_body={"return_token_ids": True}
        )
        await until_ended(service)
    (session,) = service.sessions
    choice = reply.choices[0]
    assert reply.model == "policy-v7" and choice.message.content == text_of(service, session)
    assert choice.finish_reason == "stop" and session.ended == (None, {}, {}, "")
    given, sampled = reply.prompt_token_ids, choice.token_ids  # type: ignore[attr-defined]
    assert [*given, *sampled] == session.token_ids and reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(given), len(sampled))
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [each.logprob for each in choice.logprobs.content] == [-0.5 - each / 1000 for each in sampled]
    assert choice.weight_versions == [{"version": 7, "start": 0, "end": len(sampled)}]  # type: ignore[attr-defined]


def text_of(service: Any, session: Any) -> str:
    """The text that the policy wrote."""
    text = service.chat.decode(session.token_ids, special_tokens=True)
    return str(text.rpartition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>"))


async def test_streams_and_whole_replies_are_the_same() -> None:
    async with front(policy=lambda _: f"Yes.\n{CALL}") as (base, service, _), client(base) as api:
        asked: Any = {"model": "policy", "messages": ASK, "tools": TOOLS, "logprobs": True}
        whole = await api.chat.completions.create(**asked)
        chunks = [
            each
            async for each in await api.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True}
            )
        ]
        await until_ended(service)
    message = whole.choices[0].message
    deltas = [each.choices[0].delta for each in chunks if each.choices]
    assert "".join(each.content or "" for each in deltas) == message.content == "Yes."
    assert message.tool_calls is not None and deltas[-1].tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [  # type: ignore[union-attr]
        (call.function.name, call.function.arguments) for call in deltas[-1].tool_calls if call.function
    ]
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage == whole.usage
    ids = [token_id for each in chunks if each.choices for token_id in getattr(each.choices[0], "token_ids", ())]
    assert [*chunks[0].prompt_token_ids, *ids] == service.sessions[1].token_ids  # type: ignore[attr-defined]
    logprobs = [each.choices[0].logprobs for each in chunks if each.choices]
    assert sum(len(each.content or ()) for each in logprobs if each) == len(ids)


@pytest.mark.parametrize("way", ["header", "path", "both", "key"])
async def test_a_session_by_header_path_or_key_keeps_its_tokens(way: str) -> None:
    policy = iter([CALL, "Two.", "Three."])
    async with front(policy=lambda _: next(policy)) as (base, service, gateway):
        named: dict[str, Any] = {}
        if way == "key":
            async with aiohttp.ClientSession() as http, http.post(f"{base}/sessions", json={"group": "g"}) as opened:
                named["key"] = (await opened.json())["sessions"][0]["key"]
        elif way == "header":
            named["default_headers"] = {"X-Session-ID": "s1"}
        else:
            base += "/sessions/s1"
            named["default_headers"] = {"X-Session-ID": "another"} if way == "both" else {}
        async with client(base, **named) as api:
            messages = list(ASK)
            for _ in range(3):
                reply = await api.chat.completions.create(model="policy", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                results = [
                    {"role": "tool", "tool_call_id": call.id, "content": "{}"} for call in message.tool_calls or ()
                ]
                messages += results or [{"role": "user", "content": "More."}]
        (session,) = service.sessions
        assert session.turn == 3 and not gateway.prefix_breaks
        assert len(service.openings) == 1 and session.ended is None


async def test_a_driven_session_has_the_sampling_of_its_prompt() -> None:
    async with front() as (base, service, gateway):
        handle = service.made(7, None)
        agent = gateway.adopt(handle)
        async with client(f"{base}/sessions/{handle.session_id}") as api:
            with pytest.raises(openai.BadRequestError) as found:
                await api.chat.completions.create(model="policy", messages=ASK, temperature=0.5)
            assert found.value.param == "temperature" and not agent.begun.is_set()
            ends: Any = {"stop_token_ids": service.chat.ends()}
            await api.chat.completions.create(model="policy", messages=ASK, extra_body=ends)
            assert agent.begun.is_set() and handle.turn == 1 and not service.openings
            gateway.release(agent)
            with pytest.raises(openai.ConflictError):
                await api.chat.completions.create(model="policy", messages=ASK)
    assert handle.ended is None, "its driver ends it"


def test_a_session_without_room_is_named_as_harnesses_expect() -> None:
    full = InvalidValue("given_token_ids", "9 tokens", "1 to 3 tokens: it has 5 of workers.max_model_len_tokens 9")
    assert openai_body(full)["error"]["code"] == "context_length_exceeded"
    assert openai_body(InvalidValue("given_token_ids", "(none)", "1 to 3"))["error"]["code"] == 400


async def test_sessions_are_opened_rewarded_and_closed() -> None:
    async with front() as (base, service, _), aiohttp.ClientSession() as http:
        body = {"group": "g1", "size": 2, "tags": {"run": "a"}, "task": "t", "sampling": {"temperature": 0.5}}
        async with http.post(f"{base}/sessions", json=body) as reply:
            opened = (await reply.json())["sessions"]
        async with http.post(f"{base}/sessions", json=body) as reply:
            assert (await reply.json())["sessions"] == opened, "a retry"
        assert [each["version"] for each in opened] == [7, 7] and service.openings[0].sampling == {"temperature": 0.5}
        async with http.post(f"{base}/sessions/{opened[0]['id']}/close", json={"reward": 1}) as reply:
            assert reply.status == 409, "nothing was sampled: it stays open"
        for number, each in enumerate(opened):
            async with AsyncOpenAI(base_url=each["base_url"], api_key="x") as api:
                await api.chat.completions.create(model="policy", messages=ASK)
            async with http.post(f"{base}/sessions/{each['id']}/reward", json={"reward": 0.25, "turn": 0}) as reply:
                assert reply.status == 200
            async with http.post(f"{base}/sessions/{each['id']}/reward", json={"reward": number}) as reply:
                assert reply.status == 200
            async with http.post(f"{base}/sessions/{each['id']}/close", json={}) as reply:
                assert await reply.json() == {"session": each["id"], "closed": True}
            async with http.post(f"{base}/sessions/{each['id']}/close", json={}) as reply:
                assert reply.status == 409
    assert [session.ended for session in service.sessions] == [(0.0, {}, {1: 0.25}, ""), (1.0, {}, {1: 0.25}, "")]


async def test_what_one_call_accepts_a_later_one_keeps() -> None:
    """Rewards beyond the bound are refused where they come in; a close without a reward keeps what was given."""
    async with front() as (base, service, _), aiohttp.ClientSession() as http:
        async with AsyncOpenAI(base_url=f"{base}/sessions/s/v1", api_key="x") as api:
            await api.chat.completions.create(model="policy", messages=ASK)

        async def told(route: str, body: dict[str, Any], status: int) -> str:
            async with http.post(f"{base}/sessions/s/{route}", json=body) as reply:
                assert reply.status == status, await reply.text()
                return await reply.text()

        for value in (1e39, -2e6, 10**300):
            for route, more in (("reward", {}), ("reward", {"turn": 0}), ("close", {})):
                assert "1,000,000" in await told(route, {"reward": value, **more}, 400)
        await told("reward", {"reward": 0.5, "turn": 0}, 200)
        await told("reward", {"reward": 0.25, "log": "x" * 100_000, "components": {"a": 1, "b" * 999: 2}}, 200)
        async with http.post(f"{base}/sessions/s/reward", data=b'{"reward": 0.25, "log": "a\xff"}') as reply:
            assert reply.status == 200, "a byte that is no UTF-8 is replaced"
        await told("close", {"components": {"c": 3}}, 200)
    assert service.sessions[0].ended == (0.25, {"c": 3}, {1: 0.5}, "a\ufffd")


async def test_choices_are_the_sessions_of_a_group() -> None:
    async with front() as (base, service, _), client(base) as api:
        reply = await api.chat.completions.create(model="policy-v6", messages=ASK, n=3)
        stream = await api.chat.completions.create(model="policy", messages=ASK, n=2, stream=True)
        seen = {choice.index async for chunk in stream for choice in chunk.choices}
        await until_ended(service)
    assert [choice.index for choice in reply.choices] == [0, 1, 2] and seen == {0, 1}
    assert [opening.size for opening in service.openings] == [3, 2] and service.openings[0].version == 6


async def test_choices_within_a_session_are_its_branches() -> None:
    answers = iter(("One.", "Two.", "Three."))
    async with front(policy=lambda _: next(answers)) as (base, service, _), client(f"{base}/sessions/s") as api:
        reply = await api.chat.completions.create(model="policy", messages=ASK, n=2)
        more = [*ASK, reply.choices[1].message.model_dump(exclude_none=True), {"role": "user", "content": "So?"}]
        await api.chat.completions.create(model="policy", messages=more)
    assert (service.sessions[0].turn, len(service.sessions)) == (3, 1)
    first, second, third = service.sessions[0].paths[1:]
    assert first != third[: len(first)] and third[: len(second)] == second


async def test_completions_take_texts_and_ids() -> None:
    async with front() as (base, service, _), client(base) as api:
        reply = await api.completions.create(
            model="policy", prompt=[[300, 301], [302]], logprobs=0, extra_body={"return_token_ids": True}
        )
        text = await api.completions.create(model="policy", prompt="What", max_tokens=2)
        pieces = [each async for each in await api.completions.create(model="policy", prompt="What", stream=True)]
        await until_ended(service)
    ids = [choice.prompt_token_ids for choice in reply.choices]  # type: ignore[attr-defined]
    assert ids == [[300, 301], [302]]
    for choice, session in zip(reply.choices, service.sessions, strict=False):
        assert [*choice.prompt_token_ids, *choice.token_ids] == session.token_ids  # type: ignore[attr-defined]
        assert choice.logprobs is not None and len(choice.logprobs.token_logprobs or ()) == len(choice.token_ids)  # type: ignore[attr-defined]
    assert text.choices[0].finish_reason == "length" and text.usage is not None and text.usage.completion_tokens == 2
    assert "".join(each.choices[0].text for each in pieces) == "It is 4."


async def test_generate_speaks_vllms_protocol() -> None:
    asked = {"token_ids": [300, 301], "sampling_params": {"logprobs": 1, "max_tokens": 4, "top_k": -1, "n": 1}}
    async with front() as (base, _, _), aiohttp.ClientSession() as http:
        async with http.post(f"{base}/inference/v1/generate", json={**asked, "return_token_ids": True}) as reply:
            body = await reply.json()
        async with http.post(f"{base}/inference/v1/generate", json={**asked, "stream": True}) as reply:
            lines = [line.decode()[6:] for line in (await reply.read()).splitlines() if line]
    choice = body["choices"][0]
    assert body["prompt_token_ids"] == [300, 301] and choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": 7, "start": 0, "end": 4}]
    for token_id, each in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert (each["token"], each["token_id"]) == (f"token_id:{token_id}", token_id)
    assert lines[-1] == "[DONE]"
    streamed = [
        token_id for line in lines[:-1] for each in json.loads(line)["choices"] for token_id in each["token_ids"]
    ]
    assert streamed == choice["token_ids"]


async def test_prompt_logprobs_are_in_vllms_form() -> None:
    """Each choice of a prompt has those of the first; a stream, another number and a chat are refused by name."""
    ids = [[5, 6, 7], [8]]
    expected = [
        [None, *({str(each): value} for each, value in zip(one[1:], prompt_logprobs_of(one), strict=True))]
        for one in ids
    ]

    def shown(found: list[Any]) -> list[Any]:
        assert all(each["rank"] is None for entry in found if entry for each in entry.values())
        return [entry and {name: each["logprob"] for name, each in entry.items()} for entry in found]

    async with front() as (base, service, _), aiohttp.ClientSession() as http:
        completions, generate, chat = (
            f"{base}/{path}" for path in ("v1/completions", "inference/v1/generate", "v1/chat/completions")
        )
        asked: dict[str, Any] = {"prompt": ids, "n": 2, "max_tokens": 2}
        async with http.post(completions, json={**asked, "prompt_logprobs": 0}) as reply:
            choices = (await reply.json())["choices"]
        assert [shown(each["prompt_logprobs"]) for each in choices] == [each for each in expected for _ in range(2)]
        assert sum(bool(session.last.prompt_logprobs) for session in service.sessions) == 1
        async with http.post(completions, json=asked) as reply:
            assert [each["prompt_logprobs"] for each in (await reply.json())["choices"]] == [None] * 4
        tokens = {"token_ids": ids[0], "sampling_params": {"max_tokens": 2, "prompt_logprobs": 0}}
        async with http.post(generate, json=tokens) as reply:
            assert shown((await reply.json())["prompt_logprobs"]) == expected[0]
        before = len(service.sessions)
        for url, body in (
            (completions, {**asked, "prompt_logprobs": 1}),
            (completions, {**asked, "prompt_logprobs": 0, "stream": True}),
            (generate, {**tokens, "stream": True}),
            (generate, {**tokens, "sampling_params": {"prompt_logprobs": True}}),
            (chat, {"messages": ASK, "prompt_logprobs": 0}),
        ):
            async with http.post(url, json=body) as reply:
                assert reply.status == 400 and "prompt_logprobs" in (await reply.json())["error"]["param"]
        assert len(service.sessions) == before


async def test_a_session_of_tokens_continues_by_its_prefix() -> None:
    async with front() as (base, service, _), aiohttp.ClientSession() as http:
        ids = [300, 301]
        for _ in range(3):
            async with http.post(
                f"{base}/inference/v1/generate", json={"token_ids": ids}, headers={"X-Session-ID": "verifiers-1"}
            ) as reply:
                ids = [*ids, *(await reply.json())["choices"][0]["token_ids"], 302]
    (session,) = service.sessions
    assert session.turn == 3 and session.token_ids == ids[:-1]


async def test_an_aborted_request_ends_with_what_it_has() -> None:
    gate = asyncio.Event()
    async with front(gate=gate) as (base, service, _), aiohttp.ClientSession() as http:
        asked = {"token_ids": [300], "request_id": "r1", "stream": True}
        async with http.post(f"{base}/inference/v1/generate", json=asked) as reply:
            await reply.content.readline()
            async with http.post(f"{base}/inference/v1/abort_requests", json={"request_ids": ["r1"]}) as aborted:
                assert aborted.status == 200
            rest = (await reply.read()).decode()
        gate.set()
        await until_ended(service)
    assert '"finish_reason":"abort"' in rest and service.sessions[0].failed


async def test_a_retry_gets_the_turn_of_its_first_call() -> None:
    gate = asyncio.Event()
    async with front(gate=gate) as (base, service, _):
        async with client(base, timeout=0.3) as api:
            with pytest.raises(openai.APITimeoutError):
                await api.chat.completions.create(model="policy", messages=ASK)
        gate.set()
        await until_ended(service)
        async with client(base) as api:
            reply = await api.chat.completions.create(model="policy", messages=ASK)
            keyed = [
                await api.chat.completions.create(model="policy", messages=ASK, extra_headers={"Idempotency-Key": "k"})
                for _ in range(2)
            ]
            await api.chat.completions.create(model="policy", messages=ASK)
    assert reply.choices[0].message.content == text_of(service, service.sessions[0])
    assert keyed[0].choices[0].message == keyed[1].choices[0].message
    assert len(service.sessions) == 3, "the interrupted one, the keyed one, and one that is no retry"


@pytest.mark.parametrize("style", ["qwen2.5", "qwen3"])
async def test_a_retry_at_another_front_gets_the_turn_of_its_first_call(style: str) -> None:
    """The first front is gone, and the second knows nothing of its calls. A third closes the session."""
    policy = iter([CALL, "Two.", "Three."])
    service = FakeService(Chat(STYLES[style]), lambda _: next(policy))
    async with fronts(service, 3) as (urls, doors):
        replies, messages = list[Any](), list(ASK)
        for number, base in enumerate((urls[0], urls[1], urls[1])):  # each turn is requested again at the second
            named: dict[str, Any] = {"X-Session-ID": "s", "Idempotency-Key": f"k{number}"}
            for at in (base, urls[1]):
                async with client(at, default_headers=named) as api:
                    reply = await api.chat.completions.create(
                        model="policy",
                        messages=messages,
                        tools=TOOLS,
                        logprobs=True,
                        extra_body={"return_token_ids": True},
                    )
                replies.append(reply.choices[0].model_dump())
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            calls = reply.choices[0].message.tool_calls
            messages.append({"role": "tool", "content": "{}", "tool_call_id": calls[0].id} if calls else ASK[0])
        for first, again in zip(replies[::2], replies[1::2], strict=True):
            for choice in (first, again):  # a call's id is the front's
                for call in choice["message"]["tool_calls"] or ():
                    call["id"] = ""
            assert first == again
        (session,) = service.sessions
        assert session.turn == 3 and len(service.openings) == 1
        assert not doors[1].prefix_breaks
        async with aiohttp.ClientSession() as http:
            for _ in range(2):  # the second one to make sure
                async with http.post(f"{urls[2]}/sessions/s/close", json={"reward": 1.0}) as closed:
                    status = closed.status
            assert status == 409 and session.ended == (1.0, {}, {}, "")
            async with http.post(f"{urls[1]}/sessions/unknown/close", json={"reward": 1.0}) as closed:
                assert closed.status == 404


async def test_a_session_that_another_front_found_takes_the_sampling_of_its_next_call() -> None:
    sampling: dict[str, Any] = {"model": "policy", "messages": ASK, "temperature": 0.5}
    service = FakeService(Chat(STYLES["qwen2.5"]))
    async with fronts(service, 2) as (urls, _), aiohttp.ClientSession() as http:
        async with client(f"{urls[0]}/sessions/s") as api:
            await api.chat.completions.create(**sampling)
        async with http.get(f"{urls[1]}/sessions/s") as shown:
            assert (await shown.json())["branches"][0]["turns"] == 1
        async with client(f"{urls[1]}/sessions/s") as api:
            await api.chat.completions.create(**{**sampling, "temperature": 1.0})
        (session,) = service.sessions
        assert [each["temperature"] for each in session.asked] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("logit_bias", {"5": 1}), ("response_format", {"type": "json_object"}), ("top_logprobs", 3)),
        *(("tool_choice", "required"), ("temperature", 3), ("n", 0), ("stop", [""]), ("unheard_of", 1)),
        *(("guided_json", {}), ("continue_final_message", True), ("max_tokens", 0), ("messages", [])),
        *(("chat_template_kwargs", {"messages": []}), ("model", 5), ("stream", "yes"), ("tools", [{}])),
        *(("seed", -1), ("echo", True), ("parallel_tool_calls", False), ("frequency_penalty", 9)),
    ],
)
async def test_a_field_that_is_not_offered_is_refused_by_name(field: str, value: Any) -> None:
    async with front() as (base, service, _), aiohttp.ClientSession() as http:
        body = {"model": "policy", "messages": ASK, field: value}
        async with http.post(f"{base}/v1/chat/completions", json=body) as reply:
            error = (await reply.json())["error"]
    assert reply.status == 400 and field in error["param"] and field in error["message"], error
    assert not service.sessions


async def test_sampling_is_that_of_each_call() -> None:
    """What a call leaves out is the service's again, and not that of the call before."""
    async with front() as (base, service, _), client(f"{base}/sessions/s") as api:
        asked: Any = {"model": "policy", "temperature": 0.5}
        reply = await api.chat.completions.create(messages=ASK, **asked, stop="i")
        assert reply.choices[0].message.content == "It " and reply.choices[0].stop_reason == "i"  # type: ignore[attr-defined]
        more = [*ASK, reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "So?"}]
        await api.chat.completions.create(messages=more, **asked, stop="i")
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(**{"messages": more, **asked, "model": "gpt-9"})
        reply = await api.chat.completions.create(messages=more, model="policy", seed=3, top_p=0.5, n=2)
        assert all("i" in choice.message.content for choice in reply.choices if choice.message.content)
    assert service.openings[0].sampling == {"stop": ("i",), "temperature": 0.5}
    first, again, plain, other = service.sessions[0].asked
    assert first == again == {"stop": ("i",), "temperature": 0.5}
    assert plain == {"stop": (), "temperature": 1.0, "top_p": 0.5, "seed": 3}
    assert other == {**plain, "seed": other["seed"]} and other["seed"] != 3


async def test_the_sampling_of_an_opened_session_holds_for_calls_that_say_nothing() -> None:
    async with front() as (base, service, _), aiohttp.ClientSession() as http:
        body = {"group": "g1", "sampling": {"stop": ["i"], "seed": 5, "max_tokens": 9}}
        async with http.post(f"{base}/sessions", json=body) as reply:
            (opened,) = (await reply.json())["sessions"]
        async with client(f"{base}/sessions/{opened['id']}") as api:
            for own in ({}, {"stop": "x"}):
                await api.chat.completions.create(model="policy", messages=ASK, **own)
    assert service.sessions[0].asked == [{"stop": (stop,), "temperature": 1.0} for stop in ("i", "x")]


async def test_statuses_are_those_that_clients_expect() -> None:
    limits = FrontLimits(body_bytes=5000, in_flight=1, tools=1, sessions=1)
    async with front(key="secret", limits=limits) as (base, service, _), client(base, "secret") as api:
        asked: Any = {"model": "policy", "messages": ASK}
        async with client(base, "wrong") as other:
            with pytest.raises(openai.AuthenticationError):
                await other.chat.completions.create(**asked)
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(**{**asked, "model": "gpt-9"})
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.ConflictError) as conflict:
            await api.chat.completions.create(**{**asked, "model": "policy-v3"})
        assert "6, 7" in str(conflict.value)
        with pytest.raises(openai.APIStatusError) as large:
            await api.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": "x" * 6000}]})
        assert large.value.status_code == 413
        with pytest.raises(openai.BadRequestError):
            await api.chat.completions.create(**asked, tools=TOOLS * 2)
        service.is_full = True
        with pytest.raises(openai.RateLimitError) as full:
            await api.chat.completions.create(**asked)
        assert full.value.response.headers["Retry-After"]
        service.is_full, service.gate = False, asyncio.Event()
        first = await api.chat.completions.create(**asked, stream=True)
        with pytest.raises(openai.RateLimitError):
            await api.chat.completions.create(**asked)
        service.gate.set()
        assert [each async for each in first]
        async with client(f"{base}/sessions/s", "secret") as session:
            await session.chat.completions.create(**asked)
        async with client(f"{base}/sessions/t", "secret") as another:
            with pytest.raises(openai.RateLimitError):
                await another.chat.completions.create(**asked)


async def test_a_client_that_leaves_costs_its_connection_alone() -> None:
    gate = asyncio.Event()
    async with front(gate=gate) as (base, service, _):
        async with aiohttp.ClientSession() as http:
            reply = await http.post(f"{base}/sessions/s/v1/chat/completions", json={"messages": ASK, "stream": True})
            await reply.content.readline()
            reply.close()
        gate.set()
        await service.sessions[0].is_idle.wait()
        async with client(f"{base}/sessions/s") as api:
            again = await api.chat.completions.create(model="policy", messages=ASK, stream=True)
            assert [each async for each in again][-1].choices[0].finish_reason == "stop"


async def test_models_and_health() -> None:
    async with front() as (base, _, _), client(base) as api:
        listed = await api.models.list()
        async with aiohttp.ClientSession() as http, http.get(f"{base}/health") as reply:
            assert reply.status == 200
        async with aiohttp.ClientSession() as http, http.get(f"{base}/nothing") as reply:
            assert reply.status == 404 and (await reply.json())["error"]["param"] == "path"
        async with aiohttp.ClientSession() as http, http.get(f"{base}/v1/completions") as reply:
            assert reply.status == 405
    assert [each.id for each in listed.data] == ["policy", "policy-v7", "policy-v6"]
    assert {each.max_model_len for each in listed.data} == {4000}  # type: ignore[attr-defined]


TOOL: Any = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}


async def test_responses_are_a_translation_onto_the_same_session() -> None:
    answers = iter((f"<think>\nHm.\n</think>\n\nFirst.\n{CALL}", "Second.", "Third."))
    async with (
        front("qwen3", policy=lambda _: next(answers)) as (base, service, gateway),
        client(f"{base}/sessions/s") as api,
    ):
        items: list[Any] = [{"role": "user", "content": "How many?"}]
        asked: Any = {"model": "policy", "tools": [TOOL], "instructions": "Be brief."}
        first = await api.responses.create(input=items, **asked)
        items += [each.model_dump(exclude_none=True) for each in first.output]
        (call,) = [each for each in first.output if each.type == "function_call"]
        assert (call.name, json.loads(call.arguments), first.output_text) == ("look_up", {"a": False}, "First.")
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "4"})
        second = await api.responses.create(input=items, **asked)
        items += [each.model_dump(exclude_none=True) for each in second.output]
        items.append({"role": "user", "content": "Sure?"})
        events = [each async for each in await api.responses.create(input=items, **asked, stream=True)]
        with pytest.raises(openai.BadRequestError):
            await api.responses.create(input="x", previous_response_id=second.id)
    (session,) = service.sessions
    assert session.turn == 3 and not gateway.prefix_breaks and second.output_text == "Second."
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "Third."
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "Third."


async def test_anthropics_messages_are_a_translation_onto_the_same_session() -> None:
    answers = iter((f"<think>\nHm.\n</think>\n\nFirst.\n{CALL}", "Second.", f"Third.\n{CALL}"))
    async with (
        front("qwen3", policy=lambda _: next(answers)) as (base, service, gateway),
        aiohttp.ClientSession() as http,
    ):
        route, chat = f"{base}/sessions/s/v1/messages", [{"role": "user", "content": "How many?"}]
        tool = {"name": "look_up", "input_schema": {"type": "object", "properties": {}}}
        asked: Any = {"model": "policy", "max_tokens": 500, "messages": chat, "tools": [tool], "system": "Be brief."}
        async with http.post(route, json=asked) as reply:
            first = await reply.json()
        assert [each["type"] for each in first["content"]] == ["thinking", "text", "tool_use"]
        assert first["stop_reason"] == "tool_use" and first["content"][2]["input"] == {"a": False}
        result = {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": "4"}
        chat += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        async with http.post(route, json=asked) as reply:
            second = await reply.json()
        assert second["stop_reason"] == "end_turn"
        chat += [{"role": "assistant", "content": second["content"]}, {"role": "user", "content": "Sure?"}]
        async with http.post(route, json={**asked, "stream": True}) as reply:
            lines = (await reply.text()).splitlines()
        async with http.post(f"{route}/count_tokens", json=asked) as reply:
            assert (await reply.json())["input_tokens"] > 20
        async with http.post(route, json={**asked, "tool_choice": {"type": "any"}}) as reply:
            assert reply.status == 400 and (await reply.json())["error"]["type"] == "invalid_request_error"
    (session,) = service.sessions
    assert session.turn == 3 and not gateway.prefix_breaks
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    kinds = [each["type"] for each in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    texts = [each["delta"]["text"] for each in events if each.get("delta", {}).get("type") == "text_delta"]
    assert "".join(texts) == "Third." and kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"])
async def test_a_connection_without_a_whole_request_head_is_closed(begin: bytes) -> None:
    """It says nothing, or its head trickles in, or nothing follows a reply."""
    async with front(limits=FrontLimits(connection_idle_s=0.2)) as (base, _, _):
        host, _, port = base.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begin)
        async with asyncio.timeout(10):
            reading = asyncio.create_task(reader.read())  # to the connection's end
            while not (await asyncio.wait({reading}, timeout=0.02))[0]:
                if begin.count(b"\n") == 1:
                    writer.write(b"x")
            with contextlib.suppress(ConnectionError):
                assert (await reading).startswith(b"HTTP/1.1 200") == begin.endswith(b"\r\n\r\n")
        writer.close()
