"""What is served, and the sessions that agents open, reward and close."""

import time
import uuid
from typing import Any, Final

from aiohttp import web

from dora.agents.chat.tree import BREAKS
from dora.agents.front.http import GATEWAY, read_request
from dora.agents.front.request import MODEL
from dora.agents.front.sessions import AgentSession, SessionReward
from dora.agents.front.source import SessionOpening
from dora.data.sampling import checked_overrides
from dora.data.verdict import ALLOWED_REWARD, is_reward
from dora.errors import MISSING, DoraError, InvalidValue
from dora.metrics.text import TEXT
from dora.prompts.check import check_name

SIZE_MAX: Final = 4096
_FIELDS: Final = ("group", "size", "model", "sampling", "task", "tags", "verifier")


async def live(request: web.Request) -> web.Response:
    """Answers 200 while the front does, whatever its service does."""
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """Answers 200 while the service does, otherwise 503 with the reason's kind."""
    try:
        await request.app[GATEWAY].live()
    except DoraError as error:
        return web.Response(status=503, text=f"the service does not answer: {type(error).__name__}")
    return web.Response()


async def health(request: web.Request) -> web.Response:
    """Answers 200 while the service does. Raises ServiceUnavailable."""
    await request.app[GATEWAY].live()
    return web.Response()


async def models(request: web.Request) -> web.Response:
    """Lists ``policy``, and each live version by its name."""
    live = await request.app[GATEWAY].live()
    shared = {"object": "model", "created": int(time.time()), "owned_by": "dora", "root": live.model}
    if live.context_tokens:
        shared["max_model_len"] = live.context_tokens
    names = [MODEL, *(f"{MODEL}-v{version}" for version in sorted(live.versions, reverse=True))]
    return web.json_response({"object": "list", "data": [{"id": name, **shared} for name in names]})


async def open_sessions(request: web.Request) -> web.Response:
    """Opens the sessions of one group once the window admits it."""
    received = await read_request(request)
    body = received.body
    for name in body:
        if name not in _FIELDS:
            raise InvalidValue(name, body[name], f"one of {', '.join(_FIELDS)}", why="is not a field of this route")
    size, tags = body.get("size", 1), body.get("tags", {})
    if type(size) is not int or not 1 <= size <= SIZE_MAX:
        raise InvalidValue("size", size, f"a whole number from 1 to {SIZE_MAX}")
    if not isinstance(tags, dict) or not all(isinstance(value, str) for value in tags.values()):
        raise InvalidValue("tags", tags, "an object of texts")
    verifier = body.get("verifier", {})
    if not isinstance(verifier, dict):
        raise InvalidValue("verifier", verifier, "an object, for the service's reward function")
    group, task = body.get("group", f"group-{uuid.uuid4().hex}"), body.get("task", "")
    check_name(group, "group")
    if task:
        check_name(task, "task")
    sampling = checked_overrides(body.get("sampling", {}), "sampling")
    model = body.get("model", MODEL)
    if not isinstance(model, str):
        raise InvalidValue("model", model, "a text")
    version = await received.gateway.version_for(model)
    sessions = await received.gateway.open(SessionOpening(group, size, version, sampling or None, task, tags, verifier))
    return web.json_response({"group": group, "sessions": [_shown(request, each) for each in sessions]})


async def show_session(request: web.Request) -> web.Response:
    session = await _session(request)
    branches = [{"tokens": len(each.token_ids), "turns": len(each.turns)} for each in session.tree.branches]
    breaks = dict(session.tree.prefix_breaks)
    return web.json_response({**_shown(request, session), "branches": branches, "prefix_breaks": breaks})


async def reward(request: web.Request) -> web.Response:
    """Notes a session's reward, or that of one of its turns. The session goes on."""
    received, session = await read_request(request, is_verdict=True), await _session(request)
    verdict = _verdict(received.body, ("reward", "components", "log", "turn"))
    if verdict.value is None:
        raise InvalidValue("reward", MISSING, ALLOWED_REWARD)
    turn = received.body.get("turn")
    if turn is None:
        session.verdict = verdict
    else:
        session.reward_turn(turn, verdict.value)
    return web.json_response({"session": session.session_id, "reward": verdict.value})


async def close(request: web.Request) -> web.Response:
    """Ends a session, with the reward of the body, or else the one that was given before, or the sum of its turns'."""
    received, session = await read_request(request, is_verdict=True), await _session(request)
    verdict = _verdict(received.body, ("reward", "components", "log"))
    await received.gateway.close(session, verdict if verdict.value is not None else session.verdict.noted(verdict))
    return web.json_response({"session": session.session_id, "closed": True})


async def breaks(request: web.Request) -> web.Response:
    """Counts the histories that were given anew since the front's start, by reason."""
    counted = request.app[GATEWAY].prefix_breaks
    found = {reason: {"count": counted[reason], "meaning": meaning} for reason, meaning in BREAKS.items()}
    return web.json_response({"prefix_breaks": counted.total(), "reasons": found})


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=await request.app[GATEWAY].page(), headers={"Content-Type": TEXT})


async def _session(request: web.Request) -> AgentSession:
    return await request.app[GATEWAY].session(request.match_info["session"])


def _verdict(body: Any, fields: tuple[str, ...]) -> SessionReward:
    for name in body:
        if name not in fields:
            raise InvalidValue(name, body[name], f"one of {', '.join(fields)}", why="is not a field of this route")
    value, components, log = body.get("reward"), body.get("components", {}), body.get("log", "")
    if value is not None and not (_is_number(value) and is_reward(value)):
        raise InvalidValue("reward", value, ALLOWED_REWARD)
    if not isinstance(components, dict) or not all(map(_is_number, components.values())):
        raise InvalidValue("components", components, "an object of numbers")
    if not isinstance(log, str):
        raise InvalidValue("log", log, "a text")
    return SessionReward(None if value is None else float(value), components, log)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _shown(request: web.Request, session: AgentSession) -> dict[str, Any]:
    base = f"{request.scheme}://{request.host}/sessions/{session.session_id}/v1"
    return {"id": session.session_id, "key": session.key, "base_url": base, "version": session.version}
