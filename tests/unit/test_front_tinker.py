"""The routes of Tinker's protocol: bad input, repeated requests, futures. Its own client: tests/clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import numpy as np
import pytest

from dora.agents.front.gateway import FrontLimits
from dora.agents.front.protocols.tinker import sample_pb2 as pb
from dora.agents.front.protocols.tinker.futures import Futures
from dora.agents.front.source import SessionOpening
from tests.unit.chat_templates import STYLES
from tests.unit.chats import Chat
from tests.unit.front_service import FakeService, front, front_of, fronts, prompt_logprobs_of

POLICY: Final = "tinker://run/sampler_weights/policy"
PROMPT: Final = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}, {"type": "encoded_text", "tokens": [7]}]}
SENT: Final[dict[str, Any]] = {  # what the client sends although nobody asked for it
    "type": "sample",
    "num_samples": 1,
    "prompt": PROMPT,
    "prompt_logprobs": False,
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
    "seq_id": 0,
    "sampling_params": {"max_tokens": 4, "temperature": 1, "top_k": -1, "top_p": 1},
}
Shown = list[tuple[list[int], list[float], int]]


@dataclass
class Api:
    """The calls of a client."""

    base: str
    http: aiohttp.ClientSession
    sampler: str = ""

    async def post(self, route: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(f"{self.base}/api/v1/{route}", json=body) as reply:
            if reply.content_type == "application/x-protobuf":
                return reply.status, pb.SampleResponse.FromString(await reply.read())
            return reply.status, await reply.json()

    async def begin(self, **fields: Any) -> str:
        """Begins a sample, and returns the future's id."""
        status, found = await self.post("asample", {**SENT, "sampling_session_id": self.sampler, **fields})
        assert status == 200, found
        return str(found["request_id"])

    async def fetch(self, request_id: str) -> tuple[int, Any]:
        return await self.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})


@asynccontextmanager
async def client(
    base: str, key: str = "tml-any", path: str = "tinker://run/sampler_weights/policy"
) -> AsyncIterator[Api]:
    async with aiohttp.ClientSession(headers={"X-API-Key": key}) as http:
        api = Api(base, http)
        _, session = await api.post("create_session", {"tags": [], "sdk_version": "0.38.0", "type": "create_session"})
        asked = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "model_path": POLICY}
        status, sampler = await api.post("create_sampling_session", asked)
        assert status == 200, sampler
        assert (await api.post("create_sampling_session", asked))[1] == sampler, "a retry"
        api.sampler = sampler["sampling_session_id"]
        yield api


def shown(result: Any) -> Shown:
    return [
        (np.frombuffer(each.tokens, "<i4").tolist(), np.frombuffer(each.logprobs, "<f4").tolist(), each.stop_reason)
        for each in result.sequences
    ]


async def test_a_sample_is_a_group_of_sessions_of_one_turn() -> None:
    async with front() as (base, service, _), client(base) as api:
        status, found = await api.post("asample", {**SENT, "sampling_session_id": api.sampler, "num_samples": 3})
        assert status == 200 and len(set(found["sample_sequence_ids"])) == 3
        status, result = await api.fetch(found["request_id"])
        assert status == 200
        for session in service.sessions:
            await session.has_ended.wait()
    (opening,) = service.openings
    assert (opening.size, opening.version) == (3, None)
    assert opening.sampling == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for (tokens, logprobs, stop_reason), session in zip(shown(result), service.sessions, strict=True):
        assert [5, 6, 7, *tokens] == session.token_ids and session.ended == (None, {}, {}, "")
        assert logprobs == pytest.approx([-0.5 - each / 1000 for each in tokens]) and len(tokens) == 4
        assert stop_reason == pb.STOP_REASON_LENGTH


@pytest.mark.parametrize(
    ("stop", "sampling"),
    [(None, {}), ([], {"ignore_eos": True}), ("x", {"stop": ("x",)}), (["x", "y"], {"stop": ("x", "y")})],
)
async def test_stops_are_texts_or_tokens_and_an_empty_list_leaves_none(stop: Any, sampling: Any) -> None:
    async with front() as (base, service, _), client(base) as api:
        _, result = await api.fetch(await api.begin(sampling_params={"stop": stop}))
        await api.fetch(await api.begin(sampling_params={"stop": [8, 9]}, seq_id=1))
    assert service.openings[0].sampling == (sampling or None)
    assert service.openings[1].sampling == {"stop_token_ids": (8, 9)}
    assert shown(result)[0][2] == pb.STOP_REASON_STOP


