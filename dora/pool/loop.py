"""The pool's one loop: it obeys the commands of handoffs, and says what it holds.

To park is a handoff whose target is the pool, and to resume is one whose source it is. It decodes nothing: what it was
told to keep lies there until it is sent on, or until its request needs it no more.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from dora.errors import Conflict, DoraError
from dora.kvtransfer.codec import snapshot_of
from dora.kvtransfer.plane import DataPlane
from dora.pool.sending import Sending
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb
from dora.session.failure import fail
from dora.session.orders import REASON_MAX, Orders, check_asked_for, peer_of, waiting

log = logging.getLogger("dora.worker")

TICK_S: Final = 0.1
REPORT_S: Final = 0.5


class PoolLoop:
    """``run`` returns at Shutdown or when told to stop."""

    def __init__(
        self, orders: Orders, plane: DataPlane, store: Store, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._orders = orders
        self._plane = plane
        self._store = store
        self._clock = clock
        self._reported_s = -REPORT_S
        self._sendings: dict[str, Sending] = {}  # by request
        self._shutdown = False
        self._obeys: dict[str, Callable[[pb.WorkerCommand, pb.WorkerOutcome], bool]] = {
            "reserve_slot": self._reserve_slot,
            "cancel_reservation": self._cancel_reservation,
            "copy_in": self._copy_in,
            "copy_out": self._copy_out,
            "thaw": self._thaw,
            "remove_request": self._remove_request,
        }

    def leave(self) -> dict[str, int]:
        """The service is gone: what was on its way here or from here is undone, and what is parked stays. Returns that,
        with the tokens of each."""
        for sending in self._sendings.values():
            sending.cancel()
        self._sendings.clear()
        return self._store.leave()

    def come_back(self, orders: Orders, plane: DataPlane) -> None:
        """A service is there again; it says by RemoveRequest what it does not need any more."""
        self._orders, self._plane = orders, plane
        self._report()

    def run(self, stop: threading.Event) -> None:
        while not (stop.is_set() or self._shutdown):
            self.turn()

    def turn(self) -> None:
        """All commands that wait, one of them awaited; then a report where due."""
        for command in waiting(self._orders, TICK_S):
            self._obey(command)
        if self._shutdown:
            return
        self._store.look()
        dropped = self._store.dropped()
        for request_id, reason in dropped:
            self._report([request_id], reason)
        if not dropped and self._clock() - self._reported_s >= REPORT_S:
            self._report()

    def _report(self, dropped: list[str] | None = None, reason: str = "") -> None:
        held, arena = self._store.held(), self._plane.arena
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

    def _obey(self, command: pb.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "shutdown":
            self._shutdown = True
            return
        outcome = pb.WorkerOutcome(command_id=command.command_id, ok=True)
        try:
            obey = self._obeys.get(kind or "")
            if obey is None:
                raise Conflict("command", kind, "one of a handoff: this is a pool", why="is for a worker")
            if not obey(command, outcome):
                return
        except DoraError as error:
            fail(kind, outcome, error)
            log.warning("%s: %s", kind, outcome.error)  # not the error: its traceback holds what has come
        _answer(self._orders, outcome)

    # Each returns whether the outcome is complete; else it follows, from any thread, and goes to the service that asked
    # even where another is there by then, whose commands have the same numbers.

    def _reserve_slot(self, command: pb.WorkerCommand, outcome: pb.WorkerOutcome) -> bool:
        order = command.reserve_slot
        orders, plane = self._orders, self._plane
        room = self._store.let_in(order.request_id, order.kv_bytes)
        plane.expect(order.request_id, order.source_epoch, order.most_bytes)

        def let_in(done: "Future[None]") -> None:
            error = done.exception()
            if error is not None:
                assert isinstance(error, DoraError), error
                plane.forget(order.request_id)
                fail("reserve_slot", outcome, error)
            _answer(orders, outcome)

        room.add_done_callback(let_in)
        return False

    def _cancel_reservation(self, command: pb.WorkerCommand, outcome: pb.WorkerOutcome) -> bool:
        request_id = command.cancel_reservation.request_id
        self._plane.forget(request_id)
        self._store.forget(request_id)
        return True

    def _copy_in(self, command: pb.WorkerCommand, outcome: pb.WorkerOutcome) -> bool:
        order = command.copy_in
        head, rounds = self._plane.take_rounds(order.locator)
        found = snapshot_of(head, *(each.body for each in rounds)).request
        check_asked_for(found, order)
        self._store.keep(order.request_id, len(found.output_token_ids), head, rounds)
        return True

    def _copy_out(self, command: pb.WorkerCommand, outcome: pb.WorkerOutcome) -> bool:
        order = command.copy_out
        self._end_sending(order.request_id)
        parked, opened = self._store.open(order.request_id)
        sending = Sending(self._plane, self._store, peer_of(order), parked, outcome, partial(_sent, self._orders))
        self._sendings[order.request_id] = sending
        opened.add_done_callback(sending.begin)
        return False

    def _thaw(self, command: pb.WorkerCommand, outcome: pb.WorkerOutcome) -> bool:
        self._end_sending(command.thaw.request_id)
        return True

    def _remove_request(self, command: pb.WorkerCommand, outcome: pb.WorkerOutcome) -> bool:
        self._end_sending(command.remove_request.request_id)
        self._store.forget(command.remove_request.request_id)
        return True

    def _end_sending(self, request_id: str) -> None:
        sending = self._sendings.pop(request_id, None)
        if sending is not None:
            sending.cancel()


def _sent(orders: Orders, outcome: pb.WorkerOutcome, error: DoraError | None) -> None:
    if error is not None:
        fail("copy_out", outcome, error)
        log.warning("copy_out: %s", outcome.error)
    _answer(orders, outcome)


def _answer(orders: Orders, outcome: pb.WorkerOutcome) -> None:
    outcome.at = time.time()
    try:
        orders.send(pb.WorkerMessage(outcome=outcome))
    except DoraError as gone:  # the loop finds out by itself
        log.info("an outcome was not sent: %s", gone)
