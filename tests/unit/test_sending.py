"""The messages of a client's call: each is sent once, and what reads them ends with the call."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from dora.errors import InvalidValue
from dora.rpc.interceptor import server_interceptors
from dora.rpc.proven import ProvenChannel, proven_channel
from dora.rpc.roles import ServiceTokens
from tests.owner_token import owner_token
from tests.refusals import refused_call
from tests.sweeps import full

OWNER = owner_token("owner")
STREAM, UPLOAD = "/dora.v1.Host/Join", "/dora.v1.Trainer/UploadWeights"
FIRST = b"first"
TURNS = 9  # of the event loop: the service in this process closes its own generators


class Service(grpc.GenericRpcHandler):
    """Takes messages of both kinds of streams. Refuses a call whose first message says so."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def service(self, details: Any) -> Any:
        if details.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self._each, bytes, bytes)
        return grpc.stream_unary_rpc_method_handler(self._all, bytes, bytes)

    async def _each(self, messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            if message == b"refuse":
                raise InvalidValue("name", "dup", "another")
            self.taken.append(message)
            yield message

    async def _all(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([message async for message in self._each(messages, context)])


class Sent:
    """The messages of a client. After them it waits until the call has ended."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = messages
        self.is_closed = False

    async def each(self, waits: bool) -> AsyncIterator[bytes]:
        try:
            for message in self._messages:
                yield message
            if waits:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def with_service(act: Any, forgotten: bool) -> Service:
    """Lets ``act`` call a service. ``forgotten``: the client has a session that the service does not know."""
    service = Service()
    server = grpc.aio.server(interceptors=server_interceptors(ServiceTokens(OWNER)))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with proven_channel(f"127.0.0.1:{port}", OWNER) as channel:
            if forgotten:
                sent = await channel.credential(STREAM)
                sent.session.service_nonce = bytes(len(sent.session.service_nonce))
            await act(channel)
    finally:
        await server.stop(None)
    return service


def stream(channel: ProvenChannel) -> Any:
    return channel.stream_stream(STREAM, request_serializer=bytes, response_deserializer=bytes)


def upload(channel: ProvenChannel) -> Any:
    return channel.stream_unary(UPLOAD, request_serializer=bytes, response_deserializer=bytes)


@pytest.mark.parametrize(
    ("is_refused", "forgotten"),
    [
        (False, False),
        (True, True),
        *full((False, True), (True, False)),
    ],
)
@pytest.mark.parametrize("kind", ["stream", "upload"])
async def test_each_message_is_sent_once_and_nothing_reads_on_after_the_call(
    kind: str, is_refused: bool, forgotten: bool
) -> None:
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    before, sent = asyncio.all_tasks(), Sent(FIRST, b"2", b"refuse" if is_refused else b"3")

    async def act(channel: ProvenChannel) -> None:
        messages = sent.each(waits=kind == "stream")
        if kind == "upload":
            assert await upload(channel)(messages) == b"first23"
            return
        call = stream(channel)(messages)
        assert [await call.read() for _ in range(2)] == [FIRST, b"2"]
        if is_refused:
            await call.read()
        call.cancel()

    async def acts(channel: ProvenChannel) -> None:
        if not is_refused:
            await act(channel)
            return
        with refused_call(InvalidValue, field="name", value="dup"):
            await act(channel)

    service = await with_service(acts, forgotten)
    assert service.taken == [FIRST, b"2", *([] if is_refused else [b"3"])][: len(service.taken)]
    gc.collect()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert sent.is_closed and not noise and asyncio.all_tasks() == before
