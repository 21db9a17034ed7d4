"""Two workers between which requests go to and fro while others decode; each response is compared with an unmoved one.

A handoff is run as the orchestrator runs it, and undone wherever it fails.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Final

from dora.data.types import RequestSpec
from dora.kvtransfer.snapshot import STATE
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.worker.fake.engine import FakeEngine
from tests.contract.driver import SAMPLINGS, Response, make_request, run
from tests.contract.planes import End, a_plane, until
from tests.contract.workers import Worker, peer_of

BLOCK_TOKENS: Final = 16
CONTEXT_TOKENS: Final = 256
RESPONSES: Final = 48  # different ones
SAMPLES: Final = 3  # of one prompt
RUNNING: Final = 3  # requests of each worker
TIMEOUT_S: Final = 0.5
MEMORY_BYTES: Final = 1 << 20


class Verdict(Enum):
    """The result of a move."""

    MOVED = "moved"
    REFUSED = "refused"  # it goes on at its source, or by re-prefill
    ENDED = "ended"  # the response did, before it could move


@dataclass
class Account:
    """The account of compared responses."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    reprefilled: int = 0
    blocks_leaked: int = 0


def an_engine(model: Path, slots: int = 8, kv_tokens: int = 4096) -> FakeEngine:
    return FakeEngine(
        slots=slots, kv_tokens=kv_tokens, block_tokens=BLOCK_TOKENS, max_model_len_tokens=CONTEXT_TOKENS, model=model
    )


def an_engine_with_state(model: Path) -> FakeEngine:
    return FakeEngine(
        slots=8,
        kv_tokens=4096,
        block_tokens=BLOCK_TOKENS,
        max_model_len_tokens=CONTEXT_TOKENS,
        model=model,
        window_tokens=STATE,
    )


def request_of(index: int) -> RequestSpec:
    """Long ones too, of which rounds are copied ahead. Each prompt has ``SAMPLES`` of them, one after the other."""
    prompt = index // SAMPLES
    shared = make_request(prompt, SAMPLINGS[index % len(SAMPLINGS)], 10 + 31 * prompt % 150, max_tokens=60)
    return replace(shared, request_id=f"r{index}", sampling=replace(shared.sampling, seed=index, ignore_eos=True))


def untouched(model: Path, engines: Callable[[Path], FakeEngine] = an_engine) -> list[Response]:
    """The responses that nobody moves."""
    engine = engines(model)
    engine.load_weights(1, model, None)
    return [run(engine, [request_of(index)])[f"r{index}"] for index in range(RESPONSES)]


