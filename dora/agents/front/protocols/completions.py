"""OpenAI's ``/v1/completions``. Source: the OpenAI API reference; vLLM's ``entrypoints/openai/completion``."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from dora.agents.front.http import DONE, event, merged, read_request, streamed, whole
from dora.agents.front.model import ServedModel
from dora.agents.front.protocols.chat import reply_of
from dora.agents.front.protocols.parts import (
    finite,
    head,
    prompt_logprobs,
    stop_reason,
    token_text,
    usage,
    weight_versions,
)
from dora.agents.front.request import TurnRequest, completion_requests
from dora.agents.front.turns import RunningTurn


async def completions(request: web.Request) -> web.StreamResponse:
    received = await read_request(request)
    model = received.gateway.model
    await received.gateway.live()
    encode = partial(model.renderer.encode, special_tokens=True)
    prompts = await model.beside(partial(completion_requests, received.body, encode))
    requested = prompts[0]
    turns = await received.turns(prompts)
    if requested.stream:
        return await streamed(request, received, turns[0].version, _events(model, requested, turns, len(prompts)))
    for turn in turns:
        await turn.ended()
    firsts = [turns[number - number % requested.choices] for number in range(len(turns))]  # of each one's prompt
    body = {
        **head("text_completion", "cmpl", turns),
        "choices": [
            _choice(model, requested, number, *each) for number, each in enumerate(zip(turns, firsts, strict=True))
        ],
        "usage": usage(turns, len(prompts)),
    }
    return await whole(request, received, turns[0].version, body)


def _choice(
    model: ServedModel, requested: TurnRequest, number: int, turn: RunningTurn, first: RunningTurn
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": number,
        "text": reply_of(turn).content,
        "logprobs": None,
        "finish_reason": turn.finish_reason,
        "stop_reason": stop_reason(model, turn),
        "weight_versions": weight_versions(turn),
        "prompt_logprobs": prompt_logprobs(model, requested, first),
    }
    if requested.logprobs:
        choice["logprobs"] = _logprobs(model, requested, turn.token_ids, turn.logprobs)
    if requested.returns_ids:
        choice |= {"prompt_token_ids": turn.prompt_token_ids, "token_ids": turn.token_ids}
    return choice


def _logprobs(
    model: ServedModel, requested: TurnRequest, token_ids: Sequence[int], logprobs: Sequence[float], first: int = 0
) -> dict[str, Any]:
    """``first`` counts the characters of the tokens before these."""
    texts = [token_text(model, requested, each) for each in token_ids]
    values = list(map(finite, logprobs))
    offsets = [first]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    top = [{text: value} for text, value in zip(texts, values, strict=True)]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets[: len(texts)]}


async def _events(
    model: ServedModel, requested: TurnRequest, turns: Sequence[RunningTurn], prompts: int
) -> AsyncIterator[bytes]:
    shared, begun, characters = head("text_completion", "cmpl", turns), set[int](), Counter[int]()
    async for number, chunk in merged(turns):
        turn = turns[number]
        choice: dict[str, Any] = {"index": number, "text": chunk.piece.content, "logprobs": None, "finish_reason": None}
        if requested.logprobs:
            said = _logprobs(model, requested, chunk.token_ids, chunk.logprobs, characters[number])
            choice["logprobs"], characters[number] = said, characters[number] + sum(map(len, said["tokens"]))
        if requested.returns_ids:
            choice["token_ids"] = chunk.token_ids
            if number not in begun:
                choice["prompt_token_ids"] = turn.prompt_token_ids
        begun.add(number)
        if chunk.is_last:
            choice |= {"finish_reason": turn.finish_reason, "stop_reason": stop_reason(model, turn)}
            choice["weight_versions"] = weight_versions(turn)
        yield event({**shared, "choices": [choice]})
    if requested.usage:
        yield event({**shared, "choices": [], "usage": usage(turns, prompts)})
    yield DONE
