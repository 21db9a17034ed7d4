"""Workers without a service: the loop of each, to which a test gives commands."""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from dora.data.types import FinishReason
from dora.kvtransfer.copying import Copying
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import DataPlane
from dora.kvtransfer.transfer import Transfer
from dora.rpc import dora_pb2 as pb
from dora.rpc.columns import columns_from_wire
from dora.worker.engine import RolloutEngine
from dora.worker.fake.engine import FakeEngine
from dora.worker.loop import EngineLoop, Versions
from dora.worker.prefixes import SentPrefixes
from dora.worker.rounds import EngineRounds
from tests.contract.planes import WAIT_S, End

TURNS_MAX = 20_000


def anywhere(name: str) -> AbstractContextManager[Path]:
    """Versions of a worker that has no host's store: each is named by its folder."""
    return nullcontext(Path(name))


class _Plane:
    """A data plane, and whether what was last sent by it has ended; the transfer itself would hold its memory."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self.ended = threading.Event()
        self.ended.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def send_parts(self, *arguments: Any, **options: Any) -> Transfer:
        transfer = self._plane.send_parts(*arguments, **options)
        self.ended = ended = threading.Event()
        transfer.done.add_done_callback(lambda _done: ended.set())
        return transfer


class Worker:
    """One loop with an engine, a fake one by default; a test gives it commands and reads what it says."""

    def __init__(
        self,
        end: End | None,
        model: Path,
        clock: Callable[[], float] | None = None,
        engine: RolloutEngine | None = None,
        orphan_timeout_s: float = 0.0,
        versions: Versions = anywhere,
    ) -> None:
        self.end = end
        self.engine = engine or FakeEngine(
            slots=4, kv_tokens=2048, max_model_len_tokens=256, mean_tokens=25, model=model
        )
        self._commands: queue.SimpleQueue[pb.WorkerCommand] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[pb.WorkerMessage] = queue.SimpleQueue()
        self.outcomes: dict[int, pb.WorkerOutcome] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.routed: dict[str, bytes] = {}
        self.ends: dict[str, FinishReason | None] = {}
        self.began: set[int] = set()  # copies that run ahead of their freeze
        self._number = 0
        self._names: list[str] = []  # of requests, by row
        clock = clock or iter(range(1 << 40)).__next__  # every turn reports
        welcome = pb.Welcome(epoch=1, report_period_ms=1, orphan_timeout_s=orphan_timeout_s)
        self._plane = None if end is None else _Plane(end.plane)
        self.loop = EngineLoop(self.engine, self, welcome, cast(DataPlane | None, self._plane), clock, versions)

    def take(self, _timeout_s: float) -> pb.WorkerCommand | None:
        return None if self._commands.empty() else self._commands.get()

    def send(self, message: pb.WorkerMessage) -> None:
        self._said.put(message)

    def order(self, **kind: object) -> int:
        """Gives a command; its number."""
        self._number += 1
        for order in kind.values():
            if isinstance(order, (pb.StartRequest, pb.CopyIn)):  # of a new row at each worker that it comes to
                order.row = len(self._names)
                self._names.append(order.request_id)
        self._commands.put(pb.WorkerCommand(command_id=self._number, **kind))
        return self._number

    def turn(self) -> None:
        self.loop.turn()
        while not self._said.empty():
            self._hear(self._said.get())

    def obey(self, **kind: object) -> pb.WorkerOutcome:
        """Gives a command and turns until its outcome is there."""
        return self.outcome(self.order(**kind))

    def outcome(self, number: int) -> pb.WorkerOutcome:
        for _ in range(TURNS_MAX):
            self.turn()
            if number in self.outcomes:
                return self.outcomes.pop(number)
        try:  # the copy's thread is slower than so many turns
            while number not in self.outcomes:
                self._hear(self._said.get(timeout=20))
        except queue.Empty:
            raise AssertionError("no outcome came") from None
        return self.outcomes.pop(number)

    def copied(self, number: int, request_id: str) -> pb.WorkerOutcome:
        """The outcome of a copy, with one turn a round: what travels is waited for, whatever has become of it."""
        while number not in self.outcomes:
            self.turn()
            self.await_sent()
            copy = self.loop.endpoint.copies.get(request_id)
            if copy is not None and copy.is_last and number not in self.outcomes:
                self._hear(self._said.get(timeout=WAIT_S))
        return self.outcomes.pop(number)

    def return_with(self, tokens: dict[str, int], end: End | None = None) -> None:
        """A service is there again, which has so many tokens of each of these requests and knows no other."""
        goes_on = []
        for request_id, count in tokens.items():
            for told in (self.tokens, self.logprobs):
                told[request_id] = told.get(request_id, [])[:count]  # type: ignore[index]
            self.ends.pop(request_id, None)
            goes_on.append(pb.GoesOn(request_id=request_id, row=len(self._names), tokens=count))
            self._names.append(request_id)
        welcome = pb.Welcome(epoch=2, report_period_ms=1, orphan_timeout_s=60.0, goes_on=goes_on)
        self._plane = None if end is None else _Plane(end.plane)
        self.loop.come_back(self, welcome, cast(DataPlane | None, self._plane))
        while not self._said.empty():
            self._hear(self._said.get())

    def await_sent(self) -> None:
        """Until what was sent last has arrived, or never will."""
        if self._plane is not None:
            assert self._plane.ended.wait(WAIT_S)

    def await_round(self, request_id: str) -> None:
        """Until the round that is on its way has arrived; no step is done meanwhile."""
        current = self.loop.endpoint.copies[request_id].current
        assert current is not None
        current.done.result(20)

    def finish(self, request_id: str) -> list[int]:
        while not self.ends.get(request_id):
            self.turn()
        return self.tokens[request_id]

    def _hear(self, message: pb.WorkerMessage) -> None:
        if message.HasField("outcome"):
            self.outcomes[message.outcome.command_id] = message.outcome
        for command_id in message.report.begun:
            self.outcomes[command_id] = pb.WorkerOutcome(command_id=command_id, ok=True)
        if message.HasField("copy_began"):
            assert message.copy_began.command_id not in self.outcomes, "told before its outcome"
            self.began.add(message.copy_began.command_id)
        for span in columns_from_wire(message.report.tokens):
            request_id = self._names[span.row]
            known = self.tokens.setdefault(request_id, [])
            assert span.first_token == len(known), "each token is told once"
            known.extend(span.token_ids)
            self.logprobs.setdefault(request_id, []).extend(span.logprobs)
            self.routed[request_id] = self.routed.get(request_id, b"") + span.routed_experts
            self.ends[request_id] = span.finish_reason


def copying_of(
    engine: RolloutEngine, plane: DataPlane, peer: Peer, request_id: str, sent: SentPrefixes | None = None
) -> Copying:
    """A request on its way out of an engine."""
    return Copying(
        plane, peer, request_id, EngineRounds(engine, peer, request_id, sent or SentPrefixes(), plane.part_bytes)
    )


def peer_of(end: End) -> pb.KvPeer:
    peer = end.peer
    return pb.KvPeer(worker_id=peer.worker_id, epoch=peer.epoch, address=peer.address, transports=list(peer.transports))