async def test_a_repeated_request_gets_the_sample_that_was_begun() -> None:
    async with front() as (base, service, _), client(base) as api:
        first = await api.begin()
        assert await api.begin() == first
        _, result = await api.fetch(first)
        assert await api.begin() == first and shown((await api.fetch(first))[1]) == shown(result)
        status, error = await api.post("asample", {**SENT, "sampling_session_id": api.sampler, "num_samples": 2})
        assert (status, error["category"]) == (400, "user") and "seq_id = 0" in error["error"]
        assert await api.begin(seq_id=1) != first
    assert [len(session.paths) for session in service.sessions] == [2, 2]


async def test_a_front_gives_the_turn_that_another_has_begun_that_died() -> None:
    """The client repeats its request by number, and the service has the group by its name."""
    async with front() as (base, service, _), client(base) as api:
        (session,) = await service.open(SessionOpening(f"{api.sampler}.0"))
        async for _ in session.stream([5, 6, 7], after_turn=None, max_tokens=4):
            pass
        _, result = await api.fetch(await api.begin())
        await session.has_ended.wait()
    ((tokens, logprobs, _),) = shown(result)
    assert [5, 6, 7, *tokens] == session.token_ids and logprobs == pytest.approx(session.last.logprobs)
    assert len(service.sessions) == session.turn == 1, "no turn is sampled twice"


async def test_a_future_of_a_front_that_died_is_gone_and_its_group_withdrawn() -> None:
    async with front() as (base, service, _), client(base) as api:
        (session,) = await service.open(SessionOpening(f"{api.sampler}.0"))
        status, error = await api.fetch(f"{api.sampler}.0")
        assert (status, error["category"]) == (410, "user") and session.failed
        (other,) = await service.open(SessionOpening("mine"))
        for name in ("mine", "mine.0", f"{api.sampler}.x", f"{api.sampler[:-7]}.0"):
            assert (await api.fetch(name))[0] == 410
        assert not other.failed


async def test_a_client_waits_for_the_window_and_for_a_turn() -> None:
    gate = asyncio.Event()
    async with (
        front(is_full=True, gate=gate, limits=FrontLimits(poll_s=0.01)) as (base, service, _),
        client(base) as api,
    ):
        request_id = await api.begin()
        status, waiting = await api.fetch(request_id)
        assert (status, waiting["type"], waiting["queue_state"]) == (408, "try_again", "paused_capacity")
        assert "window" in waiting["queue_state_reason"]
        service.is_full = False
        while waiting["queue_state"] == "paused_capacity":
            status, waiting = await api.fetch(request_id)
        assert (status, waiting["queue_state"]) == (408, "active")
        gate.set()
        while status == 408:
            status, result = await api.fetch(request_id)
    assert [5, 6, 7, *shown(result)[0][0]] == service.sessions[0].token_ids


@pytest.mark.parametrize("way", ["cancel_future", "finish"])
async def test_a_cancelled_sample_withdraws_its_group(way: str) -> None:
    async with front(gate=asyncio.Event()) as (base, service, _), client(base) as api:
        request_id = await api.begin(num_samples=2)
        while not (service.sessions and service.sessions[-1].is_busy):
            await api.post("session_heartbeat", {"session_id": "x"})
        route = f"sessions/{api.sampler.partition('.')[0]}/finish" if way == "finish" else way
        assert await api.post(route, {"request_id": request_id}) == (200, {})
        assert (await api.fetch(request_id))[1]["category"] == "server"
        assert await api.post("cancel_future", {"request_id": "unknown"}) == (200, {})
        for session in service.sessions:
            await session.has_ended.wait()
    assert all(session.failed for session in service.sessions)


async def test_samples_are_bounded_and_expire() -> None:
    limits = FrontLimits(futures=2, future_s=0.0, poll_s=0.01)
    async with front(gate=asyncio.Event(), limits=limits) as (base, _, gateway), client(base) as api:
        first, _ = [await api.begin(seq_id=number) for number in range(2)]
        status, error = await api.post("asample", {**SENT, "sampling_session_id": api.sampler, "seq_id": 2})
        assert status == 429 and "samples = 2" in error["error"]
        assert (await api.fetch(first))[0] == 408
        await api.post("cancel_future", {"request_id": first})
        assert "error" in (await api.fetch(first))[1]
        third = await api.begin(seq_id=2)  # in the place of the one that was fetched
        assert (await api.fetch(first))[0] == 410
        async with front_of(gateway._source, limits=limits) as (other, _), client(other) as elsewhere:  # type: ignore[arg-type]
            assert (await elsewhere.fetch(third))[0] == 410, "another front does not know it"


