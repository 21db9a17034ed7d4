"""The open streams of a service: one to each worker, one to the trainer. A full stream is closed; it never blocks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Container
from typing import Protocol

from dora.data.trajectory import TrajectoryGroup
from dora.data.types import NO_KV, EngineCapability, EngineLoad, KvEndpoint, PoolCapability, TierLoad
from dora.errors import DoraError
from dora.orchestrator.rollout.telemetry import Rate
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import BATCH_BYTES
from dora.system.awake import awake_s
from dora.system.log_lines import about

log = logging.getLogger("dora.service")

DRAINED = "drained"  # the reason of a worker that left on request
LOST_KEPT = 256  # lost workers that are still shown with their reason
COMMANDS_QUEUED_MAX = 65536  # a worker this far behind counts as hung
REPORTS_PER_S = 250  # target for all workers together, without reports of ends: 5% of a core
PERIOD_MOST_MS = 4000


class MemberSession:
    """Holds one epoch of one worker, or of one pool."""

    def __init__(self, worker_id: str, epoch: int, pid: int, host: str, kv: KvEndpoint) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.pid = pid
        self.host = host
        self.kv = kv
        self.takes_start_requests = False
        self.held: dict[str, int] = {}  # requests from before its hello, and the tokens that it has of each
        self.heard_s = awake_s()
        self._outbox: asyncio.Queue[pb.WorkerCommand | None] = asyncio.Queue(COMMANDS_QUEUED_MAX)

    def send(self, command: pb.WorkerCommand) -> None:
        """Queues a command; a worker with too many unread commands is given up."""
        try:
            self._outbox.put_nowait(command)
        except asyncio.QueueFull:
            self.give_up()

    def finish(self) -> None:
        """Ends the stream after the queued commands."""
        try:
            self._outbox.put_nowait(None)
        except asyncio.QueueFull:
            self.give_up()

    def give_up(self) -> None:
        """Ends the stream at once and drops queued commands."""
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._outbox.put_nowait(None)

    async def commands(self) -> AsyncIterator[pb.WorkerCommand]:
        """Yields commands; requests that start at the same time go in one message if the worker accepts that."""
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
    if len(starting) == 1:
        return starting[0]
    for command in starting:
        command.start_request.command_id = command.command_id
    return pb.WorkerCommand(start_requests=pb.StartRequests(requests=[each.start_request for each in starting]))


class WorkerSession(MemberSession):
    def __init__(
        self, worker_id: str, epoch: int, pid: int, host: str, capability: EngineCapability, kv: KvEndpoint = NO_KV
    ) -> None:
        super().__init__(worker_id, epoch, pid, host, kv)
        self.capability = capability
        self.hosted = -1  # the version that it had at its hello
        self.load = EngineLoad(0, 0, 0, 0, 0)  # as last reported
        self.reported_s = self.heard_s
        self.clock_ahead_s = 0.0  # of its host's clock, with the report's time on the way
        self.tier = TierLoad()
        self.times = pb.EngineTimes()  # as last reported
        self.load_s = 0.0  # of the last version; 0: none
        self.copy_s = 0.0  # of the last request's KV that left it; 0: none
        self.copy_bytes = 0
        self.rate = Rate()
        self.told: dict[bytes, int] = {}  # by scope of the fleet's history: the last entry that it has


class PoolSession(MemberSession):
    """Holds one epoch of one pool. The core learns of it once workers report enough to know its size, ``kv_tokens``."""

    def __init__(
        self, pool_id: str, epoch: int, pid: int, host: str, capability: PoolCapability, kv: KvEndpoint = NO_KV
    ) -> None:
        super().__init__(pool_id, epoch, pid, host, kv)
        self.capability = capability
        self.kv_tokens = 0
        self.report = pb.PoolReport()  # the latest


class StepStream:
    """Holds one open StreamStep call: delivered groups, at most one step's, then the end."""

    def __init__(self, trainer_epoch: int, step: int) -> None:
        self.trainer_epoch = trainer_epoch
        self.step = step
        self._queue: asyncio.Queue[TrajectoryGroup | None] = asyncio.Queue()  # bounded by the step
        self.exhausted = False
        self.superseded = False
        self.error: DoraError | None = None  # reason of an early end

    def put(self, group: TrajectoryGroup) -> None:
        self._queue.put_nowait(group)

    def close(self, *, exhausted: bool = False, superseded: bool = False, error: DoraError | None = None) -> None:
        """Ends the stream. The trainer gets ``error`` after the delivered groups."""
        self.exhausted, self.superseded, self.error = exhausted, superseded, error
        self._queue.put_nowait(None)

    async def batches(self) -> AsyncIterator[list[TrajectoryGroup]]:
        """Yields the groups delivered since the last batch, at least one; ends with the step."""
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
    """Describes the server of the shared KV tier for operators."""

    def status(self, workers: int) -> pb.KvTierStatus:
        """Returns the tier's status, with the number of workers that reach it."""


class WorkerProcesses(Protocol):
    def kill(self, worker_id: str) -> None: ...
    def release(self, worker_id: str) -> None: ...


