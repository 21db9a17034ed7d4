"""A worker's or pool's stream to the orchestrator: gRPC in a thread of its own, plain queues towards the main one."""

import asyncio
import contextlib
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final

import grpc

from dora.data.types import NO_KV, EngineCapability, KvEndpoint, PoolCapability
from dora.errors import DoraError
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.kvtransfer.transports.arena import Arena
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServiceUnavailable, from_rpc_error
from dora.rpc.proven import Prover, proven_channel
from dora.rpc.sealed import unsealed
from dora.tls.contexts import Contexts

MESSAGES_QUEUED_MAX = 65536  # unread reports, beyond which the service counts as lost
OUTCOMES_TOGETHER_MAX = 256
SNAPSHOTS: Final = "kv"  # of a host's folder: shared memory for KV
WEIGHTS: Final = "weights"  # and the store of live versions
OPEN_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0


def plane_of(
    listener: Listener,
    name: str,
    fingerprint: str,
    welcome: pb.Welcome,
    arena_bytes: int = 0,
    arena: Arena | None = None,
    tls: Contexts | None = None,
) -> DataPlane:
    """Returns this process's data plane, by the service's settings and its own ``tls``. A pool has an arena."""
    settings = PlaneSettings(
        secret=welcome.kv.secret,
        folder=Path(welcome.snapshot_folder),
        transports=tuple(welcome.kv.transports),
        bandwidth_bytes_per_s=welcome.kv.bandwidth_bytes_per_s,
        memory_bytes=welcome.kv.memory_bytes,
        timeout_s=welcome.kv.timeout_s,
        tls=tls,
    )
    return DataPlane(listener, Identity(name, welcome.epoch, fingerprint, this_host()), settings, arena_bytes, arena)


def at_host(welcome: pb.Welcome, folder: str) -> pb.Welcome:
    """Returns ``welcome`` as it is on a host with a ``folder`` of its own, or on the service's if that is empty."""
    if folder:
        welcome.snapshot_folder = str(Path(folder) / SNAPSHOTS)
        welcome.weights_folder = str(Path(folder) / WEIGHTS)
    return welcome


class SessionLink:
    """``begin`` once, then ``take`` commands and ``send`` messages from one other thread, ``close`` at the end.

    A broken stream ends the epoch: ``take`` raises. The process then ends, or connects with another link.
    """

    def __init__(
        self,
        prover: Prover,
        name: str,
        capability: EngineCapability | PoolCapability,
        kv: KvEndpoint = NO_KV,
        held: pb.WorkerHello | pb.PoolHello | None = None,
        host: str = "",
    ) -> None:
        """``prover`` outlives its links. ``name`` and ``capability`` are of the worker or pool. ``held`` is its hello's
        part about an earlier link, if it has outlived one. ``host`` is its host's name, or the system's if empty.
        """
        self.address = prover.address
        self._prover = prover
        process, host = os.getpid(), host or socket.gethostname()
        self._hello = (
            pb.WorkerMessage(pool_hello=convert.pool_hello_to_wire(name, process, host, capability, kv))
            if isinstance(capability, PoolCapability)
            else pb.WorkerMessage(hello=convert.hello_to_wire(name, process, host, capability, kv))
        )
        if self._hello.HasField("hello"):
            self._hello.hello.takes_start_requests = True
        if held is not None:
            getattr(self._hello, self._hello.WhichOneof("kind") or "").MergeFrom(held)
        self.is_lost = False  # the connection broke; else the service has ended the stream
        self._inbox: queue.SimpleQueue[pb.WorkerCommand | DoraError] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue(MESSAGES_QUEUED_MAX)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def begin(self) -> None:
        """Starts to connect. Welcome is the first command that ``take`` returns."""
        self._thread.start()

    def take(self, timeout_s: float) -> pb.WorkerCommand | None:
        """Returns the next command, or None if none came in time (at once if 0). Raises once the stream is broken."""
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
            raise ServiceUnavailable(f"the stream to {self.address} has ended", "address", self.address) from error

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
            self._inbox.put(ServiceUnavailable(f"{self.address} reads nothing: {MESSAGES_QUEUED_MAX} messages wait"))

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._talk())
        finally:
            self._inbox.put(ServiceUnavailable(f"the stream to {self.address} has ended", "address", self.address))

    async def _talk(self) -> None:
        async with proven_channel(self.address, self._prover, proxied=False) as channel:
            call: Any = stubs.WorkerStub(channel).Connect(self._messages())
            try:
                async for command in call:
                    for each in one_by_one(unsealed(command, call.session.key)):
                        self._inbox.put(each)
            except (grpc.aio.AioRpcError, DoraError) as error:
                found = error if isinstance(error, DoraError) else from_rpc_error(error)
                self.is_lost = isinstance(found, ServiceUnavailable)
                self._inbox.put(found)

    async def _messages(self) -> AsyncIterator[pb.WorkerMessage]:
        """Yields messages. Outcomes that are ready at once go in one message."""
        yield self._hello
        message = await self._outbox.get()
        while message is not None:
            if not message.HasField("outcome"):
                yield message
                message = await self._outbox.get()
                continue
            outcomes = [message.outcome]
            while not self._outbox.empty() and len(outcomes) < OUTCOMES_TOGETHER_MAX:
                message = self._outbox.get_nowait()
                if message is None or not message.HasField("outcome"):
                    break
                outcomes.append(message.outcome)
            yield _together(outcomes)
            if message is not None and message.HasField("outcome"):
                message = await self._outbox.get()


def one_by_one(command: pb.WorkerCommand) -> Iterable[pb.WorkerCommand]:
    """Splits a message that starts several requests into one command each; any other command stays as it is."""
    if not command.HasField("start_requests"):
        return (command,)
    requests = command.start_requests.requests
    return (pb.WorkerCommand(command_id=request.command_id, start_request=request) for request in requests)


def _together(outcomes: list[pb.WorkerOutcome]) -> pb.WorkerMessage:
    if len(outcomes) == 1:
        return pb.WorkerMessage(outcome=outcomes[0])
    return pb.WorkerMessage(outcomes=pb.WorkerOutcomes(outcomes=outcomes))