async def test_a_sample_that_no_client_asks_for_is_given_up() -> None:
    async def begin() -> list[Any]:
        await asyncio.Event().wait()
        raise AssertionError

    futures = Futures(FrontLimits(future_s=-1.0))
    future = futures.begin("s.0", "me", b"", begin)
    assert futures.find("s.0", "me") is future
    futures.sweep()
    assert futures.find("s.0", "me") is None and await future.ended(1.0) and future.error is not None


async def test_a_key_is_the_fronts_after_its_prefix_and_futures_are_their_holders() -> None:
    async with front(key="secret") as (base, _, _), client(base, "tml-secret") as api:
        request_id = await api.begin()
        assert (await api.fetch(request_id))[0] == 200
        async with aiohttp.ClientSession(headers={"X-API-Key": "tml-wrong"}) as http:
            status, error = await Api(base, http).fetch(request_id)
            assert (status, error["category"]) == (401, "user")
    async with front() as (base, service, _), client(base, "tml-a") as api, client(base, "tml-b") as other:
        request_id = await api.begin()
        assert (await other.fetch(request_id))[0] == 410 and (await api.fetch(request_id))[0] == 200
        assert not any(session.failed for session in service.sessions)


async def test_with_the_base_url_of_a_session_samples_are_its_turns() -> None:
    async with front() as (base, service, _), client(f"{base}/sessions/s1") as api:
        tokens = [5, 6, 7]
        for number in range(3):
            chunk = {"type": "encoded_text", "tokens": tokens}
            _, result = await api.fetch(await api.begin(seq_id=number, prompt={"chunks": [chunk]}, sampling_params={}))
            tokens = [*tokens, *shown(result)[0][0], 9]
        assert (await api.post("asample", {**SENT, "sampling_session_id": api.sampler, "seq_id": 9}))[0] == 200
    (session,) = service.sessions
    assert session.turn >= 3 and session.paths[3] == tokens[:-1] and session.ended is None


async def test_the_logprobs_of_a_prompt_come_once_with_its_samples() -> None:
    """``prompt_logprobs_last_n`` leaves the earlier ones out. The first of several samples alone computes them."""
    expected = prompt_logprobs_of([5, 6, 7])
    asked: dict[str, Any]
    async with front() as (base, service, _), client(base) as api:
        for number, (name, value, none) in enumerate(
            (("num_samples", 2, 1), ("prompt_logprobs_last_n", 1, 2), ("prompt_logprobs", False, 3))
        ):
            asked = {"prompt_logprobs": True, name: value}
            request_id = await api.begin(seq_id=number, **asked)
            _, result = await api.fetch(request_id)
            found = np.frombuffer(result.prompt_logprobs, "<f4")
            if none == 3:
                assert not result.HasField("prompt_logprobs")
            else:
                assert np.isnan(found[:none]).all() and found[none:].tolist() == list(expected[none - 1 :])
        asked = {"prompt_logprobs": True, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}}
        _, result = await api.fetch(await api.begin(seq_id=9, **asked))
        assert np.isnan(np.frombuffer(result.prompt_logprobs, "<f4")).tolist() == [True]
    assert [len(session.last.prompt_logprobs) for session in service.sessions] == [2, 0, 2, 0, 0]


async def test_another_front_finds_the_logprobs_of_a_prompt() -> None:
    """A front died after the sample had ended: the next one gets it from the service, and samples nothing."""
    fake = FakeService(Chat(STYLES["qwen2.5"]))
    async with fronts(fake, 2) as ((first, second), _), client(first) as api:
        request_id = await api.begin(prompt_logprobs=True)
        await api.fetch(request_id)
        api.base = second
        assert await api.begin(prompt_logprobs=True) == request_id
        _, result = await api.fetch(request_id)
        assert np.frombuffer(result.prompt_logprobs, "<f4")[1:].tolist() == list(prompt_logprobs_of([5, 6, 7]))
    assert len(fake.sessions) == 1


