"""One service for the tests of a module, and an environment without anything of the user's."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from dora.rpc.channel import server_options
from dora.rpc.dora_pb2_grpc import (
    add_HostServicer_to_server,
    add_OperatorServicer_to_server,
    add_PromptsServicer_to_server,
    add_SessionsServicer_to_server,
)
from dora.rpc.interceptor import server_interceptors
from dora.rpc.roles import ServiceTokens
from tests.unit.cli.service import TOKEN, CannedHosts, CannedOperator, CannedPrompts, CannedSessions


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A CannedOperator behind the service's own interceptors, in a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(interceptors=server_interceptors(ServiceTokens(TOKEN)), options=server_options())
        add_OperatorServicer_to_server(CannedOperator(), server)
        add_PromptsServicer_to_server(CannedPrompts(), server)
        add_HostServicer_to_server(CannedHosts(), server)
        add_SessionsServicer_to_server(CannedSessions(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of this machine's user is found, none is left behind; help is not coloured or cut."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in ("DORA_TOKEN", "DORA_ADDRESS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
