"""OpenAI's ``/v1/chat/completions``.

Source: the OpenAI API reference; vLLM's ``entrypoints/openai/chat_completion``.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web

from dora.agents.chat.reply import ChatReply
from dora.agents.front.http import DONE, event, merged, read_request, streamed, whole
from dora.agents.front.model import ServedModel
from dora.agents.front.protocols.parts import head, stop_reason, token_logprobs, usage, weight_versions
from dora.agents.front.request import TurnRequest, chat_request
from dora.agents.front.turns import Chunk, RunningTurn


async def chat_completions(request: web.Request) -> web.StreamResponse:
    received = await read_request(request)
    requested, model = chat_request(received.body), received.gateway.model
    turns = await received.turns([requested])
    if requested.stream:
        return await streamed(request, received, turns[0].version, _events(model, requested, turns))
    for turn in turns:
        await turn.ended()
    body = {
        **head("chat.completion", "chatcmpl", turns),
        "choices": [_choice(model, requested, number, turn) for number, turn in enumerate(turns)],
        "usage": usage(turns),
    }
    if requested.returns_ids:
        body["prompt_token_ids"] = turns[0].prompt_token_ids
    return await whole(request, received, turns[0].version, body)


def reply_of(turn: RunningTurn) -> ChatReply:
    assert turn.reply is not None
    return turn.reply


def finish_reason(turn: RunningTurn) -> str:
    is_call = turn.finish_reason == "stop" and bool(reply_of(turn).tool_calls)
    return "tool_calls" if is_call else str(turn.finish_reason)


def _choice(model: ServedModel, requested: TurnRequest, number: int, turn: RunningTurn) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": number,
        "message": {"refusal": None, **reply_of(turn).message()},
        "logprobs": None,
        "finish_reason": finish_reason(turn),
        "stop_reason": stop_reason(model, turn),
        "weight_versions": weight_versions(turn),
    }
    if requested.logprobs:
        choice["logprobs"] = {"content": token_logprobs(model, requested, turn.token_ids, turn.logprobs)}
    if requested.returns_ids:
        choice["token_ids"] = turn.token_ids
    return choice


async def _events(model: ServedModel, requested: TurnRequest, turns: Sequence[RunningTurn]) -> AsyncIterator[bytes]:
    shared, begun = head("chat.completion.chunk", "chatcmpl", turns), set[int]()
    async for number, chunk in merged(turns):
        if number not in begun:
            begun.add(number)
            first = {"index": number, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            ids = {"prompt_token_ids": turns[number].prompt_token_ids} if requested.returns_ids else {}
            yield event({**shared, "choices": [first], **ids})
        yield event({**shared, "choices": [_delta(model, requested, number, turns[number], chunk)]})
    if requested.usage:
        yield event({**shared, "choices": [], "usage": usage(turns)})
    yield DONE


def _delta(model: ServedModel, requested: TurnRequest, number: int, turn: RunningTurn, chunk: Chunk) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if chunk.piece.content:
        delta["content"] = chunk.piece.content
    if chunk.piece.reasoning:
        delta["reasoning"] = delta["reasoning_content"] = chunk.piece.reasoning
    choice: dict[str, Any] = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
    if requested.logprobs:
        choice["logprobs"] = {"content": token_logprobs(model, requested, chunk.token_ids, chunk.logprobs)}
    if requested.returns_ids:
        choice["token_ids"] = chunk.token_ids
    if chunk.is_last:
        calls = reply_of(turn).tool_calls
        if calls:
            delta["tool_calls"] = [{"index": place, **call.message()} for place, call in enumerate(calls)]
        choice["finish_reason"], choice["stop_reason"] = finish_reason(turn), stop_reason(model, turn)
        choice["weight_versions"] = weight_versions(turn)
    return choice
