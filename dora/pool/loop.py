"""The pool's one loop: it obeys the commands of handoffs, and reports what it holds.

It decodes nothing: what it was told to keep lies there until it is sent on, or until its request needs it no more.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from dora.kvtransfer.endpoint import Endpoint, Reserve, Room
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import Arrived, DataPlane
from dora.pool.rounds import ParkedRounds
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb
from dora.session.commands import REASON_MAX, CommandLoop, Orders, answer_late

log = logging.getLogger("dora.worker")

TICK_S: Final = 0.1
REPORT_S: Final = 0.5


class PoolStore:
    """A pool as a store of handoffs."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def reserve(self, order: Reserve) -> Room:
        return Room(order.most_bytes, granted=self._store.let_in(order.request_id, order.kv_bytes))

    def release(self, request_id: str) -> None:
        self._store.let_out(request_id)

    def accept(self, arrived: Arrived, row: int) -> None:
        request = arrived.snapshot.request
        self._store.keep(request.request_id, len(request.output_token_ids), arrived.head, arrived.rounds)

    def rounds_of(self, request_id: str, peer: Peer) -> ParkedRounds:
        return ParkedRounds(self._store, *self._store.open(request_id))

    def thaw(self, request_id: str) -> None:
        """Nothing decodes here."""

    def remove(self, request_id: str) -> None:
        self._store.forget(request_id)


class PoolVoice:
    """Answers at once, from any thread: no token is sampled here."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def answer(self, outcome: pb.WorkerOutcome) -> None:
        answer_late(self, outcome)

    def answer_ahead(self, outcome: pb.WorkerOutcome) -> None:
        outcome.at = time.time()
        self._orders.send(pb.WorkerMessage(outcome=outcome))

    def report_tokens(self) -> None: ...

    def began_copy(self, command_id: int) -> None: ...


class PoolLoop(CommandLoop[PoolVoice]):
    """The loop of a pool's process."""

    def __init__(
        self, orders: Orders, plane: DataPlane, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(orders, Endpoint(PoolStore(store), plane), PoolVoice(orders))
        self._store = store
        self._clock = clock
        self._reported_s = -REPORT_S

    def leave(self) -> dict[str, int]:
        """The service is lost: undoes all handoffs under way. Returns what is parked, which stays, with the tokens of
        each."""
        self.endpoint.leave()
        return self._store.parked()

    def come_back(self, orders: Orders, plane: DataPlane) -> None:
        """A service is there again; it says by RemoveRequest what it no longer needs."""
        self._orders, self._voice = orders, PoolVoice(orders)
        self.endpoint.come_back(plane)
        self._report()

    def turn(self) -> None:
        """All commands that wait, one of them awaited; then a report where due."""
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
