"""The traces of a whole service with fake engines, as a collector gets them over OTLP."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dora.client import Operator, Prompts, Sessions, Trainer
from dora.client.sessions import Session
from dora.orchestrator.main import ServiceHandle
from dora.rpc import dora_pb2 as pb
from dora.rpc.dora_pb2_grpc import PromptsStub
from dora.rpc.proven import ProvenChannel, Prover
from tests.service import configured, during, move_one, running, train, train_beside

STEPS: Final = 3
SUBMIT: Final = "/dora.v1.Prompts/Submit"
CLIENT: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Collector:
    """What has come, by span id."""

    url: str = ""
    spans: dict[bytes, Any] = field(default_factory=dict)

    async def take(self, request: web.Request) -> web.Response:
        content = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            for scope in resource.scope_spans:
                self.spans.update((span.span_id, span) for span in scope.spans)
        return web.Response()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans.values() if span.name == name]

    def parents(self, name: str) -> set[str]:
        """The names of the spans that those of this name are part of."""
        return {self.spans[span.parent_span_id].name if span.parent_span_id else "" for span in self.named(name)}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, application = Collector(), web.Application()
    application.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


def traced(model: Path, url: str, **fields: Any) -> Any:
    plain = {"workers__engine": "fake", "workers__count": 2, "window__size": 2}
    return configured(model, service__traces=url, service__traces_fraction=1.0, **{**plain, **fields})


async def submit_within(handle: ServiceHandle, prompt: dict[str, Any], traceparent: str) -> None:
    """Submits a prompt as a client does that is part of a trace."""
    async with grpc.aio.insecure_channel(handle.address) as channel:
        sent = await ProvenChannel(channel, Prover(handle.address, handle.token)).credential(SUBMIT)
        metadata = (*sent.metadata, ("traceparent", traceparent))
        await PromptsStub(channel).Submit(pb.SubmitRequest(prompts=[pb.Prompt(**prompt)]), metadata=metadata)


async def ask_once(session: Session) -> None:
    if not session.turn.number:
        await session.ask([5, 6], name="tool")
    await session.end(1.0)


async def test_sessions_turns_handoffs_steps_and_publications_are_spans(tiny_dense: Path) -> None:
    long = {"rollout__ignore_eos": True, "rollout__max_tokens": 1500, "workers__max_model_len_tokens": 2048}
    async with collecting() as collector:
        async with (
            running(traced(tiny_dense, collector.url, workers__kv_tokens=16384, **long)) as handle,
            Operator(handle.address, handle.token) as operator,
            Trainer(handle.address, token=handle.token) as trainer,
        ):
            steps = len(await train_beside(handle, trainer, STEPS, 4, move_one(operator)))
        chat = f"chat {tiny_dense}"
        assert collector.parents("step") == {""} and collector.parents("publish") == {"step"}
        assert collector.parents(chat) == {"session"} == collector.parents("move")
        trained = {span.attributes[0].value.int_value for span in collector.named("publish")}
        assert trained == set(range(steps))
        ended = [span for span in collector.named("session") if not span.status.code]
        assert len(ended) >= 4 * 4 * steps and all(span.end_time_unix_nano for span in ended)


async def test_a_session_of_two_turns_has_two_spans_and_a_collector_that_is_away_costs_nothing(
    tiny_dense: Path,
) -> None:
    settings = {"prompts": "none", "reward__function": "dora.rewards.tiny:score", "rollout__max_tokens": 12}
    prompts = [{"text": "ab", "prompt_id": f"p{n}", "group_size": 2, "environment": "tool"} for n in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with collecting() as collector:
        for url in (collector.url, away):
            async with (
                running(traced(tiny_dense, url, **settings)) as handle,
                Trainer(handle.address, token=handle.token) as trainer,
                Prompts(handle.address, handle.token) as submitting,
                Sessions(handle.address, handle.token) as sessions,
            ):
                await submitting.submit(prompts[1:])
                await submit_within(handle, prompts[0], CLIENT)
                driving = asyncio.create_task(sessions.drive("tool", ask_once))
                taken = await during(driving, train(handle, trainer, 1, groups=2))
                driving.cancel()
            assert len(taken[0]) == 2
        within = [span for span in collector.named("session") if span.trace_id.hex() == CLIENT.split("-")[1]]
        assert [span.parent_span_id.hex() for span in within] == [CLIENT.split("-")[2]] * 2
        turns = [span.parent_span_id for span in collector.named(f"chat {tiny_dense}")]
        assert sorted(map(turns.count, set(turns))) == [2, 2, 2, 2]
