"""The gRPC service for workers: one stream each, with messages and commands."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.config import Config, KvConfig
from dora.core import events as on
from dora.errors import MISSING, Conflict, InvalidValue
from dora.journal import records
from dora.kvtransfer.peer import SECRET_BYTES
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.recovery.incarnation import Incarnation
from dora.orchestrator.rollout.core import Core
from dora.orchestrator.rollout.journal import Journal
from dora.orchestrator.rollout.reports import WorkerReports
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.streams import MemberSessions, PoolSession, WorkerSession
from dora.orchestrator.rollout.turns import MessageTurns
from dora.orchestrator.rollout.worker_checks import checked_hello, checked_pool_hello
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc import dora_pb2_grpc as stubs
from dora.rpc.errors import PermissionDenied, ServicerContext
from dora.rpc.roles import CALLER, SESSION, ServiceTokens
from dora.rpc.sealed import sealed
from dora.system.log_lines import about
from dora.weights.store import WeightStore

log = logging.getLogger("dora.service")

HELLO_S: Final = 60.0  # a stream without a hello by then is closed
WORKERS_MAX: Final = 4096  # connected at once
POOLS_MAX: Final = 256
KINDS: Final = {WorkerSession: "report, outcome or copy_began", PoolSession: "pool_report or outcome"}


@dataclass(eq=False, repr=False)
class WorkerService(stubs.WorkerServicer):
    """Connects workers and pools. A new worker's engine must have the fingerprint of those of its precision."""

    _config: Config
    _core: Core
    _buffer: ResponseBuffer
    _journal: Journal
    _store: WeightStore
    _sessions: MemberSessions
    _hosts: Hosts
    _reports: WorkerReports
    _incarnation: Incarnation
    _snapshot_folder: Path
    _tokens: ServiceTokens
    _kv_secret: bytes = b""  # of the run, if an earlier incarnation made one; empty: a new one is made

    def __post_init__(self) -> None:
        self._kv = _kv_settings(self._config.kv, self._kv_secret or secrets.token_bytes(SECRET_BYTES))
        self._turns = MessageTurns()

    async def Connect(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: ServicerContext
    ) -> AsyncIterator[pb.WorkerCommand]:
        session = self._open(await self._first(request_iterator))
        self._journal.note(records.WorkerBegan(session.epoch))
        reading = asyncio.create_task(self._read(session, request_iterator))
        reading.add_done_callback(lambda _: session.give_up())
        try:
            await self._journal.settled()  # a later incarnation must not reuse this epoch
            await self._join(session)
            welcome = pb.WorkerCommand(
                welcome=pb.Welcome(
                    epoch=session.epoch,
                    snapshot_folder=str(self._snapshot_folder),
                    weights_folder=str(self._store.root),
                    report_period_ms=self._sessions.report_period_ms,
                    kv=self._kv,
                    orphan_timeout_s=self._incarnation.orphan_timeout_s,
                    goes_on=self._goes_on(session),
                )
            )
            yield sealed(welcome, SESSION.get())
            log.info(
                "%s joined (epoch %d, pid %d)", session.worker_id, session.epoch, session.pid,
                extra=about(worker=session.worker_id),
            )  # fmt: skip
            async for command in session.commands():
                yield command
            if reading.done() and not reading.cancelled() and (error := reading.exception()):
                raise error
        finally:
            reading.cancel()
            self._sessions.lose(session, "its connection broke")

    async def _join(self, session: WorkerSession | PoolSession) -> None:
        """Reports the worker to the core: at once, or with its first event if it is about to be restored."""
        reattachment = self._incarnation.reattachment
        if not reattachment.is_over and await reattachment.came(session.worker_id, lambda: self._joined(session)):
            return
        if isinstance(session, WorkerSession) and (event := self._joined(session)) is not None:
            self._core.post(event)
        self._introduce_pools()

    def _joined(self, session: WorkerSession | PoolSession) -> on.WorkerJoined | on.PoolJoined | None:
        """Returns the core's event of a join, or None if it was lost or a pool's size in tokens is unknown."""
        if self._sessions.of_epoch(session.worker_id, session.epoch) is not session:
            return None
        if isinstance(session, WorkerSession):
            capability = session.capability
            return on.WorkerJoined(
                session.worker_id,
                session.epoch,
                capability.slots,
                capability.kv_tokens,
                session.host,
                session.hosted,
                dict(session.held),
                capability.full_precision,
            )
        token_bytes = self._sessions.kv_token_bytes()
        capacity_bytes = session.capability.memory_bytes + session.capability.spill_bytes
        session.kv_tokens = capacity_bytes // token_bytes if token_bytes else 0
        if not session.kv_tokens:
            return None
        return on.PoolJoined(session.worker_id, session.epoch, session.kv_tokens, session.host, dict(session.held))

    def _goes_on(self, session: WorkerSession | PoolSession) -> list[pb.GoesOn]:
        state = self._core.state
        worker = state.workers.get(session.worker_id)
        if worker is None or worker.epoch != session.epoch:
            return []
        rows = [state.request_row[name] for name in session.held if name in state.request_row]
        owned = [row for row in rows if row in worker.rows and not state.requests["starting"][row]]
        owned += [row for row in rows if row in worker.kept]
        for row in owned:
            self._buffer.goes_on(row, session.worker_id)
        tokens, input_tokens = state.requests.columns("tokens", "input_tokens")
        return [
            pb.GoesOn(request_id=state.request_id[row], row=row, tokens=int(tokens[row] - input_tokens[row]))
            for row in owned
        ]

    async def _first(self, messages: AsyncIterator[pb.WorkerMessage]) -> pb.WorkerMessage | None:
        try:
            async with asyncio.timeout(HELLO_S):
                return await anext(aiter(messages), None)
        except TimeoutError as error:
            raise InvalidValue("hello", MISSING, f"sent within {HELLO_S:g} s") from error

    def _introduce_pools(self) -> None:
        """Reports the size of each pool in tokens to the core, once a worker has reported its KV bytes per token."""
        for pool in list(self._sessions.pools.values()):
            if not pool.kv_tokens and (event := self._joined(pool)) is not None:
                self._core.post(event)

    def _open(self, message: pb.WorkerMessage | None) -> WorkerSession | PoolSession:
        """Opens a session for a hello. Raises InvalidValue or Conflict for a worker that cannot serve here."""
        if message is not None and message.HasField("pool_hello"):
            pool, sessions = message.pool_hello, self._sessions
            held = checked_pool_hello(pool)
            self._check_name("pool_id", pool.pool_id, len(sessions.pools), POOLS_MAX)
            host, kv = self._hosts.host_of(pool.pool_id) or pool.host, convert.kv_endpoint_from_wire(pool)
            opened = sessions.open_pool(pool.pool_id, pool.pid, host, held, kv)
            opened.held = {each.request_id: self._parked_tokens(each) for each in pool.held}
            return opened
        if message is None or not message.HasField("hello"):
            raise InvalidValue("hello", MISSING, "the first message of a worker")
        hello = message.hello
        capability = checked_hello(hello, self._config, self._store.reference.vocab_size)
        workers = self._sessions.workers
        self._check_name("worker_id", hello.worker_id, len(workers), WORKERS_MAX)
        has_two, full = self._config.workers.numerics.is_low, capability.full_precision
        alike = [each.capability for each in workers.values()]
        alike = [each for each in alike if not has_two or each.full_precision == full]
        if any(each.fingerprint != capability.fingerprint for each in alike):
            # the fingerprint itself is not disclosed
            allowed = "that of the other workers: of the same model, engine, KV layout and dtype"
            raise Conflict("fingerprint", "(not shown)", allowed, why="is another")
        kv = convert.kv_endpoint_from_wire(hello)
        host = self._hosts.host_of(hello.worker_id) or hello.host
        session = self._sessions.open(hello.worker_id, hello.pid, host, capability, kv)
        session.takes_start_requests = hello.takes_start_requests
        if hello.HasField("hosts"):
            self._note_hosted(session, hello)
        return session

    def _note_hosted(self, session: WorkerSession, hello: pb.WorkerHello) -> None:
        """Notes the version and requests of a worker of an earlier incarnation, if its weights are still those of the
        version and it can report the tokens that the service lacks.
        """
        version, store = hello.hosts.version, self._store
        if version not in store.versions() or store.name(version) != hello.hosts.name:
            return
        session.hosted = version
        for each in hello.held:
            response = self._buffer.get(each.request_id)
            if response is None or response.version != version or each.first_token > len(response):
                continue
            has_all = each.tokens >= len(response)
            if response.is_session:
                has_all = response.continues(each.tokens, each.given_digest, has_prompt_logprobs=each.prompt_logprobs)
            if has_all:
                session.held[each.request_id] = each.tokens

    def _parked_tokens(self, held: pb.HeldRequest) -> int:
        """Returns the tokens of a request in an earlier incarnation's pool, or below 0 if their history differs."""
        response = self._buffer.get(held.request_id)
        is_other = (
            response is not None and response.is_session and not response.continues(held.tokens, held.given_digest)
        )
        return -1 if is_other else held.tokens

    def _check_name(self, field: str, name: str, connected: int, most: int) -> None:
        """Raises PermissionDenied or Conflict if a worker or pool must not use this name."""
        caller = CALLER.get()
        if not self._tokens.may_take(caller, name):
            allowed = caller.worker_id or "a name other than those of workers that the service started"
            raise PermissionDenied(field, name, allowed)
        if self._sessions.end(name) is not None:
            raise Conflict(field, name, "an id that no connected worker or pool has", why="is taken")
        if connected >= most:
            raise Conflict(field, name, f"one of at most {most}", why="is one too many")

    async def _read(self, session: WorkerSession | PoolSession, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        """Raises InvalidValue, which the worker receives, for a wrong message; the worker is replaced."""
        try:
            async for message in messages:
                async with self._turns:
                    self._take(session, message)
        except InvalidValue as error:
            self._reports.refused()
            self._sessions.replace(session, str(error))
            raise

    def _take(self, session: WorkerSession | PoolSession, message: pb.WorkerMessage) -> None:
        reports = self._reports
        kind = message.WhichOneof("kind")
        if isinstance(session, PoolSession) and kind == "pool_report":
            reports.pool(session, message.pool_report)
        elif isinstance(session, WorkerSession) and kind == "report":
            reports.report(session, message.report)
        elif kind == "outcome":
            reports.outcome(session, message.outcome)
        elif kind == "outcomes":
            for outcome in message.outcomes.outcomes:
                reports.outcome(session, outcome)
        elif isinstance(session, WorkerSession) and kind == "copy_began":
            reports.copy_began(session, message.copy_began)
        else:
            raise InvalidValue("kind", kind, KINDS[type(session)])


def _kv_settings(config: KvConfig, secret: bytes) -> pb.KvSettings:
    return pb.KvSettings(
        secret=secret,
        transports=config.transports.split(","),
        bandwidth_bytes_per_s=config.bandwidth_mb_per_s * 1e6,
        memory_bytes=config.memory_bytes,
        timeout_s=config.timeout_s,
    )
