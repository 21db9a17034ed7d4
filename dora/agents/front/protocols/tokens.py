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

from dora.agents.front.asked import MODEL, Wanted, generate_wanted
from dora.agents.front.http import DONE, event, merged, read_asked, streamed, whole
from dora.agents.front.model import ServedModel
from dora.agents.front.protocols.parts import prompt_logprobs, stop_reason, token_logprobs, usage, weight_versions
from dora.agents.front.turns import RunningTurn
from dora.errors import InvalidValue

_PREFIX: Final = "generate-tokens-"  # of vLLM's ids


async def generate(request: web.Request) -> web.StreamResponse:
    asked = await read_asked(request)
    wanted, model = replace(generate_wanted(asked.body), names_ids=True), asked.door.model
    turns = await asked.turns([wanted])
    shared = {
        "request_id": f"{_PREFIX}{asked.body.get('request_id') or uuid.uuid4().hex}",
        "model": f"{MODEL}-v{turns[0].version}",
        "created": int(time.time()),
        "output_mode": "tokens",
    }
    if wanted.stream:
        return await streamed(request, asked, turns[0].version, _events(model, wanted, turns, shared))
    for turn in turns:
        await turn.ended()
    body = {
        **shared,
        "choices": [
            _choice(model, wanted, number, turn, turn.token_ids, turn.logprobs, is_last=True)
            for number, turn in enumerate(turns)
        ],
        "usage": usage(turns),
        "prompt_logprobs": prompt_logprobs(model, wanted, turns[0]),
    }
    if wanted.returns_ids:
        body["prompt_token_ids"] = turns[0].prompt_token_ids
    return await whole(request, asked, turns[0].version, body)


async def abort_requests(request: web.Request) -> web.Response:
    """Ends the caller's own requests with what they have. A session of one turn is given up."""
    asked = await read_asked(request)
    ids = asked.body.get("request_ids")
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        raise InvalidValue("request_ids", ids, "a list of texts")
    for each in ids:
        for turn in asked.door.replays.called(asked.call, each.removeprefix(_PREFIX)):
            turn.abort()
    return web.Response()


def _choice(
    model: ServedModel,
    wanted: Wanted,
    number: int,
    turn: RunningTurn,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    is_last: bool,
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": number, "token_ids": token_ids, "logprobs": None, "finish_reason": None}
    if wanted.logprobs:
        content = token_logprobs(model, wanted, token_ids, logprobs)
        choice["logprobs"] = {"content": [{**each, "rank": None} for each in content]}
    if is_last:
        choice |= {"finish_reason": turn.finish_reason, "stop_reason": stop_reason(model, turn)}
        choice |= {"weight_versions": weight_versions(turn), "routed_experts": None}
    return choice


async def _events(
    model: ServedModel, wanted: Wanted, turns: Sequence[RunningTurn], shared: dict[str, Any]
) -> AsyncIterator[bytes]:
    is_first = True
    async for number, chunk in merged(turns):
        turn = turns[number]
        choice = _choice(model, wanted, number, turn, chunk.token_ids, chunk.logprobs, is_last=chunk.is_last)
        ids = {"prompt_token_ids": turn.prompt_token_ids} if is_first and wanted.returns_ids else {}
        is_first = False
        yield event({**shared, "choices": [choice], **ids})
    yield event({**shared, "choices": [], "usage": usage(turns)})
    yield DONE