def changed(place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns a body with one other value, of a field or of a field within one."""
    outer, *inner = place
    return {**SENT, outer: {**SENT[outer], inner[0]: value} if inner else value}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("prompt_logprobs",), 1),
        (("topk_prompt_logprobs",), 3),
        (("prompt_logprobs_last_n",), 1),
        (("prompt_logprobs_last_n",), "1"),
        (("target_prompt_logprobs",), {"data": [1]}),
        (("topk_sample_logprobs",), 1),
        (("prompt_alt_tokens_k",), 2),
        (("record_stability_info",), True),
        (("num_samples",), 0),
        (("num_samples",), 129),
        (("num_samples",), True),
        (("seq_id",), None),
        (("seq_id",), -1),
        (("sampling_session_id",), 5),
        (("sampling_session_id",), "x"),
        (("temperature",), 1),
        (("prompt",), None),
        (("prompt",), {"chunks": []}),
        (("prompt",), {"chunks": [{"type": "image", "data": ""}]}),
        (("prompt",), {"chunks": [{"type": "encoded_text", "tokens": []}]}),
        (("prompt",), {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}),
        (("sampling_params",), []),
        (("sampling_params", "top_p"), 2),
        (("sampling_params", "top_k"), -2),
        (("sampling_params", "stop"), [1, "a"]),
        (("sampling_params", "seed"), -1),
        (("sampling_params", "logit_bias"), {}),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(place: tuple[str, ...], value: Any) -> None:
    async with front() as (base, service, _), client(base) as api:
        body = changed(place, value)
        body.setdefault("sampling_session_id", api.sampler)
        status, error = await api.post("asample", body)
        assert (status, error["category"]) == (400, "user") and ".".join(place) in error["error"], error
    assert not service.openings


@pytest.mark.parametrize(
    ("fields", "status", "names"),
    [
        ({"model_path": "tinker://run/sampler_weights/policy-v3"}, 400, "policy-v6, policy-v7"),
        ({"model_path": "policy-v3"}, 400, "policy-v6, policy-v7"),
        ({"base_model": "gpt-9"}, 404, "gpt-9"),
        ({"model_path": "tinker://run/weights/policy"}, 400, "model_path"),
        ({"model_path": "tinker:///sampler_weights/policy"}, 400, "model_path"),
        ({"model_path": 5}, 400, "model_path"),
        ({"session_id": "mine"}, 400, "session_id"),
        ({"sampling_session_seq_id": "0"}, 400, "sampling_session_seq_id"),
        ({"model_path": "tinker://run/sampler_weights/policy-v6"}, 200, "policy-v6"),
        ({"base_model": "styled"}, 200, "styled"),
    ],
)
async def test_weights_are_a_live_version(fields: dict[str, Any], status: int, names: str) -> None:
    async with front() as (base, service, _), client(base) as api:
        asked = {"session_id": api.sampler.partition(".")[0], "sampling_session_seq_id": 1, **fields}
        found, reply = await api.post("create_sampling_session", asked)
        assert found == status and names in str(reply)
        if status == 200:
            api.sampler = reply["sampling_session_id"]
            await api.fetch(await api.begin())
            async with api.http.get(f"{base}/api/v1/samplers/{api.sampler}") as shown_sampler:
                assert await shown_sampler.json() == {
                    "sampler_id": api.sampler,
                    "base_model": "styled",
                    "model_path": names,
                }
            assert service.openings[0].version == (6 if names == "policy-v6" else None)
        else:
            assert reply["category"] == "user"


async def test_routes_of_training_say_where_training_goes_on() -> None:
    async with front() as (base, _, _), client(base) as api:
        status, error = await api.post("forward_backward", {})
        assert status == 404 and "trainer" in error["error"]
        async with api.http.get(f"{base}/api/v1/healthz") as reply:
            assert await reply.json() == {"status": "ok"}
        async with api.http.get(f"{base}/api/v1/get_server_capabilities") as reply:
            (model,) = (await reply.json())["supported_models"]
        assert model == {"model_name": "styled", "max_context_length": 4000, "trainable": False, "sampleable": True}
        assert await api.post("telemetry", {"events": []}) == (200, {"status": "accepted"})
        assert (await api.post("client/config", {}))[1] == {"sample_max_concurrent_requests": 256}
        assert (await api.post("client/dynamic_config", {}))[1] == {"sample_cancel_enabled": True}
