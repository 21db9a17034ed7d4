"""The worker's one loop: obey commands between engine steps, step, report.

Order is the protocol: whatever the engine produced before a command's outcome is reported before that outcome.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.errors import (
    MISSING,
    Conflict,
    DoraError,
    NotFound,
    TransferFailed,
)
from dora.kvtransfer.layout import body_bytes_most
from dora.kvtransfer.plane import DataPlane
from dora.kvtransfer.transfer import Sent
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.types import TokenDelta
from dora.worker.copying import Copying
from dora.worker.engine import RolloutEngine
from dora.worker.failure import fail
from dora.worker.orders import REASON_MOST, Orders, check_asked_for, peer_of, waiting
from dora.worker.prefixes import SentPrefixes

log = logging.getLogger("dora.worker")

IDLE_S = 0.5  # an idle worker looks up, and is heard of, this often
QUEUE_SLOTS = 2  # requests taken in by handoff where there is no pool: this many times the slots


class EngineLoop:
    """Owns the engine. ``run`` returns at Shutdown or when told to stop.

    KV is copied by the data plane, in threads of its own. A worker without one takes part in no handoff.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        orders: Orders,
        welcome: pb.Welcome,
        plane: DataPlane | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._orders = orders
        self._plane = plane
        self._period_s = welcome.report_period_ms / 1000
        self._clock = clock
        self._deltas: list[TokenDelta] = []
        self._reported_s = clock()
        self._copies: dict[str, _Copy] = {}  # by request
        self._sent = SentPrefixes()
        self._arrived: set[str] = set()  # taken in, and no token yet
        self._shutdown = False

    def run(self, stop: threading.Event) -> None:
        while not (stop.is_set() or self._shutdown):
            self.turn()

    def turn(self) -> None:
        """All commands that wait (one awaited, if there is nothing to run), one step, one report where due."""
        timeout_s = 0.0 if self._engine.has_work() else IDLE_S
        for command in waiting(self._orders, timeout_s):
            self._obey(command)
        if self._shutdown:
            return
        for copy in list(self._copies.values()):
            self._go_on(copy)
        if self._engine.has_work():
            self._step()
        if self._due():
            self._report()

    def _step(self) -> None:
        deltas = self._engine.step()
        self._deltas.extend(deltas)
        for delta in deltas:
            if delta.finish_reason and delta.request_id in self._copies:
                self._end_copy(delta.request_id, NotFound("request_id", delta.request_id, "one that has not ended"))

    def _due(self) -> bool:
        waited_s = self._clock() - self._reported_s
        if any(delta.finish_reason or delta.request_id in self._arrived for delta in self._deltas):
            return True
        return waited_s >= (self._period_s if self._deltas else IDLE_S)

    def _report(self) -> None:
        load = self._engine.load()
        version = self._engine.version
        report = pb.WorkerReport(
            deltas=[convert.delta_to_wire(delta) for delta in self._deltas],
            running=load.running,
            waiting=load.waiting,
            kv_used_tokens=load.kv_used_tokens,
            reprefilled_tokens=load.reprefilled_tokens,
            generated_tokens=load.generated_tokens,
            version=-1 if version is None else version,
            at=time.time(),
            kv_tier=None if load.tier is None else convert.tier_to_wire(load.tier),
        )
        self._arrived.difference_update([delta.request_id for delta in self._deltas])
        self._deltas.clear()
        self._reported_s = self._clock()
        self._orders.send(pb.WorkerMessage(report=report))

    def _obey(self, command: pb.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "shutdown":
            self._shutdown = True
            return
        outcome = pb.WorkerOutcome(command_id=command.command_id, ok=True, at=time.time())
        try:
            if _OBEY[kind](self, getattr(command, kind), outcome) is LATER:
                return
        except DoraError as error:
            fail(kind, outcome, error)
            log.warning("%s: %s", kind, error)
        self._answer(outcome, reports=kind == "load_version")

    def _answer(self, outcome: pb.WorkerOutcome, reports: bool = False) -> None:
        if self._deltas or reports:
            self._report()
        outcome.at = time.time()
        self._orders.send(pb.WorkerMessage(outcome=outcome))

    def _load_version(self, order: pb.LoadVersion, outcome: pb.WorkerOutcome) -> None:
        began_s = self._clock()
        canary = convert.canary_from_wire(order.canary)
        found = self._engine.load_weights(order.version, Path(order.folder), canary)
        outcome.canary.CopyFrom(convert.canary_to_wire(found))
        log.info("version %d loaded in %.0f ms", order.version, (self._clock() - began_s) * 1000)

    def _start_request(self, order: pb.StartRequest, outcome: pb.WorkerOutcome) -> None:
        self._engine.add(convert.request_from_wire(order))

    def _remove_request(self, order: pb.RemoveRequest, outcome: pb.WorkerOutcome) -> None:
        self._end_copy(order.request_id)
        self._arrived.discard(order.request_id)
        self._engine.remove(order.request_id)

    def _reserve_slot(self, order: pb.ReserveSlot, outcome: pb.WorkerOutcome) -> None:
        if order.version != self._engine.version:
            raise Conflict("version", order.version, f"{self._engine.version}, the one loaded", why="is not loaded")
        load, capability = self._engine.load(), self._engine.capability
        held = load.running + load.waiting + self._engine.reserved
        limit = (1 if order.needs_slot else QUEUE_SLOTS) * capability.slots
        if held >= limit:
            raise Conflict("requests held", held, f"below {limit}", why="is too much for another")
        if order.kv_tokens > capability.kv_tokens:
            raise Conflict("kv_tokens", order.kv_tokens, f"at most {capability.kv_tokens}", why="is too much")
        most_bytes = body_bytes_most(self._engine.layout, capability.max_model_len_tokens)
        plane = self._data_plane()
        reservation = self._engine.reserve(order.request_id, order.kv_tokens)
        try:
            plane.expect(order.request_id, order.source_epoch, most_bytes, reservation)
        except DoraError:
            self._engine.release(order.request_id)
            raise

    def _cancel_reservation(self, order: pb.CancelReservation, outcome: pb.WorkerOutcome) -> None:
        self._arrived.discard(order.request_id)
        self._engine.release(order.request_id)
        if self._plane is not None:
            self._plane.forget(order.request_id)
        self._engine.remove(order.request_id)  # it may have been copied in before the handoff was undone

    def _copy_out(self, order: pb.CopyOut, outcome: pb.WorkerOutcome) -> object:
        self._end_copy(order.request_id)
        copying = Copying(self._engine, self._data_plane(), peer_of(order), order.request_id, self._sent)
        self._copies[order.request_id] = _Copy(order.request_id, copying, outcome)
        return LATER

    def _go_on(self, copy: "_Copy") -> None:
        """The next round of a copy, where it is time for one."""
        if copy.is_last:
            return
        try:
            last = copy.copying.advance()
        except DoraError as error:
            del self._copies[copy.request_id]
            copy.copying.cancel()
            fail("copy_out", copy.outcome, error)
            log.warning("copy_out: %s", error)
            self._answer(copy.outcome)
            return
        if copy.copying.is_ahead and not copy.is_told:
            copy.is_told = True
            self._orders.send(pb.WorkerMessage(copy_began=pb.CopyBegan(command_id=copy.outcome.command_id)))
        if last is not None:  # the copy's thread answers: the request is frozen, so what is left of it is reported now
            copy.is_last = True
            copy.outcome.tokens = copy.copying.tokens
            copy.outcome.snapshot_bytes = sum(sent.body_bytes for sent in copy.copying.ahead)
            for sent in copy.copying.ahead:
                copy.outcome.kv_fallbacks.extend(reason[:REASON_MOST] for reason in sent.fallbacks)
            if self._deltas:
                self._report()
            outcome = copy.outcome  # alone: the copy has the snapshot, which would hold itself by way of this
            last.done.add_done_callback(lambda done: self._copied(done, outcome))

    def _copied(self, done: "Future[Sent]", outcome: pb.WorkerOutcome) -> None:
        """In a thread of the data plane: the snapshot is at its target, or will not be."""
        error = done.exception()
        if error is None:
            sent = done.result()
            outcome.locator = sent.key
            outcome.snapshot_bytes += sent.body_bytes
            outcome.kv_transport = sent.transport
            outcome.kv_fallbacks.extend(reason[:REASON_MOST] for reason in sent.fallbacks)
        else:
            assert isinstance(error, DoraError), error
            fail("copy_out", outcome, error)
        outcome.at = time.time()
        try:
            self._orders.send(pb.WorkerMessage(outcome=outcome))
        except DoraError as gone:  # the engine's thread finds out by itself
            log.info("the outcome of a copy was not sent: %s", gone)

    def _end_copy(self, request_id: str, why: DoraError | None = None) -> None:
        """What was copied is void: ``why``, or it was told to."""
        copy = self._copies.pop(request_id, None)
        if copy is None:
            return
        copy.copying.cancel()
        if not copy.is_last:
            fail("copy_out", copy.outcome, why or TransferFailed("it was cancelled"))
            self._answer(copy.outcome)

    def _data_plane(self) -> DataPlane:
        if self._plane is None:
            raise Conflict("data plane", MISSING, "there, for a request to move with its KV", why="is missing")
        return self._plane

    def _copy_in(self, order: pb.CopyIn, outcome: pb.WorkerOutcome) -> None:
        snapshot = self._data_plane().take(order.locator)
        check_asked_for(snapshot.request, order)
        self._engine.take_in(snapshot)
        self._arrived.add(order.request_id)

    def _thaw(self, order: pb.Thaw, outcome: pb.WorkerOutcome) -> None:
        self._end_copy(order.request_id)
        self._engine.thaw(order.request_id)


@dataclass(slots=True)
class _Copy:
    """A copy and the answer that it is to end with."""

    request_id: str
    copying: Copying
    outcome: pb.WorkerOutcome
    is_told: bool = False  # that it has begun
    is_last: bool = False  # its last round is on its way


LATER: Final = object()  # the answer to a command follows by itself

_OBEY: dict[str, Callable[..., object]] = {
    "load_version": EngineLoop._load_version,
    "start_request": EngineLoop._start_request,
    "remove_request": EngineLoop._remove_request,
    "reserve_slot": EngineLoop._reserve_slot,
    "cancel_reservation": EngineLoop._cancel_reservation,
    "copy_out": EngineLoop._copy_out,
    "copy_in": EngineLoop._copy_in,
    "thaw": EngineLoop._thaw,
}