class Mill:
    """``address_of``: where others are told that a worker's door is. ``running``: requests of each worker."""

    def __init__(
        self,
        ends: tuple[End, End],
        model: Path,
        chance: random.Random,
        address_of: Callable[[End], str],
        engines: Callable[[Path], FakeEngine] = an_engine,
        running: int = RUNNING,
    ) -> None:
        self.account = Account()
        self.reason = ""  # of the last refusal
        self.workers = tuple(Worker(end, model, engine=engines(model)) for end in ends)
        self._running = running
        self.at: dict[str, int] = {}  # request -> the worker that has it
        self._peers = [pb.KvPeer.FromString(peer_of(end).SerializeToString()) for end in ends]
        for peer, end in zip(self._peers, ends, strict=True):
            peer.address = address_of(end)
        self._chance = chance
        self._expected = untouched(model)
        self._started = 0
        for worker in self.workers:
            assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
        self.tend()

    def tend(self) -> None:
        """Compares what has ended, and starts others, until every request has a token."""
        for name in [name for name, at in self.at.items() if self.workers[at].ends.get(name)]:
            self._compare(name)
        for index, worker in enumerate(self.workers):
            while sum(at == index for at in self.at.values()) < self._running:
                request = replace(
                    request_of(self._started % RESPONSES), request_id=f"{self._started % RESPONSES}.{self._started}"
                )
                self._started += 1
                assert worker.obey(start_request=convert.request_to_wire(request)).ok
                self.at[request.request_id] = index
                while not worker.tokens.get(request.request_id):
                    worker.turn()

    def any_request(self) -> str:
        """One that has not ended."""
        while True:
            self.tend()
            running = [name for name, at in self.at.items() if not self.workers[at].ends.get(name)]
            if running:
                return self._chance.choice(running)

    def target_of(self, name: str) -> End:
        """The worker that it would move to."""
        end = self._ends(name)[1].end
        assert end is not None
        return end

    def move(self, name: str) -> Verdict:
        """A handoff of one request."""
        source, target = self._ends(name)
        spec = request_of(int(name.partition(".")[0]))
        kv_tokens = len(spec.prompt_token_ids) + len(source.tokens[name]) if self._chance.random() < 0.8 else 1
        reserve = pb.ReserveSlot(request_id=name, version=1, kv_tokens=kv_tokens, source_epoch=_epoch(source))
        assert target.obey(reserve_slot=reserve).ok
        peer = self._peers[1 - self.at[name]]
        copied = source.copied(source.order(copy_out=pb.CopyOut(request_id=name, target=peer)), name)
        if not copied.ok:
            return self._undo(name, copied.error)
        self._hand_over(name, source, target)
        found = target.obey(copy_in=pb.CopyIn(request_id=name, version=1, locator=copied.locator))
        if not found.ok:
            return self._undo(name, found.error)
        assert source.obey(remove_request=pb.RemoveRequest(request_id=name)).ok
        self.at[name] = 1 - self.at[name]
        return Verdict.MOVED

    def finish(self) -> Account:
        """Ends all that runs, and counts what is still held then."""
        while any(not self.workers[at].ends.get(name) for name, at in self.at.items()):
            for worker in self.workers:
                worker.turn()
        for name in list(self.at):
            self._compare(name)
        for worker in self.workers:
            assert worker.end is not None
            plane, layout = worker.end.plane, worker.engine.layout
            load = worker.engine.load()
            held = load.kv_used_tokens // BLOCK_TOKENS + load.running + load.waiting + worker.engine.reserved
            try:
                until(lambda plane=plane: sum(plane.held_bytes()) == 0)
            except AssertionError:
                held += max(1, sum(plane.held_bytes()) // layout.block_bytes)
            self.account.blocks_leaked += held
        return self.account

    def _undo(self, name: str, reason: str) -> Verdict:
        self.reason = reason
        source, target = self._ends(name)
        assert target.obey(cancel_reservation=pb.CancelReservation(request_id=name)).ok
        if source.ends.get(name):
            return Verdict.ENDED
        if self._chance.random() < 0.5:
            assert source.obey(thaw=pb.Thaw(request_id=name)).ok
            return Verdict.REFUSED
        assert source.obey(remove_request=pb.RemoveRequest(request_id=name)).ok
        if source.ends.get(name):  # with the step after its removal was asked for
            return Verdict.ENDED
        self._hand_over(name, source, target)
        resumed = replace(
            request_of(int(name.partition(".")[0])),
            request_id=name,
            output_token_ids=tuple(source.tokens[name]),
            logprobs=tuple(source.logprobs[name]),
        )
        assert target.obey(start_request=convert.request_to_wire(resumed)).ok
        self.at[name] = 1 - self.at[name]
        self.account.reprefilled += 1
        return Verdict.REFUSED

    def _ends(self, name: str) -> tuple[Worker, Worker]:
        return self.workers[self.at[name]], self.workers[1 - self.at[name]]

    def _hand_over(self, name: str, source: Worker, target: Worker) -> None:
        """Moves a request. The target continues after the tokens that were reported so far."""
        target.tokens[name] = list(source.tokens.get(name, []))
        target.logprobs[name] = list(source.logprobs.get(name, []))

    def _compare(self, name: str) -> None:
        worker, expected = self.workers[self.at.pop(name)], self._expected[int(name.partition(".")[0])]
        self.account.compared += 1
        if (worker.tokens[name], worker.logprobs[name]) != (expected.token_ids, expected.logprobs):
            self.account.wrong.append(f"{name}: {len(worker.tokens[name])} tokens are not those of an unmoved request")
        for each in self.workers:
            for told in (each.tokens, each.logprobs, each.ends):
                told.pop(name, None)


def _epoch(worker: Worker) -> int:
    assert worker.end is not None
    return worker.end.identity.epoch


@contextmanager
def two_ends(folder: Path, transports: tuple[str, ...], hosts: tuple[str, str] = ("", "")) -> Iterator[tuple[End, End]]:
    """Planes of two workers with little memory and little patience."""
    with ExitStack() as stack:
        yield tuple(  # type: ignore[misc]
            stack.enter_context(
                a_plane(folder, epoch, transports, host=host, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES)
            )
            for epoch, host in enumerate(hosts, 1)
        )
