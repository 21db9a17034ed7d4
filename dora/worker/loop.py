"""The worker's one loop: obey commands between engine steps, step, report.

Order is the protocol: whatever the engine produced before a command's outcome is reported before that outcome; but of a
request that begins nothing was, so others' tokens wait.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.data.types import RequestSpec
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
from dora.session.failure import fail
from dora.session.orders import REASON_MAX, Orders, check_asked_for, peer_of, waiting
from dora.weights.holds import held
from dora.worker.copying import Copying
from dora.worker.engine import RolloutEngine
from dora.worker.prefixes import SentPrefixes
from dora.worker.reporting import IDLE_S, Reporting
from dora.worker.responses import Responses

log = logging.getLogger("dora.worker")

Versions = Callable[[str], AbstractContextManager[Path]]  # the folder of a version, held

QUEUE_SLOTS = 2  # requests taken in by handoff where there is no pool: this many times the slots


def of_store(folder: Path, holder: str) -> Versions:
    """The versions of a host's store, each held while it is loaded."""
    return lambda name: held(folder, name, holder)


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
        versions: Versions | None = None,
    ) -> None:
        """``versions`` finds a version by its manifest's name; None: in the store that the service has named."""
        self._engine = engine
        self._orders = orders
        self._plane = plane
        self._clock = clock
        self.orphan_timeout_s = welcome.orphan_timeout_s
        self._responses = Responses() if welcome.orphan_timeout_s else None  # None: nobody will ask for them again
        self._name = ""  # of the manifest of the version loaded
        self._reserved: set[str] = set()
        self._versions = versions or of_store(Path(welcome.weights_folder), "worker")
        self._reporting = Reporting(engine, orders, welcome.report_period_ms / 1000, clock)
        self._copies: dict[str, _Copy] = {}  # by request
        self._sent = SentPrefixes()
        self._shutdown = False

    def run(self, stop: threading.Event) -> None:
        while not (stop.is_set() or self._shutdown):
            self.turn()

    def turn(self) -> None:
        """All commands that wait (one awaited, if there is nothing to run), one step, one report where due."""
        timeout_s = 0.0 if self._reporting.has_tokens or self.has_work() else IDLE_S
        for command in waiting(self._orders, timeout_s):
            self._obey(command)
        if self._shutdown:
            return
        for copy in list(self._copies.values()):
            self._go_on(copy)
        if self.has_work():
            self._step()
        self._reporting.report_due(self.has_work())

    def has_work(self) -> bool:
        """Whether there is anything to step, and room for what comes of it."""
        return self._engine.has_work() and not (self._responses is not None and self._responses.is_full)

    def _step(self) -> None:
        deltas = self._engine.step()
        if self._responses is not None:
            self._responses.add(deltas)
        self._reporting.add(deltas)
        for delta in deltas:
            if delta.finish_reason and delta.request_id in self._copies:
                self._end_copy(delta.request_id, NotFound("request_id", delta.request_id, "one that has not ended"))

    def _obey(self, command: pb.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "shutdown":
            self._shutdown = True
            return
        if kind == "pace":
            self._reporting.period_s = command.pace.report_period_ms / 1000
            return
        if kind == "settled":
            self._settle(command.settled.request_ids)
            return
        outcome = pb.WorkerOutcome(command_id=command.command_id, ok=True, at=time.time())
        try:
            if _OBEY[kind](self, getattr(command, kind), outcome) is LATER:
                return
        except DoraError as error:
            fail(kind, outcome, error)
            log.warning("%s: %s", kind, error)
        if kind == "start_request":  # of a request that nothing was sampled of; what was of others can wait
            self._reporting.answer_ahead(outcome)
        else:
            self._reporting.answer(outcome, reports=kind == "load_version")

    def _settle(self, request_ids: Iterable[str]) -> None:
        if self._responses is not None:
            for request_id in request_ids:
                self._responses.forget(request_id)

    def _load_version(self, order: pb.LoadVersion, outcome: pb.WorkerOutcome) -> None:
        began_s = self._clock()
        canary = convert.canary_from_wire(order.canary)
        if self._responses is not None and not self._engine.load().running + self._engine.load().waiting:
            self._responses.clear()
        with self._versions(order.name) as folder:  # its files stay as they are until they are read
            found = self._engine.load_weights(order.version, folder, canary)
        self._name = order.name
        outcome.canary.CopyFrom(convert.canary_to_wire(found))
        log.info("version %d loaded in %.0f ms", order.version, (self._clock() - began_s) * 1000)

    def _start_request(self, order: pb.StartRequest, outcome: pb.WorkerOutcome) -> None:
        request = convert.request_from_wire(order)
        self._engine.add(request)
        self._holds(request, order.row)

    def _holds(self, request: RequestSpec, row: int, *, arrives: bool = False) -> None:
        """The engine has taken the request."""
        self._reporting.begin(request.request_id, row, arrives=arrives)
        if self._responses is not None:
            self._responses.begin(request)

    def _remove_request(self, order: pb.RemoveRequest, outcome: pb.WorkerOutcome) -> None:
        self._end_copy(order.request_id)
        self._let_go(order.request_id)

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
        self._reserved.add(order.request_id)

    def _cancel_reservation(self, order: pb.CancelReservation, outcome: pb.WorkerOutcome) -> None:
        self._reserved.discard(order.request_id)
        self._engine.release(order.request_id)
        if self._plane is not None:
            self._plane.forget(order.request_id)
        self._let_go(order.request_id)  # it may have been copied in before the handoff was undone

    def _let_go(self, request_id: str) -> None:
        """The engine forgets the request, if it has it; what was sampled of it is reported first."""
        self._reporting.forget(request_id)
        if self._responses is not None:
            self._responses.forget(request_id)
        self._engine.remove(request_id)

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
            self._reporting.answer(copy.outcome)
            return
        if copy.copying.is_ahead and not copy.is_told:
            copy.is_told = True
            self._reporting.began_copy(copy.outcome.command_id)
        if last is not None:  # the copy's thread answers: the request is frozen, so what is left of it is reported now
            copy.is_last = True
            copy.outcome.tokens = copy.copying.tokens
            copy.outcome.snapshot_bytes = sum(sent.body_bytes for sent in copy.copying.ahead)
            for sent in copy.copying.ahead:
                copy.outcome.kv_fallbacks.extend(reason[:REASON_MAX] for reason in sent.fallbacks)
            if self._reporting.has_tokens:
                self._reporting.report()
            # Without the copy, whose snapshot would hold itself by way of this; and to the service that asked, even
            # where another is there by then, whose commands have the same numbers.
            outcome, reporting = copy.outcome, self._reporting
            last.done.add_done_callback(lambda done: _copied(done, outcome, reporting))

    def _end_copy(self, request_id: str, why: DoraError | None = None) -> None:
        """What was copied is void: ``why``, or it was told to."""
        copy = self._copies.pop(request_id, None)
        if copy is None:
            return
        copy.copying.cancel()
        if not copy.is_last:
            fail("copy_out", copy.outcome, why or TransferFailed("it was cancelled"))
            self._reporting.answer(copy.outcome)

    # The service's absence.

    def leave(self) -> None:
        """The service is gone: what was under way between workers is undone, and the engine keeps all that it holds."""
        assert self._responses is not None
        self._responses.is_alone = True
        for request_id, copy in self._copies.items():
            copy.copying.cancel()
            self._engine.thaw(request_id)
        self._copies.clear()
        for request_id in self._reserved:
            self._engine.release(request_id)
        self._reserved.clear()
        self._sent, self._plane = SentPrefixes(), None

    def step_alone(self) -> bool:
        """One step while nobody listens; False: there is nothing to step."""
        assert self._responses is not None
        if not self.has_work():
            return False
        self._responses.add(self._engine.step())
        return True

    def held(self) -> pb.WorkerHello:
        """Of a hello, what it says of version and requests."""
        version = self._engine.version
        if version is None or self._responses is None:
            return pb.WorkerHello()
        hosts = pb.HostedVersion(version=version, name=self._name)
        return pb.WorkerHello(hosts=hosts, held=self._responses.held())

    def come_back(
        self, orders: Orders, welcome: pb.Welcome, plane: DataPlane | None, versions: Versions | None = None
    ) -> None:
        """A service is there again: goes on with the requests that it names, and reports what it lacks of them."""
        assert self._responses is not None
        self._orders, self._plane, self.orphan_timeout_s = orders, plane, welcome.orphan_timeout_s
        self._reporting = Reporting(self._engine, orders, welcome.report_period_ms / 1000, self._clock)
        self._versions = versions or of_store(Path(welcome.weights_folder), "worker")
        over, rounds = self._responses.come_back({each.request_id: each.tokens for each in welcome.goes_on})
        for request_id in over:
            self._engine.remove(request_id)
        for each in welcome.goes_on:
            self._reporting.begin(each.request_id, each.row)
        log.info("went on with %d requests, and gave up %d", len(welcome.goes_on), len(over))
        for missing in rounds:
            self._reporting.add(missing)
            self._reporting.report()

    def _data_plane(self) -> DataPlane:
        if self._plane is None:
            raise Conflict("data plane", MISSING, "there, for a request to move with its KV", why="is missing")
        return self._plane

    def _copy_in(self, order: pb.CopyIn, outcome: pb.WorkerOutcome) -> None:
        snapshot = self._data_plane().take(order.locator)
        check_asked_for(snapshot.request, order)
        self._engine.take_in(snapshot)
        self._reserved.discard(order.request_id)
        self._holds(snapshot.request, order.row, arrives=True)

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


def _copied(done: "Future[Sent]", outcome: pb.WorkerOutcome, reporting: Reporting) -> None:
    """In a thread of the data plane: the snapshot is at its target, or will not be."""
    error = done.exception()
    if error is None:
        sent = done.result()
        outcome.locator = sent.key
        outcome.snapshot_bytes += sent.body_bytes
        outcome.kv_transport = sent.transport
        outcome.kv_fallbacks.extend(reason[:REASON_MAX] for reason in sent.fallbacks)
    else:
        assert isinstance(error, DoraError), error
        fail("copy_out", outcome, error)
    try:
        reporting.answer_ahead(outcome)
    except DoraError as gone:  # the engine's thread finds out by itself
        log.info("the outcome of a copy was not sent: %s", gone)


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
