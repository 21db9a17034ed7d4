"""The workers' service: one stream each, its messages in and its commands out."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from dora.config import KvConfig
from dora.errors import MISSING, Conflict, InvalidValue
from dora.kvtransfer.peer import SECRET_BYTES
from dora.orchestrator.core import events as on
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.streams import WorkerSession
from dora.orchestrator.worker_checks import checked_hello
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import PermissionDenied, ServicerContext
from dora.rpc.roles import CALLER, Tokens

log = logging.getLogger("dora.service")

HELLO_S: Final = 60.0  # a stream on which no worker has said hello by then is closed
WORKERS_MOST: Final = 4096  # connected at once


class WorkerService(stubs.WorkerServicer):
    """All workers' engines must be alike: the fingerprint of those that are connected holds for a new one."""

    def __init__(self, runtime: Runtime, snapshot_folder: Path, tokens: Tokens) -> None:
        self._runtime = runtime
        self._tokens = tokens
        self._snapshot_folder = snapshot_folder
        self._kv = _kv_settings(runtime.config.kv)

    async def Connect(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: ServicerContext
    ) -> AsyncIterator[pb.WorkerCommand]:
        runtime = self._runtime
        session = self._open(await self._first(request_iterator))
        reading = asyncio.create_task(self._read(session, request_iterator))
        reading.add_done_callback(lambda _: session.give_up())
        try:
            yield pb.WorkerCommand(
                welcome=pb.Welcome(
                    epoch=session.epoch,
                    snapshot_folder=str(self._snapshot_folder),
                    report_period_ms=runtime.config.workers.report_period_ms,
                    kv=self._kv,
                )
            )
            capability = session.capability
            runtime.post(on.WorkerJoined(session.worker_id, session.epoch, capability.slots, capability.kv_tokens))
            log.info("worker %s joined (epoch %d, pid %d)", session.worker_id, session.epoch, session.pid)
            async for command in session.commands():
                yield command
            if reading.done() and not reading.cancelled() and (error := reading.exception()):
                raise error
        finally:
            reading.cancel()
            runtime.sessions.lose(session, "its connection broke")

    async def _first(self, messages: AsyncIterator[pb.WorkerMessage]) -> pb.WorkerMessage | None:
        try:
            async with asyncio.timeout(HELLO_S):
                return await anext(aiter(messages), None)
        except TimeoutError as error:
            raise InvalidValue("hello", MISSING, f"sent within {HELLO_S:g} s") from error

    def _open(self, message: pb.WorkerMessage | None) -> WorkerSession:
        """A session for a worker that says hello. Raises InvalidValue or Conflict for one that cannot serve here."""
        if message is None or not message.HasField("hello"):
            raise InvalidValue("hello", MISSING, "the first message of a worker")
        hello, runtime = message.hello, self._runtime
        capability = checked_hello(hello, runtime.config, runtime.store.reference.vocab_size)
        caller = CALLER.get()
        if not self._tokens.may_take(caller, hello.worker_id):
            allowed = caller.worker_id or "a name that the service has not given to a worker which it started itself"
            raise PermissionDenied("worker_id", hello.worker_id, allowed)
        workers = runtime.sessions.workers
        if hello.worker_id in workers:
            raise Conflict("worker_id", hello.worker_id, "an id that no connected worker has", why="is taken")
        if len(workers) >= WORKERS_MOST:
            raise Conflict("worker_id", hello.worker_id, f"one of at most {WORKERS_MOST}", why="is one too many")
        if any(other.capability.fingerprint != capability.fingerprint for other in workers.values()):
            allowed = "that of the other workers: of the same model, engine, KV layout and dtype"  # it is not told
            raise Conflict("fingerprint", "(not shown)", allowed, why="is another")
        kv = convert.kv_endpoint_from_wire(hello)
        return runtime.sessions.open(hello.worker_id, hello.pid, hello.host, capability, kv)

    async def _read(self, session: WorkerSession, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        """Raises InvalidValue, of which the worker is told, for a message that is wrong; the worker is replaced."""
        try:
            async for message in messages:
                if message.HasField("report"):
                    self._runtime.reports.report(session, message.report)
                elif message.HasField("outcome"):
                    self._runtime.reports.outcome(session, message.outcome)
                elif message.HasField("copy_began"):
                    self._runtime.reports.copy_began(session, message.copy_began)
                else:
                    raise InvalidValue("kind", message.WhichOneof("kind"), "report, outcome or copy_began")
        except InvalidValue as error:
            self._runtime.telemetry.messages_refused += 1
            self._runtime.sessions.replace(session, str(error))
            raise


def _kv_settings(config: KvConfig) -> pb.KvSettings:
    """What all workers of this run have alike: with a secret that nobody else holds."""
    return pb.KvSettings(
        secret=secrets.token_bytes(SECRET_BYTES),
        transports=config.transports.split(","),
        bandwidth_bytes_per_s=config.bandwidth_mb_per_s * 1e6,
        memory_bytes=config.memory_mb * 10**6,
        timeout_s=config.timeout_s,
    )