class MemberSessions:
    """Holds the connected workers and pools. ``lost`` receives each ended epoch with the reason.

    ``report_period_ms`` is the shortest time between two reports of a worker.
    """

    def __init__(
        self,
        lost: Callable[[MemberSession, str], None],
        processes: WorkerProcesses | None = None,
        report_period_ms: int = 50,
    ) -> None:
        self.workers: dict[str, WorkerSession] = {}
        self.pools: dict[str, PoolSession] = {}
        self.lost_reasons: dict[str, str] = {}  # by worker
        self.lost_pools: dict[str, str] = {}
        self.processes = processes
        self._lost = lost
        self.epochs = 0
        self._least_period_ms = report_period_ms
        self.report_period_ms = report_period_ms  # current period of each worker

    def open(
        self, worker_id: str, pid: int, host: str, capability: EngineCapability, kv: KvEndpoint = NO_KV
    ) -> WorkerSession:
        """Begins a new epoch of this worker, which must not be connected."""
        session = WorkerSession(worker_id, self._begin_epoch(worker_id), pid, host, capability, kv)
        self.workers[worker_id] = session
        self._pace()
        return session

    def open_pool(self, pool_id: str, pid: int, host: str, capability: PoolCapability, kv: KvEndpoint) -> PoolSession:
        """Begins a new epoch of this pool, which must not be connected."""
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
        """Doubles or halves the workers' report period as their number grows or falls."""
        period_ms = self._least_period_ms
        while period_ms * REPORTS_PER_S < len(self.workers) * 1000 and period_ms < PERIOD_MOST_MS:
            period_ms = min(2 * period_ms, PERIOD_MOST_MS)
        if period_ms == self.report_period_ms:
            return
        self.report_period_ms = period_ms
        for session in self.workers.values():
            session.send(pb.WorkerCommand(pace=pb.Pace(report_period_ms=period_ms)))

    def end(self, name: str) -> WorkerSession | PoolSession | None:
        return self.workers.get(name) or self.pools.get(name)

    def of_epoch(self, worker_id: str, epoch: int) -> WorkerSession | PoolSession | None:
        """Returns the connection of this epoch of a worker or pool, or None after its end."""
        session = self.end(worker_id)
        return session if session is not None and session.epoch == epoch else None

    def kv_token_bytes(self) -> int:
        """Returns the KV bytes of one token, as workers report it, or 0 if that is unknown."""
        return max((worker.capability.kv_token_bytes for worker in self.workers.values()), default=0)

    def lose(self, session: MemberSession, reason: str) -> None:
        """Ends the epoch at once; the stream of a hung worker might never end."""
        if self.end(session.worker_id) is not session:
            return
        self.workers.pop(session.worker_id, None)
        self.pools.pop(session.worker_id, None)
        session.give_up()
        self._pace()
        lost = self.lost_pools if isinstance(session, PoolSession) else self.lost_reasons
        reason = lost.get(session.worker_id, reason)
        _keep(lost, session.worker_id, reason)
        worker = about(worker=session.worker_id)
        log.info("%s is gone (epoch %d): %s", session.worker_id, session.epoch, reason, extra=worker)
        self._lost(session, reason)

    def keep_reason(self, worker_id: str, reason: str) -> None:
        _keep(self.lost_reasons, worker_id, reason)

    def replace(self, session: MemberSession, reason: str) -> None:
        """Ends a silent or faulty worker or pool; its launcher starts it again."""
        if self.end(session.worker_id) is not session:
            return
        log.error("%s is replaced: %s", session.worker_id, reason, extra=about(worker=session.worker_id))
        self.lose(session, reason)
        if self.processes is not None:
            self.processes.kill(session.worker_id)

    def replace_silent(self, limit_s: float, loading: Container[str] = ()) -> None:
        """Replaces workers and pools that are silent for ``limit_s``, except those ``loading``, whose time the core
        limits.
        """
        for session in [*self.workers.values(), *self.pools.values()]:
            silent_s = awake_s() - session.heard_s
            if silent_s > limit_s and session.worker_id not in loading:
                self.replace(session, f"silent for {silent_s:.0f} s")

    def release(self, worker_id: str, epoch: int) -> None:
        """Lets a drained worker leave; nobody starts it again."""
        self.keep_reason(worker_id, DRAINED)
        if self.processes is not None:
            self.processes.release(worker_id)
        self._shut_down(worker_id, epoch, pb.Shutdown())

    def restart(self, worker_id: str, epoch: int, *, full_precision: bool) -> None:
        """Lets an empty worker start again with an engine of another precision."""
        self.keep_reason(worker_id, DRAINED)
        self._shut_down(worker_id, epoch, pb.Shutdown(starts_again=True, full_precision=full_precision))

    def _shut_down(self, worker_id: str, epoch: int, order: pb.Shutdown) -> None:
        session = self.of_epoch(worker_id, epoch)
        if session is not None:
            session.send(pb.WorkerCommand(shutdown=order))
            session.finish()


def _keep(reasons: dict[str, str], name: str, reason: str) -> None:
    """Keeps the most recent reasons, because some workers return under new names."""
    reasons[name] = reason
    if len(reasons) > LOST_KEPT:
        del reasons[next(iter(reasons))]
