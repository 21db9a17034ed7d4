"""The open streams of a service: one to each worker, one to the trainer. Bounded; what is full breaks, never blocks."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Container
from typing import Protocol

from dora.data.trajectory import TrajectoryGroup
from dora.data.types import NO_KV, EngineCapability, KvEndpoint, PoolCapability, TierLoad
from dora.errors import DoraError
from dora.orchestrator.rollout.telemetry import Rate
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import BATCH_BYTES

log = logging.getLogger("dora.service")

DRAINED = "drained"  # the reason of a worker that was asked to leave
LOST_KEPT = 256  # workers that are gone, and still shown with the reason
COMMANDS_QUEUED_MAX = 65536  # a worker this far behind is as good as hung
REPORTS_PER_S = 250  # of all workers together, those of ends aside, that the service should have to read: 5% of a core
PERIOD_MOST_MS = 1000


class Session:
    """One epoch of one worker, or of one pool."""

    def __init__(self, worker_id: str, epoch: int, pid: int, host: str, kv: KvEndpoint) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.pid = pid
        self.host = host
        self.kv = kv
        self.takes_start_requests = False
        self.held: dict[str, int] = {}  # as it said hello: requests from before, and the tokens that it has of each
        self.heard_s = time.monotonic()
        self._outbox: asyncio.Queue[pb.WorkerCommand | None] = asyncio.Queue(COMMANDS_QUEUED_MAX)

    def send(self, command: pb.WorkerCommand) -> None:
        """Queues a command; a worker that has too many unread ones is given up."""
        try:
            self._outbox.put_nowait(command)
        except asyncio.QueueFull:
            self.give_up()

    def finish(self) -> None:
        """No further command: the stream ends after those queued."""
        try:
            self._outbox.put_nowait(None)
        except asyncio.QueueFull:
            self.give_up()

    def give_up(self) -> None:
        """Ends the stream at once, whatever is queued."""
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._outbox.put_nowait(None)

    async def commands(self) -> AsyncIterator[pb.WorkerCommand]:
        """The commands; requests that are to be started at once in one, where the worker takes that."""
        command = await self._outbox.get()
        while command is not None:
            if not self.takes_start_requests or not command.HasField("start_request"):
                yield command
                command = await self._outbox.get()
                continue
            starting, size_bytes = [command], command.ByteSize()
            while not self._outbox.empty() and size_bytes < BATCH_BYTES:
                command = self._outbox.get_nowait()
                if command is None or not command.HasField("start_request"):
                    break
                starting.append(command)
                size_bytes += command.ByteSize()
            yield _together(starting)
            if command is starting[-1]:
                command = await self._outbox.get()


def _together(starting: list[pb.WorkerCommand]) -> pb.WorkerCommand:
    """Orders to start a request, in one message."""
    if len(starting) == 1:
        return starting[0]
    for command in starting:
        command.start_request.command_id = command.command_id
    return pb.WorkerCommand(start_requests=pb.StartRequests(requests=[each.start_request for each in starting]))


class WorkerSession(Session):
    """One epoch of one worker."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        pid: int,
        host: str,
        capability: EngineCapability,
        kv: KvEndpoint = NO_KV,
    ) -> None:
        super().__init__(worker_id, epoch, pid, host, kv)
        self.capability = capability
        self.hosted = -1  # the version that it had as it said hello
        self.reprefilled_tokens = 0
        self.tier = TierLoad()
        self.rate = Rate()


class PoolSession(Session):
    """One epoch of one pool. The core knows it once ``kv_tokens`` is known: what it holds, by the workers' KV."""

    def __init__(
        self, pool_id: str, epoch: int, pid: int, host: str, capability: PoolCapability, kv: KvEndpoint = NO_KV
    ) -> None:
        super().__init__(pool_id, epoch, pid, host, kv)
        self.capability = capability
        self.kv_tokens = 0
        self.report = pb.PoolReport()  # the latest


class StepStream:
    """One open StreamStep call: groups as they are delivered, then the end. Holds at most a step's groups."""

    def __init__(self, trainer_epoch: int, step: int) -> None:
        self.trainer_epoch = trainer_epoch
        self.step = step
        self._queue: asyncio.Queue[TrajectoryGroup | None] = asyncio.Queue()  # bounded by the step itself
        self.exhausted = False
        self.superseded = False
        self.error: DoraError | None = None  # why it ends before its step is full

    def put(self, group: TrajectoryGroup) -> None:
        self._queue.put_nowait(group)

    def close(self, *, exhausted: bool = False, superseded: bool = False, error: DoraError | None = None) -> None:
        """``error``: what the trainer is told at the end, behind what was delivered."""
        self.exhausted, self.superseded, self.error = exhausted, superseded, error
        self._queue.put_nowait(None)

    async def batches(self) -> AsyncIterator[list[TrajectoryGroup]]:
        """What has been delivered since the last batch, at least one group; ends with the step."""
        while (group := await self._queue.get()) is not None:
            batch = [group]
            while not self._queue.empty():
                following = self._queue.get_nowait()
                if following is None:
                    yield batch
                    return
                batch.append(following)
            yield batch


class KvTier(Protocol):
    """The server of the shared KV tier, as operators see it."""

    def status(self, workers: int) -> pb.KvTierStatus:
        """``workers``: that reach it."""


class WorkerProcesses(Protocol):
    """Whoever started the workers."""

    def kill(self, worker_id: str) -> None: ...
    def let_go(self, worker_id: str) -> None: ...


