"""The two kinds of open streams: one to each worker, one to the trainer. Bounded; what is full breaks, never blocks."""

import asyncio
import time
from collections.abc import AsyncIterator

from dora.orchestrator.telemetry import Rate
from dora.rpc import dora_pb2 as pb
from dora.trajectory import TrajectoryGroup
from dora.types import EngineCapability

COMMANDS_QUEUED_MAX = 65536  # a worker this far behind is as good as hung


class WorkerSession:
    """One epoch of one worker."""

    def __init__(self, worker_id: str, epoch: int, pid: int, host: str, capability: EngineCapability) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.pid = pid
        self.host = host
        self.capability = capability
        self.heard_s = time.monotonic()
        self.reprefilled_tokens = 0
        self.rate = Rate()
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
        while (command := await self._outbox.get()) is not None:
            yield command


class StepStream:
    """One open StreamStep call: groups as they are delivered, then the end. Holds at most a step's groups."""

    def __init__(self, trainer_epoch: int, step: int) -> None:
        self.trainer_epoch = trainer_epoch
        self.step = step
        self._queue: asyncio.Queue[TrajectoryGroup | None] = asyncio.Queue()  # bounded by the step itself
        self.exhausted = False
        self.superseded = False

    def put(self, group: TrajectoryGroup) -> None:
        self._queue.put_nowait(group)

    def close(self, *, exhausted: bool = False, superseded: bool = False) -> None:
        self.exhausted, self.superseded = exhausted, superseded
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
