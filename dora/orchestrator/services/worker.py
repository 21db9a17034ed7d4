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
from dora.orchestrator.streams import PoolSession, WorkerSession
from dora.orchestrator.worker_checks import checked_hello, checked_pool_hello
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import PermissionDenied, ServicerContext
from dora.rpc.roles import CALLER, Tokens

log = logging.getLogger("dora.service")

HELLO_S: Final = 60.0  # a stream on which no worker has said hello by then is closed
WORKERS_MOST: Final = 4096  # connected at once
POOLS_MOST: Final = 256
KINDS: Final = {WorkerSession: "report, outcome or copy_began", PoolSession: "pool_report or outcome"}


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
            log.info("%s joined (epoch %d, pid %d)", session.worker_id, session.epoch, session.pid)
            if isinstance(session, WorkerSession):
                capability = session.capability
                runtime.post(on.WorkerJoined(session.worker_id, session.epoch, capability.slots, capability.kv_tokens))
            self._introduce_pools()
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

    def _introduce_pools(self) -> None:
        """Tells the core how many tokens each pool holds, once a worker has said how large its KV is."""
        runtime, token_bytes = self._runtime, self._runtime.sessions.kv_token_bytes()
        for pool in list(runtime.sessions.pools.values()) if token_bytes else ():
            kv_tokens = (pool.capability.memory_bytes + pool.capability.spill_bytes) // token_bytes
            if not pool.kv_tokens and kv_tokens:
                pool.kv_tokens = kv_tokens
                runtime.post(on.PoolJoined(pool.worker_id, pool.epoch, kv_tokens))

    def _open(self, message: pb.WorkerMessage | None) -> WorkerSession | PoolSession:
        """A session for who says hello. Raises InvalidValue or Conflict for one that cannot serve here."""
        if message is not None and message.HasField("pool_hello"):
            pool, sessions = message.pool_hello, self._runtime.sessions
            held = checked_pool_hello(pool)
            self._check_name("pool_id", pool.pool_id, len(sessions.pools), POOLS_MOST)
            return sessions.open_pool(pool.pool_id, pool.pid, pool.host, held, convert.kv_endpoint_from_wire(pool))
        if message is None or not message.HasField("hello"):
            raise InvalidValue("hello", MISSING, "the first message of a worker")
        hello, runtime = message.hello, self._runtime
        capability = checked_hello(hello, runtime.config, runtime.store.reference.vocab_size)
        workers = runtime.sessions.workers
        self._check_name("worker_id", hello.worker_id, len(workers), WORKERS_MOST)
        if any(other.capability.fingerprint != capability.fingerprint for other in workers.values()):
            allowed = "that of the other workers: of the same model, engine, KV layout and dtype"  # it is not told
            raise Conflict("fingerprint", "(not shown)", allowed, why="is another")
        kv = convert.kv_endpoint_from_wire(hello)
        return runtime.sessions.open(hello.worker_id, hello.pid, hello.host, capability, kv)

    def _check_name(self, field: str, name: str, connected: int, most: int) -> None:
        """Raises PermissionDenied or Conflict where a worker or pool may not take this name."""
        caller = CALLER.get()
        if not self._tokens.may_take(caller, name):
            allowed = caller.worker_id or "a name that the service has not given to a worker which it started itself"
            raise PermissionDenied(field, name, allowed)
        if self._runtime.sessions.end(name) is not None:
            raise Conflict(field, name, "an id that no connected worker or pool has", why="is taken")
        if connected >= most:
            raise Conflict(field, name, f"one of at most {most}", why="is one too many")

    async def _read(self, session: WorkerSession | PoolSession, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        """Raises InvalidValue, of which the worker is told, for a message that is wrong; the worker is replaced."""
        try:
            async for message in messages:
                if isinstance(session, PoolSession) and message.HasField("pool_report"):
                    self._runtime.reports.pool(session, message.pool_report)
                elif isinstance(session, WorkerSession) and message.HasField("report"):
                    self._runtime.reports.report(session, message.report)
                elif message.HasField("outcome"):
                    self._runtime.reports.outcome(session, message.outcome)
                elif isinstance(session, WorkerSession) and message.HasField("copy_began"):
                    self._runtime.reports.copy_began(session, message.copy_began)
                else:
                    raise InvalidValue("kind", message.WhichOneof("kind"), KINDS[type(session)])
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
