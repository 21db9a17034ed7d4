"""The pool's loop: it executes the commands of handoffs and reports what the pool holds.

A pool decodes nothing. It keeps a snapshot until it is sent on or its request no longer needs it.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from dora.kvtransfer.endpoint import Endpoint
from dora.kvtransfer.plane import DataPlane
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb
from dora.session.commands import REASON_MAX, CommandLoop, Orders, Responder

log = logging.getLogger("dora.worker")

TICK_S: Final = 0.1
REPORT_S: Final = 0.5


class PoolLoop(CommandLoop[Responder]):
    def __init__(
        self, orders: Orders, plane: DataPlane, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(orders, Endpoint(store, plane), Responder(orders))
        self._store = store
        self._clock = clock
        self._reported_s = -REPORT_S

    def come_back(self, orders: Orders, plane: DataPlane) -> None:
        """Reconnects to a service, which releases unneeded snapshots by RemoveRequest."""
        self._orders, self._responder = orders, Responder(orders)
        self.endpoint.come_back(plane)
        self._report()

    def turn(self) -> None:
        """Waits for a command and executes all that are queued, then reports if a report is due."""
        if not self.obey_waiting(TICK_S):
            return
        self._store.look()
        dropped = self._store.dropped()
        for request_id, reason in dropped:
            self._report([request_id], reason)
        if not dropped and self._clock() - self._reported_s >= REPORT_S:
            self._report()

    def _report(self, dropped: list[str] | None = None, reason: str = "") -> None:
        held, arena = self._store.held(), self.endpoint.plane.arena
        report = pb.PoolReport(
            parked=held.parked,
            memory_bytes=held.memory_bytes,
            spill_bytes=held.spill_bytes,
            pinned_bytes=arena.pinned_bytes if arena is not None else 0,
            spilled=held.spilled,
            dropped=dropped or (),
            reason=reason[:REASON_MAX],
            at=time.time(),
        )
        self._reported_s = self._clock()
        self._orders.send(pb.WorkerMessage(pool_report=report))
