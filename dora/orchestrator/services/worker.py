"""The workers' service: one stream each, its messages in and its commands out."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

from dora.errors import Conflict, InvalidValue
from dora.orchestrator.book import BookError
from dora.orchestrator.core import events as on
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.streams import WorkerSession
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import ServicerContext

log = logging.getLogger("dora.service")

WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class WorkerService(stubs.WorkerServicer):
    """All workers' engines must be alike: the first one's fingerprint holds for the others."""

    def __init__(self, runtime: Runtime, snapshot_folder: Path) -> None:
        self._runtime = runtime
        self._snapshot_folder = snapshot_folder
        self._fingerprint = ""

    async def Connect(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: ServicerContext
    ) -> AsyncIterator[pb.WorkerCommand]:
        runtime = self._runtime
        session = self._open(await anext(aiter(request_iterator), None))
        reading = asyncio.create_task(self._read(session, request_iterator))
        reading.add_done_callback(lambda _: session.give_up())
        try:
            yield pb.WorkerCommand(
                welcome=pb.Welcome(
                    epoch=session.epoch,
                    snapshot_folder=str(self._snapshot_folder),
                    report_period_ms=runtime.config.workers.report_period_ms,
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

    def _open(self, message: pb.WorkerMessage | None) -> WorkerSession:
        """A session for a worker that says hello. Raises InvalidValue or Conflict for one that cannot serve here."""
        if message is None or not message.HasField("hello"):
            raise InvalidValue("hello", None, "the first message of a worker")
        hello, runtime = message.hello, self._runtime
        capability = convert.capability_from_wire(hello)
        if not WORKER_ID.fullmatch(hello.worker_id):
            raise InvalidValue("worker_id", hello.worker_id, "1 to 64 letters, digits, '.', '_' or '-'")
        if hello.worker_id in runtime.sessions.workers:
            raise Conflict("worker_id", hello.worker_id, "an id that no connected worker has")
        if capability.slots < 1 or capability.kv_tokens < 1:
            raise InvalidValue("slots, kv_tokens", (capability.slots, capability.kv_tokens), "at least 1 each")
        if self._fingerprint not in ("", capability.fingerprint):
            raise Conflict("fingerprint", capability.fingerprint, f"{self._fingerprint}, as the other workers' engines")
        if capability.max_model_len_tokens < runtime.config.workers.max_model_len_tokens:
            limit = runtime.config.workers.max_model_len_tokens
            raise InvalidValue("max_model_len_tokens", capability.max_model_len_tokens, f"at least {limit}")
        self._fingerprint = capability.fingerprint
        return runtime.sessions.open(hello.worker_id, hello.pid, hello.host, capability)

    async def _read(self, session: WorkerSession, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:
            try:
                if message.HasField("report"):
                    self._runtime.reports.report(session, message.report)
                elif message.HasField("outcome"):
                    self._runtime.reports.outcome(session, message.outcome)
                else:
                    raise InvalidValue("kind", message.WhichOneof("kind"), "report or outcome")
            except (BookError, InvalidValue) as error:
                self._runtime.sessions.replace(session, str(error))
                return
