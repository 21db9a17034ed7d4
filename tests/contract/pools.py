"""A pool for tests: its loop in this process, given commands one by one."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dora.kvtransfer.peer import ANY_MODEL
from dora.pool.disk import Disk
from dora.pool.loop import PoolLoop
from dora.pool.spill import SpillFolder
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb
from dora.worker.engine import RolloutEngine
from tests.contract.planes import SECRET, End, a_plane, until

ARENA_BYTES = 8 << 20
READ_BYTES = 8 << 20


class Orders:
    """Commands in, messages out, as lists."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[pb.WorkerCommand] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[pb.WorkerMessage] = queue.SimpleQueue()
        self._number = 0
        self.outcomes: dict[int, pb.WorkerOutcome] = {}
        self.report = pb.PoolReport()
        self.dropped: dict[str, str] = {}

    def take(self, _timeout_s: float) -> pb.WorkerCommand | None:
        return None if self._commands.empty() else self._commands.get()

    def send(self, message: pb.WorkerMessage) -> None:
        self._said.put(message)

    def order(self, **kind: Any) -> int:
        self._number += 1
        self._commands.put(pb.WorkerCommand(command_id=self._number, **kind))
        return self._number

    def hear(self) -> None:
        while not self._said.empty():
            message = self._said.get()
            if message.HasField("outcome"):
                assert message.outcome.command_id not in self.outcomes, "one outcome each"
                self.outcomes[message.outcome.command_id] = message.outcome
            if message.HasField("pool_report"):
                self.report = message.pool_report
                self.dropped |= dict.fromkeys(message.pool_report.dropped, message.pool_report.reason)


class PoolEnd(Orders):
    """A pool: where others reach it, and what it says."""

    def __init__(self, end: End, spill: SpillFolder | None, clock: Callable[[], float]) -> None:
        super().__init__()
        self.end = end
        assert end.plane.arena is not None
        self.arena = end.plane.arena
        disk = Disk(spill, SECRET, READ_BYTES) if spill is not None else None
        self.store = Store(self.arena, disk, SECRET, clock)
        self.loop = PoolLoop(self, end.plane, self.store, iter(range(1 << 40)).__next__)  # every turn reports

    def turn(self) -> None:
        self.loop.turn()
        self.hear()

    def obey(self, **kind: Any) -> pb.WorkerOutcome:
        return self.outcome(self.order(**kind))

    def outcome(self, number: int) -> pb.WorkerOutcome:
        def came() -> bool:
            self.turn()
            return number in self.outcomes

        until(came)
        return self.outcomes.pop(number)

    def let_in(self, request_id: str, source_epoch: int, kv_bytes: int = 1 << 16) -> pb.WorkerOutcome:
        return self.obey(reserve_slot=reserve(request_id, source_epoch, kv_bytes))


def reserve(request_id: str, source_epoch: int, kv_bytes: int = 1 << 16) -> pb.ReserveSlot:
    return pb.ReserveSlot(
        request_id=request_id, version=1, kv_tokens=64, source_epoch=source_epoch, kv_bytes=kv_bytes, most_bytes=1 << 30
    )


@contextmanager
def a_pool(
    folder: Path,
    epoch: int,
    transports: tuple[str, ...],
    arena_bytes: int = ARENA_BYTES,
    spill: Path | None = None,
    spill_bytes: int = 1 << 30,
    clock: Callable[[], float] = lambda: 0.0,
    **settings: Any,
) -> Iterator[PoolEnd]:
    """A pool with its loop. ``spill``: the folder that it writes to where memory is full."""
    with a_plane(folder, epoch, transports, ANY_MODEL, arena_bytes=arena_bytes, **settings) as end:
        disk = SpillFolder(spill, spill_bytes) if spill is not None else None
        pool = PoolEnd(end, disk, clock)
        try:
            yield pool
        finally:
            pool.store.close()
            if disk is not None:
                disk.close()


def park(engine: RolloutEngine, source: End, pool: PoolEnd, request_id: str, kv_bytes: int = 0) -> None:
    """A request leaves its engine for a pool."""
    assert pool.let_in(request_id, source.identity.epoch, kv_bytes).ok
    engine.freeze(request_id)
    snapshot = engine.export(request_id)
    assert snapshot is not None
    key = source.plane.send(pool.end.peer, request_id, snapshot).done.result(60).key
    assert pool.obey(copy_in=pb.CopyIn(request_id=request_id, version=1, locator=key)).ok
    engine.remove(request_id)


def sent_on(pool: PoolEnd, target: pb.KvPeer, request_id: str) -> str:
    """Its key at a target that expects it."""
    sent = pool.obey(copy_out=pb.CopyOut(request_id=request_id, target=target))
    assert sent.ok, sent.error
    assert pool.obey(remove_request=pb.RemoveRequest(request_id=request_id)).ok
    return sent.locator
