"""vLLM's ``/inference/v1/generate`` and ``/inference/v1/abort_requests``: tokens in, tokens out.

Source: vLLM 0.32, ``entrypoints/scale_out/token_in_token_out/protocol.py``. The client inside verifiers and prime-rl
(renderers 0.1) reads ``token`` as ``token_id:N``; newer ones read ``token_id``. Both are sent.
"""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from dora.agents.front.http import DONE, event, merged, read_request, streamed, whole
from dora.agents.front.model import ServedModel
from dora.agents.front.protocols.parts import prompt_logprobs, stop_reason, token_logprobs, usage, weight_versions
from dora.agents.front.request import MODEL, TurnRequest, generate_request
from dora.agents.front.turns import RunningTurn
from dora.errors import InvalidValue

_PREFIX: Final = "generate-tokens-"  # of vLLM's ids


async def generate(request: web.Request) -> web.StreamResponse:
    received = await read_request(request)
    requested, model = replace(generate_request(received.body), names_ids=True), received.gateway.model
    turns = await received.turns([requested])
    shared = {
        "request_id": f"{_PREFIX}{received.body.get('request_id') or uuid.uuid4().hex}",
        "model": f"{MODEL}-v{turns[0].version}",
        "created": int(time.time()),
        "output_mode": "tokens",
    }
    if requested.stream:
        return await streamed(request, received, turns[0].version, _events(model, requested, turns, shared))
    for turn in turns:
        await turn.ended()
    body = {
        **shared,
        "choices": [
            _choice(model, requested, number, turn, turn.token_ids, turn.logprobs, is_last=True)
            for number, turn in enumerate(turns)
        ],
        "usage": usage(turns),
        "prompt_logprobs": prompt_logprobs(model, requested, turns[0]),
    }
    if requested.returns_ids:
        body["prompt_token_ids"] = turns[0].prompt_token_ids
    return await whole(request, received, turns[0].version, body)


async def abort_requests(request: web.Request) -> web.Response:
    """Ends the caller's own requests with what they have. A session of one turn is given up."""
    received = await read_request(request)
    ids = received.body.get("request_ids")
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise InvalidValue("request_ids", ids, "a list of texts")
    for each in ids:
        for turn in received.gateway.replays.called(received.call, each.removeprefix(_PREFIX)):
            turn.abort()
    return web.Response()


def _choice(
    model: ServedModel,
    requested: TurnRequest,
    number: int,
    turn: RunningTurn,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    is_last: bool,
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": number, "token_ids": token_ids, "logprobs": None, "finish_reason": None}
    if requested.logprobs:
        content = token_logprobs(model, requested, token_ids, logprobs)
        choice["logprobs"] = {"content": [{**each, "rank": None} for each in content]}
    if is_last:
        choice |= {"finish_reason": turn.finish_reason, "stop_reason": stop_reason(model, turn)}
        choice |= {"weight_versions": weight_versions(turn), "routed_experts": None}
    return choice


async def _events(
    model: ServedModel, requested: TurnRequest, turns: Sequence[RunningTurn], shared: dict[str, Any]
) -> AsyncIterator[bytes]:
    is_first = True
    async for number, chunk in merged(turns):
        turn = turns[number]
        choice = _choice(model, requested, number, turn, chunk.token_ids, chunk.logprobs, is_last=chunk.is_last)
        ids = {"prompt_token_ids": turn.prompt_token_ids} if is_first and requested.returns_ids else {}
        is_first = False
        yield event({**shared, "choices": [choice], **ids})
    yield event({**shared, "choices": [], "usage": usage(turns)})
    yield DONE
