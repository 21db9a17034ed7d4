"""Obeys a service's commands, one after the other. An ``Endpoint`` obeys those that workers and pools share."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Generic, Protocol, TypeVar

from dora.errors import Conflict, DoraError
from dora.kvtransfer.copying import Copying
from dora.kvtransfer.endpoint import Endpoint
from dora.kvtransfer.peer import Peer
from dora.rpc import dora_pb2 as pb
from dora.session.failure import fail

log = logging.getLogger("dora.worker")

REASON_MAX: Final = 500  # characters of why a KV transport failed, or a snapshot was dropped
LATER: Final = object()  # the answer to a command follows by itself

Handler = Callable[[Any, pb.WorkerOutcome], object]  # of an order; its outcome is filled in


class Orders(Protocol):
    """The source of commands and the sink of messages; ``Link``, or a list in a test."""

    def take(self, timeout_s: float) -> pb.WorkerCommand | None: ...
    def send(self, message: pb.WorkerMessage) -> None: ...


class Responder:
    """Answers the service that gave a command, even if another one has connected since: their command ids overlap."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def answer(self, outcome: pb.WorkerOutcome) -> None:
        """Answers in order, after all tokens that were sampled before."""
        self.answer_ahead(outcome)

    def answer_ahead(self, outcome: pb.WorkerOutcome) -> None:
        """Answers at once, from any thread."""
        outcome.at = time.time()
        try:
            self._orders.send(pb.WorkerMessage(outcome=outcome))
        except DoraError as gone:  # the loop finds out by itself
            log.info("an outcome was not sent: %s", gone)

    def report_tokens(self) -> None:
        """Reports all tokens that were sampled."""

    def began_copy(self, command_id: int) -> None:
        """Reports that a request's KV is on its way while the request decodes."""
        self._orders.send(pb.WorkerMessage(copy_began=pb.CopyBegan(command_id=command_id)))


V = TypeVar("V", bound=Responder)


class CommandLoop(Generic[V]):
    """Runs commands. ``run`` returns at Shutdown or when told to stop. Its owner adds kinds to ``handlers``."""

    def __init__(self, orders: Orders, endpoint: Endpoint, responder: V) -> None:
        self._orders = orders
        self._responder = responder
        self._shutdown = False
        self.last_order = pb.Shutdown()  # the one that it obeyed
        self.endpoint = endpoint
        self.handlers: dict[str, Handler] = {
            "reserve_slot": self._reserve_slot,
            "cancel_reservation": lambda order, _: endpoint.cancel_reservation(order.request_id),
            "copy_out": self._copy_out,
            "copy_in": lambda order, _: endpoint.copy_in(order.request_id, order.version, order.locator, order.row),
            "thaw": lambda order, _: endpoint.thaw(order.request_id),
            "remove_request": lambda order, _: endpoint.remove(order.request_id),
        }

    def run(self, stop: threading.Event) -> None:
        while not (stop.is_set() or self._shutdown):
            self.turn()

    def turn(self) -> None:
        """Obeys all waiting commands, and does what is due."""
        raise NotImplementedError

    def obey_waiting(self, timeout_s: float) -> bool:
        """Obeys all waiting commands; waits for the first. Returns False after Shutdown: the stream may end then."""
        while not self._shutdown and (command := self._orders.take(timeout_s)) is not None:
            self._obey(command)
            timeout_s = 0.0
        return not self._shutdown

    def _obey(self, command: pb.WorkerCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "shutdown":
            self._shutdown, self.last_order = True, command.shutdown
            return
        outcome = pb.WorkerOutcome(command_id=command.command_id, ok=True, at=time.time())
        try:
            handler = self.handlers.get(kind or "")
            if handler is None:
                raise Conflict("command", kind, f"one of {', '.join(self.handlers)}", why="is not for this process")
            if handler(getattr(command, kind or ""), outcome) is LATER:
                return
        except DoraError as error:
            fail(kind, outcome, error)
            log.warning("%s: %s", kind, outcome.error)  # not the error: its traceback holds KV that has come
        self._answer(kind or "", outcome)

    def _answer(self, kind: str, outcome: pb.WorkerOutcome) -> None:
        self._responder.answer(outcome)

    def leave(self) -> None:
        """Leaves the lost service. The member lives on."""
        self.endpoint.leave()

    def _reserve_slot(self, order: pb.ReserveSlot, outcome: pb.WorkerOutcome) -> object:
        granted, responder = self.endpoint.reserve(order), self._responder
        if granted is None:
            return None

        def answer(done: "Future[None]") -> None:
            error = done.exception()
            if error is not None:
                assert isinstance(error, DoraError), error
                fail("reserve_slot", outcome, error)
            responder.answer_ahead(outcome)

        granted.add_done_callback(answer)
        return LATER

    def _copy_out(self, order: pb.CopyOut, outcome: pb.WorkerOutcome) -> object:
        target = order.target
        peer = Peer(target.worker_id, target.epoch, target.address, tuple(target.transports))
        self.endpoint.copy_out(order.request_id, peer, _CopyReply(outcome, self._responder))
        return LATER


class _CopyReply:
    def __init__(self, outcome: pb.WorkerOutcome, responder: Responder) -> None:
        self._outcome = outcome
        self._responder = responder
        self._answer = responder.answer

    def began(self) -> None:
        self._responder.began_copy(self._outcome.command_id)

    def freezes(self) -> None:
        self._responder.report_tokens()
        self._answer = self._responder.answer_ahead

    def ends(self, copying: Copying, error: DoraError | None) -> None:
        outcome, arrived = self._outcome, copying.arrived
        outcome.tokens, outcome.snapshot_bytes = max(0, copying.tokens), sum(sent.body_bytes for sent in arrived)
        outcome.kv_fallbacks.extend(reason[:REASON_MAX] for sent in arrived for reason in sent.fallbacks)
        if error is None:
            outcome.locator, outcome.kv_transport = arrived[-1].key, arrived[-1].transport
        else:
            fail("copy_out", outcome, error)
            log.warning("copy_out: %s", outcome.error)
        self._answer(outcome)
