"""The routes of Tinker's sampling half, below ``/api/v1``.

Tinker's client repeats a request that is answered 408, 409, 429 or 5xx, so what a repetition cannot change is a 400 or
404. A future that has failed is answered 200, with its error and whose fault it is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from http import HTTPStatus
from typing import Final

from aiohttp import web

from dora.agents.front.errors import category_of, tinker_body
from dora.agents.front.gateway import Gateway
from dora.agents.front.http import GATEWAY, TINKER, VERSION_HEADER, Handler, read_body, read_request, refusing
from dora.agents.front.protocols.tinker.futures import Futures
from dora.agents.front.protocols.tinker.request import (
    is_sample,
    is_session,
    new_session,
    number_of,
    requested_model,
    sample_request,
    sampler_model,
    sampler_name,
    text_of,
)
from dora.agents.front.protocols.tinker.result import CONTENT_TYPE, encoded_sample
from dora.agents.front.request import MODEL
from dora.errors import Conflict, InvalidValue, NotFound

FUTURES: Final = web.AppKey("futures", Futures)


def add_routes(app: web.Application, gateway: Gateway) -> None:
    app[FUTURES] = Futures(gateway.limits)
    app.cleanup_ctx.append(_sweeping)
    posts = {
        "client/config": client_config,
        "client/dynamic_config": client_dynamic_config,
        "create_session": create_session,
        "create_sampling_session": create_sampling_session,
        "asample": asample,
        "retrieve_future": retrieve_future,
        "cancel_future": cancel_future,
        "session_heartbeat": session_heartbeat,
        "telemetry": telemetry,
        "sessions/{tinker}/finish": finish_session,
    }
    gets = {"healthz": healthz, "get_server_capabilities": capabilities, "samplers/{sampler}": show_sampler}
    for base in ("", "/sessions/{session}"):
        for path, handler in posts.items():
            app.router.add_post(f"{base}{TINKER}{path}", refusing(_final(handler), tinker_body))
        for path, handler in gets.items():
            app.router.add_get(f"{base}{TINKER}{path}", refusing(handler, tinker_body))
        app.router.add_route("*", f"{base}{TINKER}{{rest:.*}}", refusing(not_offered, tinker_body))


async def _sweeping(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(app[FUTURES].run())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await app[FUTURES].stop()


def _final(handler: Handler) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except Conflict as error:
            raise InvalidValue(error.field, error.value, error.allowed, error.why) from error

    return handle


async def not_offered(request: web.Request) -> web.StreamResponse:
    raise NotFound("path", request.path, "a route of sampling: training goes on in DORA's trainer", "is not offered")


async def client_config(request: web.Request) -> web.StreamResponse:
    """Returns the client's settings: how many samples it may wait for at a time."""
    received = await read_request(request)
    return web.json_response({"sample_max_concurrent_requests": max(1, received.gateway.limits.in_flight // 2)})


async def client_dynamic_config(request: web.Request) -> web.StreamResponse:
    await read_request(request)
    return web.json_response({"sample_cancel_enabled": True})


async def create_session(request: web.Request) -> web.StreamResponse:
    await read_request(request)  # its tags and names are labels
    return web.json_response({"type": "create_session", "session_id": new_session()})


async def create_sampling_session(request: web.Request) -> web.StreamResponse:
    """Names a sampling session of a live version, or of ``policy``: then the window gives each sample's version."""
    received = await read_request(request)
    session_id, model = text_of(received.body, "session_id"), requested_model(received.body)
    if not is_session(session_id):
        raise InvalidValue("session_id", session_id, "as create_session has answered")
    await _check_live(received.gateway, model)
    name = sampler_name(session_id, number_of(received.body, "sampling_session_seq_id"), model)
    return web.json_response({"type": "create_sampling_session", "sampling_session_id": name})


async def _check_live(gateway: Gateway, model: str) -> None:
    """Raises NotFound for the name of another model, InvalidValue for a version that is not live."""
    version, live = await gateway.version_for(model), await gateway.live()
    if version is not None and version not in live.versions:
        names = ", ".join(f"{MODEL}-v{each}" for each in live.versions) or "none is"
        raise InvalidValue("model_path", f"{MODEL}-v{version}", f"a live version: {names}", "is not live")


async def asample(request: web.Request) -> web.StreamResponse:
    """Begins a sample. A repeated request, by its sampling session and number, gets the one that was begun."""
    received = await read_request(request)
    ask, gateway, call = sample_request(received.body), received.gateway, received.call
    await _check_live(gateway, ask.requested.model)
    future = request.app[FUTURES].begin(
        ask.name, call.holder, ask.digest, lambda: gateway.turns(call, ask.requested, group=ask.name), scored=ask.scored
    )
    ids = [f"{future.name}.{place}" for place in range(ask.requested.choices)]
    return web.json_response({"request_id": future.name, "sample_sequence_ids": ids})


async def retrieve_future(request: web.Request) -> web.StreamResponse:
    """Waits a while for a sample. 408 means ask again; 410, that it has expired, or that a front that died had it. Then
    the client samples anew, and the group of the first sample, which nobody drives, is withdrawn.
    """
    received = await read_request(request)
    name = text_of(received.body, "request_id")
    future = request.app[FUTURES].find(name, received.call.holder)
    if future is None:
        if is_sample(name) and name not in request.app[FUTURES]:
            await received.gateway.withdraw(name)
        error = NotFound("request_id", name, "that of a sample that was not given up: ask for it again")
        return web.json_response(tinker_body(error), status=HTTPStatus.GONE)
    if not await future.ended(received.gateway.limits.poll_s):
        state = {"queue_state": "paused_capacity", "queue_state_reason": future.waits}
        body = {"type": "try_again", "request_id": name, **(state if future.waits else {"queue_state": "active"})}
        return web.json_response(body, status=HTTPStatus.REQUEST_TIMEOUT)
    future.is_fetched = True
    if future.error is not None:
        return web.json_response({"error": str(future.error), "category": category_of(future.error)})
    headers = {VERSION_HEADER: str(future.turns[0].version)}
    return web.Response(body=encoded_sample(future.turns, future.scored), content_type=CONTENT_TYPE, headers=headers)


async def cancel_future(request: web.Request) -> web.StreamResponse:
    """Gives a sample up. One that has ended or is not known changes nothing."""
    received = await read_request(request)
    future = request.app[FUTURES].find(text_of(received.body, "request_id"), received.call.holder)
    if future is not None:
        future.cancel()
    return web.json_response({})


async def finish_session(request: web.Request) -> web.StreamResponse:
    """Gives up what the client's session has under way."""
    received = await read_request(request)
    request.app[FUTURES].finish(request.match_info["tinker"], received.call.holder)
    return web.json_response({})


async def session_heartbeat(request: web.Request) -> web.StreamResponse:
    await read_request(request)
    return web.json_response({"type": "session_heartbeat"})


async def telemetry(request: web.Request) -> web.StreamResponse:
    """Drops the client's reports about itself."""
    await read_body(request)
    return web.json_response({"status": "accepted"})


async def healthz(request: web.Request) -> web.StreamResponse:
    """Answers while the service does. Raises ServiceUnavailable."""
    await request.app[GATEWAY].live()
    return web.json_response({"status": "ok"})


async def capabilities(request: web.Request) -> web.StreamResponse:
    live = await request.app[GATEWAY].live()
    model = {"model_name": request.app[GATEWAY].model.reference or live.model, "trainable": False, "sampleable": True}
    if live.context_tokens:
        model["max_context_length"] = live.context_tokens
    return web.json_response({"supported_models": [model]})


async def show_sampler(request: web.Request) -> web.StreamResponse:
    sampler = request.match_info["sampler"]
    model, live = sampler_model(sampler), await request.app[GATEWAY].live()
    base_model = request.app[GATEWAY].model.reference or live.model
    return web.json_response({"sampler_id": sampler, "base_model": base_model, "model_path": model})
