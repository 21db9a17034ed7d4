"""A worker's or pool's stream to the orchestrator: gRPC in a thread of its own, plain queues towards the main one."""

import asyncio
import contextlib
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from dora.errors import DoraError
from dora.kvtransfer.door import Door
from dora.kvtransfer.peer import Identity, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.channel import bearer, open_channel
from dora.rpc.errors import ServiceUnavailable, from_rpc_error
from dora.types import NO_KV, EngineCapability, KvEndpoint, PoolCapability

MESSAGES_QUEUED_MAX = 65536  # reports the service has not read; beyond that it is as good as gone
OPEN_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


def plane_of(door: Door, name: str, fingerprint: str, welcome: pb.Welcome, arena_bytes: int = 0) -> DataPlane:
    """This process's part of the data plane, as the service wants it. ``arena_bytes``: of a pool."""
    settings = PlaneSettings(
        secret=welcome.kv.secret,
        folder=Path(welcome.snapshot_folder),
        transports=tuple(welcome.kv.transports),
        bandwidth_bytes_per_s=welcome.kv.bandwidth_bytes_per_s,
        memory_bytes=welcome.kv.memory_bytes,
        timeout_s=welcome.kv.timeout_s,
    )
    return DataPlane(door, Identity(name, welcome.epoch, fingerprint, this_host()), settings, arena_bytes)


class Link:
    """``open`` once, then ``take`` commands and ``send`` messages from one other thread, ``close`` at the end.

    A broken stream ends the worker's epoch: ``take`` raises, the process ends, and whoever started it starts it again.
    """

    def __init__(
        self,
        address: str,
        token: str,
        name: str,
        capability: EngineCapability | PoolCapability,
        kv: KvEndpoint = NO_KV,
    ) -> None:
        """``name``: of the worker, or of the pool, as ``capability`` is of the one or the other."""
        self._address = address
        self._token = token
        process, host = os.getpid(), socket.gethostname()
        self._hello = (
            pb.WorkerMessage(pool_hello=convert.pool_hello_to_wire(name, process, host, capability, kv))
            if isinstance(capability, PoolCapability)
            else pb.WorkerMessage(hello=convert.hello_to_wire(name, process, host, capability, kv))
        )
        self._inbox: queue.SimpleQueue[pb.WorkerCommand | DoraError] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue(MESSAGES_QUEUED_MAX)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def open(self) -> pb.Welcome:
        """Connects, says hello. Raises the service's refusal, or ServiceUnavailable."""
        self._thread.start()
        first = self.take(OPEN_TIMEOUT_S)
        if first is None or not first.HasField("welcome"):
            raise ServiceUnavailable(f"{self._address} did not say welcome within {OPEN_TIMEOUT_S:g} s")
        return first.welcome

    def take(self, timeout_s: float) -> pb.WorkerCommand | None:
        """The next command; None if none came in time (0: do not wait). Raises once the stream is broken."""
        try:
            taken = self._inbox.get(block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
        if isinstance(taken, DoraError):
            raise taken
        return taken

    def send(self, message: pb.WorkerMessage) -> None:
        """Queues a message. Raises ServiceUnavailable once the stream has ended."""
        try:
            self._loop.call_soon_threadsafe(self._put, message)
        except RuntimeError as error:  # its loop is closed
            raise ServiceUnavailable(f"the stream to {self._address} has ended") from error

    def close(self) -> None:
        """Sends what is queued, then ends the stream."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._put, None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _put(self, message: pb.WorkerMessage | None) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._inbox.put(ServiceUnavailable(f"{self._address} reads nothing: {MESSAGES_QUEUED_MAX} messages wait"))

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._talk())
        finally:
            self._inbox.put(ServiceUnavailable(f"the stream to {self._address} has ended"))

    async def _talk(self) -> None:
        async with open_channel(self._address, proxied=False) as channel:
            call = stubs.WorkerStub(channel).Connect(self._messages(), metadata=bearer(self._token))
            try:
                async for command in call:
                    self._inbox.put(command)
            except grpc.aio.AioRpcError as error:
                self._inbox.put(from_rpc_error(error))

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        yield self._hello
        while (message := await self._outbox.get()) is not None:
            yield message
