"""Connections without a call hold places for seconds only: they lock nobody out for long."""

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from dora.rpc import channel
from dora.rpc.channel import open_channel, server_options

PLACES = 8
IDLE_S = 0.5
READY_S = 20.0  # far more than the idle time
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # HTTP/2's preface, empty settings


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A server with the service's options, but fewer places and a shorter time."""
    monkeypatch.setattr(channel, "connections_most", lambda: PLACES)
    monkeypatch.setattr(channel, "IDLE_S", IDLE_S)
    monkeypatch.setattr(channel, "HANDSHAKE_S", IDLE_S)
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.mark.parametrize("sent", [b"", b"G", GREETING], ids=["nothing", "a byte", "a greeting"])
async def test_a_client_gets_in_past_connections_that_call_nothing(address: str, sent: bytes) -> None:
    host, _, port = address.rpartition(":")
    idle = []
    for _ in range(PLACES):
        reader, writer = await asyncio.open_connection(host, int(port), family=socket.AF_INET)
        writer.write(sent)
        await writer.drain()
        idle.append((reader, writer))
    async with open_channel(address) as client:
        await asyncio.wait_for(client.channel_ready(), READY_S)
    for reader, writer in idle:
        await asyncio.wait_for(reader.read(), READY_S)  # the server has ended it
        writer.close()
