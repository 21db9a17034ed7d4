"""The worker's loop: executes commands between engine steps, steps, reports.

All tokens produced before a command's outcome are reported before that outcome. Reports themselves tell which requests
have begun.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from dora.data.remembered import Remembered
from dora.data.types import RequestSpec
from dora.errors import Conflict, NotFound
from dora.kvtransfer.endpoint import Endpoint, ReserveOrder, SnapshotRoom
from dora.kvtransfer.layout import body_bytes_most
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import ArrivedSnapshot, DataPlane
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.session.commands import LATER, CommandLoop, Orders
from dora.weights.holds import held
from dora.worker.engine import RolloutEngine
from dora.worker.prefixes import SentPrefixes
from dora.worker.reporting import IDLE_S, Reporting
from dora.worker.responses import Responses
from dora.worker.rounds import EngineRounds

log = logging.getLogger("dora.worker")

Versions = Callable[[str], AbstractContextManager[Path]]  # the folder of a version, held


def of_store(folder: Path, holder: str) -> Versions:
    """Returns the versions of a host's store, each held while it is loaded."""
    return lambda name: held(folder, name, holder)


QUEUE_SLOTS: Final = 2  # requests taken in by handoff without a pool: this many times the slots


class EngineLoop(CommandLoop[Reporting]):
    """Owns the engine, which is a store of handoffs between two steps.

    The data plane copies KV in its own threads. A worker without one takes part in no handoff.
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
        """``versions`` finds a version by its manifest's name, by default in the store that the service names."""
        if plane is not None:
            plane.use(engine.device_memory)
        self._engine = engine
        self._clock = clock
        self.orphan_timeout_s = welcome.orphan_timeout_s
        self._responses = Responses() if welcome.orphan_timeout_s else None  # None: nobody will ask for them again
        self._name = ""  # manifest name of the loaded version
        self._versions = versions or of_store(Path(welcome.weights_folder), "worker")
        self._sent = SentPrefixes()
        self.release, self.thaw = engine.release, engine.thaw
        reporting = Reporting(engine, orders, welcome.report_period_ms / 1000, clock)
        super().__init__(orders, Endpoint(self, plane), reporting)
        self.handlers |= {
            "load_version": self._load_version,
            "start_request": self._start_request,
            "extend_request": self._extend_request,
            "pace": self._pace,
            "settled": self._settle,
            "remember": self._remember,
        }

    def turn(self) -> None:
        """Executes all waiting commands (waits for one if there is no work), runs one step, and reports if due."""
        if not self.obey_waiting(0.0 if self._responder.has_tokens or self.has_work() else IDLE_S):
            return
        self.endpoint.advance()
        if self.has_work():
            self._step()
        self._responder.report_due(self.has_work())

    def has_work(self) -> bool:
        """Returns whether there is work and room for its results."""
        return self._engine.has_work() and not (self._responses is not None and self._responses.is_full)

    def _step(self) -> None:
        deltas = self._engine.step()
        if self._responses is not None:
            self._responses.add(deltas)
        self._responder.add(deltas)
        for delta in deltas:
            if delta.finish_reason and delta.request_id in self.endpoint.copies:
                ended = NotFound("request_id", delta.request_id, "one that has not ended")
                self.endpoint.end_copy(delta.request_id, ended)

    def _answer(self, kind: str, outcome: pb.WorkerOutcome) -> None:
        if kind in ("start_request", "extend_request"):
            self._responder.has_begun(outcome)
        else:
            self._responder.answer(outcome, reports=kind == "load_version")

    def _pace(self, notice: pb.Pace, _outcome: pb.WorkerOutcome) -> object:
        self._responder.period_s = notice.report_period_ms / 1000
        return LATER

    def _settle(self, notice: pb.Settled, _outcome: pb.WorkerOutcome) -> object:
        if self._responses is not None:
            for request_id in notice.request_ids:
                self._responses.settle(request_id)
        return LATER

    def _remember(self, notice: pb.Remember, _outcome: pb.WorkerOutcome) -> object:
        for each in notice.responses:
            token_ids = convert.token_ids_from_wire(each.token_ids, "token_ids")
            self._engine.remember(Remembered(each.scope, each.task, tuple(token_ids)))
        return LATER

    def _load_version(self, order: pb.LoadVersion, outcome: pb.WorkerOutcome) -> None:
        began_s = self._clock()
        canary = convert.canary_from_wire(order.canary)
        if self._responses is not None and not self._engine.load().running + self._engine.load().waiting:
            self._responses.clear()
        with self._versions(order.name) as folder:  # its files are held until they are read
            found = self._engine.load_weights(order.version, folder, canary)
        self._name = order.name
        outcome.canary.CopyFrom(convert.canary_to_wire(found))
        log.info("version %d loaded in %.0f ms", order.version, (self._clock() - began_s) * 1000)

    def _start_request(self, order: pb.StartRequest, outcome: pb.WorkerOutcome) -> None:
        request = convert.request_from_wire(order)
        self._engine.add(request)
        computes = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._holds(request, order.row, arrives=request.keeps, computes=computes)

    def _extend_request(self, order: pb.ExtendRequest, outcome: pb.WorkerOutcome) -> None:
        """Raises NotFound for a request that is not here, Conflict for one with other tokens."""
        inputs = convert.token_ids_from_wire(order.given_token_ids, "given_token_ids")
        held = self._engine.request(order.request_id)
        after, outputs = order.first_token, order.first_token + order.dropped_tokens
        if len(held.output_token_ids) != outputs:
            why, allowed = "has other tokens", f"{outputs} outputs before the given tokens"
            raise Conflict("outputs", len(held.output_token_ids), allowed, why)
        sampling = convert.sampling_from_wire(order.sampling)
        self._engine.extend(order.request_id, inputs, sampling, after=after, prompt_logprobs=order.prompt_logprobs)
        whole = len(held.prompt_token_ids) + after if order.prompt_logprobs else 0
        self._responder.begin(order.request_id, order.row, arrives=True, computes=whole + len(inputs))
        if self._responses is not None:
            self._responses.extend(order.request_id, inputs, sampling, after)

    def _holds(self, request: RequestSpec, row: int, *, arrives: bool = False, computes: int = 0) -> None:
        """Enters a request that the engine has taken. ``computes`` is as in ``Reporting.begin``."""
        self._responder.begin(request.request_id, row, arrives=arrives, computes=computes, keeps=request.keeps)
        if self._responses is not None:
            self._responses.begin(request)

    # Of a store of handoffs.

    def reserve(self, order: ReserveOrder) -> SnapshotRoom:
        if order.version != self._engine.version:
            raise Conflict("version", order.version, f"{self._engine.version}, the one loaded", why="is not loaded")
        load, capability = self._engine.load(), self._engine.capability
        held = load.running + load.waiting + self._engine.reserved
        limit = (1 if order.needs_slot else QUEUE_SLOTS) * capability.slots
        if held >= limit:
            raise Conflict("requests held", held, f"below {limit}", why="leaves no room for another")
        if order.kv_tokens > capability.kv_tokens:
            raise Conflict("kv_tokens", order.kv_tokens, f"at most {capability.kv_tokens}", why="is too much")
        most_bytes = body_bytes_most(self._engine.layout, capability.max_model_len_tokens)
        return SnapshotRoom(most_bytes, self._engine.reserve(order.request_id, order.kv_tokens))

    def accept(self, arrived: ArrivedSnapshot, row: int) -> None:
        self._engine.take_in(arrived.snapshot)
        self._holds(arrived.snapshot.request, row, arrives=True)

    def rounds_of(self, request_id: str, peer: Peer) -> EngineRounds:
        return EngineRounds(self._engine, peer, request_id, self._sent, self.endpoint.plane.part_bytes)

    def remove(self, request_id: str) -> None:
        """Removes the request from the engine, if present, after reporting its sampled tokens."""
        self._responder.forget(request_id)
        if self._responses is not None:
            self._responses.forget(request_id)
        self._engine.remove(request_id)

    # The service's absence.

    def leave(self) -> None:
        """Handles the loss of the service: undoes transfers in progress; the engine keeps its requests."""
        assert self._responses is not None
        self._responses.is_alone = True
        super().leave()
        self._sent = SentPrefixes()  # peers of the next service are others

    def step_alone(self) -> bool:
        """Runs one step without a service. Returns False if there is no work."""
        assert self._responses is not None
        if not self.has_work():
            return False
        self._responses.add(self._engine.step())
        return True

    def held(self) -> pb.WorkerHello:
        version = self._engine.version
        if version is None or self._responses is None:
            return pb.WorkerHello()
        hosts = pb.HostedVersion(version=version, name=self._name)
        return pb.WorkerHello(hosts=hosts, held=self._responses.held())

    def come_back(
        self, orders: Orders, welcome: pb.Welcome, plane: DataPlane | None, versions: Versions | None = None
    ) -> None:
        """Reconnects to a service: continues the requests that it names and reports the tokens that it lacks."""
        assert self._responses is not None
        self._orders, self.orphan_timeout_s = orders, welcome.orphan_timeout_s
        if plane is not None:
            plane.use(self._engine.device_memory)
        self.endpoint.come_back(plane)
        self._responder = Reporting(self._engine, orders, welcome.report_period_ms / 1000, self._clock)
        self._versions = versions or of_store(Path(welcome.weights_folder), "worker")
        over, rounds = self._responses.come_back({each.request_id: each.tokens for each in welcome.goes_on})
        for request_id in over:
            self._engine.remove(request_id)
        for each in welcome.goes_on:
            self._responder.begin(each.request_id, each.row)
        log.info("went on with %d requests, and gave up %d", len(welcome.goes_on), len(over))
        for missing in rounds:
            self._responder.add(missing)
            self._responder.report()