class Sessions:
    """Who is connected now. ``lost`` is told of each epoch of a worker or pool that is over, with the reason.

    ``report_period_ms``: the least time between two reports of a worker.
    """

    def __init__(
        self,
        lost: Callable[[Session, str], None],
        processes: WorkerProcesses | None = None,
        report_period_ms: int = 50,
    ) -> None:
        self.workers: dict[str, WorkerSession] = {}
        self.pools: dict[str, PoolSession] = {}
        self.stream: StepStream | None = None  # the trainer's
        self.lost_reasons: dict[str, str] = {}  # of workers
        self.lost_pools: dict[str, str] = {}
        self.processes = processes
        self._lost = lost
        self.epochs = 0
        self._least_period_ms = report_period_ms
        self.report_period_ms = report_period_ms  # of each worker now

    def open(
        self,
        worker_id: str,
        pid: int,
        host: str,
        capability: EngineCapability,
        kv: KvEndpoint = NO_KV,
    ) -> WorkerSession:
        """Begins a new epoch of this worker, which must not be connected."""
        session = WorkerSession(worker_id, self._begin_epoch(worker_id), pid, host, capability, kv)
        self.workers[worker_id] = session
        self._pace()
        return session

    def open_pool(self, pool_id: str, pid: int, host: str, capability: PoolCapability, kv: KvEndpoint) -> PoolSession:
        """The same of a pool."""
        session = PoolSession(pool_id, self._begin_epoch(pool_id), pid, host, capability, kv)
        self.pools[pool_id] = session
        return session

    def _begin_epoch(self, name: str) -> int:
        assert self.end(name) is None, f"{name} is connected"
        self.epochs += 1
        for lost in (self.lost_reasons, self.lost_pools):
            lost.pop(name, None)
        return self.epochs

    def _pace(self) -> None:
        """The more workers there are, the less often each reports; they are told where that doubles, or halves."""
        period_ms = self._least_period_ms
        while period_ms * REPORTS_PER_S < len(self.workers) * 1000 and period_ms < PERIOD_MOST_MS:
            period_ms = min(2 * period_ms, PERIOD_MOST_MS)
        if period_ms == self.report_period_ms:
            return
        self.report_period_ms = period_ms
        for session in self.workers.values():
            session.send(pb.WorkerCommand(pace=pb.Pace(report_period_ms=period_ms)))

    def end(self, name: str) -> WorkerSession | PoolSession | None:
        """The worker or pool of this id, if it is connected: an end of a handoff."""
        return self.workers.get(name) or self.pools.get(name)

    def of_epoch(self, worker_id: str, epoch: int) -> WorkerSession | PoolSession | None:
        """The connection of this epoch of a worker or a pool; None once it is over."""
        session = self.end(worker_id)
        return session if session is not None and session.epoch == epoch else None

    def kv_token_bytes(self) -> int:
        """KV of one token, as the workers say it; 0: none has said it yet."""
        return max((worker.capability.kv_token_bytes for worker in self.workers.values()), default=0)

    def stream_of(self, trainer_epoch: int, step: int) -> StepStream | None:
        """The trainer's stream, where it is open and of this step."""
        stream = self.stream
        if stream is not None and (stream.trainer_epoch, stream.step) == (trainer_epoch, step):
            return stream
        return None

    def lose(self, session: Session, reason: str) -> None:
        """The epoch is over, now and not only once its stream has ended: a hung one might never end."""
        if self.end(session.worker_id) is not session:
            return
        self.workers.pop(session.worker_id, None)
        self.pools.pop(session.worker_id, None)
        session.give_up()
        self._pace()
        lost = self.lost_pools if isinstance(session, PoolSession) else self.lost_reasons
        reason = lost.get(session.worker_id, reason)
        _keep(lost, session.worker_id, reason)
        log.info("%s is gone (epoch %d): %s", session.worker_id, session.epoch, reason)
        self._lost(session, reason)

    def keep_reason(self, worker_id: str, reason: str) -> None:
        """Why a worker has gone, for operators."""
        _keep(self.lost_reasons, worker_id, reason)

    def replace(self, session: Session, reason: str) -> None:
        """Ends a worker or pool that is silent or cannot be trusted; whoever started it starts it again."""
        if self.end(session.worker_id) is not session:
            return
        log.error("%s is replaced: %s", session.worker_id, reason)
        self.lose(session, reason)
        if self.processes is not None:
            self.processes.kill(session.worker_id)

    def replace_silent(self, limit_s: float, loading: Container[str] = ()) -> None:
        """Replaces each worker and pool that has said nothing for longer than ``limit_s``; but not those workers that
        are ``loading``, which say nothing meanwhile: the core limits that time itself."""
        for session in [*self.workers.values(), *self.pools.values()]:
            silent_s = time.monotonic() - session.heard_s
            if silent_s > limit_s and session.worker_id not in loading:
                self.replace(session, f"silent for {silent_s:.0f} s")

    def let_go(self, worker_id: str, epoch: int) -> None:
        """Lets a drained worker leave; nobody starts it again."""
        self.keep_reason(worker_id, DRAINED)
        if self.processes is not None:
            self.processes.let_go(worker_id)
        session = self.of_epoch(worker_id, epoch)
        if session is not None:
            session.send(pb.WorkerCommand(shutdown=pb.Shutdown()))
            session.finish()


def _keep(reasons: dict[str, str], name: str, reason: str) -> None:
    """Of the last ones that are gone, as some come under a new name each time."""
    reasons[name] = reason
    if len(reasons) > LOST_KEPT:
        del reasons[next(iter(reasons))]
