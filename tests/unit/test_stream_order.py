"""Copies of KV beside the engine's steps, on a device that runs them as late and in any order that events allow.

The store and the reservations are the real ones. The engine here does what ``VllmEngine`` does with them: it takes and
gives back blocks between steps, joins the store's writes, schedules, which takes in requests that waited for blocks and
writes their KV, joins again, runs its kernels, and waits for them. Its ranks may be in other processes (``outside``).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.kvtransfer.codec import Opening
from dora.kvtransfer.snapshot import KvLayout, Pieces
from dora.worker.copying.cuda_blocks import DeviceStore, _Batch
from dora.worker.copying.rank_stores import FromOutside
from dora.worker.copying.streams import DONE, Mark, Streams
from dora.worker.reservation import PreparedOpening, Reservation
from tests.cuda_layouts import Made, Sizes, made
from tests.streams import Simulated, Work, _nothing
from tests.sweeps import examples

BLOCKS = 10
SIZES = Sizes(layers=2, blocks=BLOCKS, heads=2, tokens=2, content=3, dtype=torch.uint8)
ACTIONS = ("prompt", "reserve", "round", "cancel", "take in", "take in within the step", "step", "show", "remove")


class Corrupted(AssertionError):
    """A block of a live request does not have its bytes."""


@dataclass
class Request:
    """The blocks of a live request, and what they must hold: (blocks, bytes) of each layer."""

    block_ids: list[int]
    content: dict[str, np.ndarray]
    is_new: bool = False  # its prompt is computed in the next step


@dataclass
class Engine:
    """An engine on a simulated device, driven by ``act``."""

    seed: int
    store_class: type[DeviceStore] = DeviceStore
    device_class: type[Simulated] = Simulated
    joins_late: bool = False
    joins: bool = True
    joins_scheduled: bool = True
    outside: bool = False
    reservation_class: type[Reservation] = Reservation
    live: list[Request] = field(default_factory=list)
    reserved: list[tuple[Reservation, dict[str, np.ndarray]]] = field(default_factory=list)
    waiting: int = 0  # requests that arrived with their KV, which is written when they are scheduled

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.numbers = np.random.default_rng(self.seed)
        self.device = self.device_class(self.random)
        self.made: Made = made("LBHNC", SIZES, "cpu", self.seed)
        groups = dict.fromkeys(self.made.tensors, 0)
        streams = cast(Streams, FromOutside(self.device)) if self.outside else self.device
        self.store = self.store_class(self.made.tensors, groups, BLOCKS, stage_bytes=64, streams=streams)
        self.layout = KvLayout("fingerprint", "backend", "uint8", SIZES.tokens, self.store.layers)
        self.free = list(range(BLOCKS))

    def act(self, action: str) -> None:
        {
            "prompt": self.prompt,
            "reserve": self.reserve,
            "round": self.round,
            "cancel": self.cancel,
            "take in": self.take_in,
            "take in within the step": self.take_in_within_the_step,
            "step": self.step,
            "show": self.show,
            "remove": self.remove,
        }[action]()
        self.device.some()

    def take(self) -> list[int]:
        count = min(len(self.free), self.random.randint(1, 3))
        self.random.shuffle(self.free)
        return [self.free.pop() for _ in range(count)]

    def bytes_for(self, count: int) -> dict[str, np.ndarray]:
        return {name: self.numbers.integers(0, 255, (count, size), np.uint8) for name, size in self.store.layers}

    def prompt(self) -> None:
        if block_ids := self.take():
            self.live.append(Request(block_ids, self.bytes_for(len(block_ids)), is_new=True))

    def reserve(self) -> None:
        if block_ids := self.take():
            reservation = self.reservation_class(self.layout, block_ids, self.store, lambda _: None)
            reservation._begun = PreparedOpening(cast(Opening, SimpleNamespace(layout=self.layout)), None)
            self.reserved.append((reservation, self.bytes_for(len(block_ids))))

    def round(self) -> None:
        """The next block of a reservation arrives."""
        waiting = [each for each in self.reserved if each[0].written < len(each[0].own_ids)]
        if waiting:
            reservation, content = self.random.choice(waiting)
            at = reservation.written
            body = np.concatenate([content[name][at] for name, _ in self.store.layers])
            assert reservation.write(at * self.layout.block_bytes, body)

    def cancel(self) -> None:
        if self.reserved:
            reservation, _ = self.reserved.pop(self.random.randrange(len(self.reserved)))
            reservation.close()
            self.free += reservation.own_ids

    def take_in(self) -> None:
        whole = [each for each in self.reserved if each[0].written == len(each[0].own_ids)]
        if whole:
            reservation, content = chosen = self.random.choice(whole)
            self.reserved.remove(chosen)
            reservation.close()
            self.live.append(Request(list(reservation.own_ids), content))

    def take_in_within_the_step(self) -> None:
        self.waiting += 1
        self.step()

    def schedule(self) -> None:
        """Gives blocks to requests that wait with their KV, or found it in the tier, and writes it."""
        for _ in range(self.waiting):
            if block_ids := self.take():
                content = self.bytes_for(len(block_ids))
                self.store.write([block_ids], {name: [rows] for name, rows in content.items()})
                self.live.append(Request(block_ids, content))
        self.waiting = 0

    def remove(self) -> None:
        if self.live:
            self.free += self.live.pop(self.random.randrange(len(self.live))).block_ids

    def step(self) -> None:
        if self.joins and not self.joins_late:
            self.store.join()
        self.schedule()
        if self.joins and self.joins_scheduled and not self.joins_late:
            self.store.join()
        wrong: list[str] = []
        done = self.device.kernel(partial(self._forward, list(self.live), wrong))
        if self.joins and self.joins_late:
            self.store.join()
        done.synchronize()
        for request in self.live:
            request.is_new = False
        if wrong:
            raise Corrupted(wrong)

    def _forward(self, live: list[Request], wrong: list[str]) -> None:
        """Computes new prompts, and reads all other KV."""
        for request in live:
            for name, rows in self.made.places.items():
                bytes_of = self.made.buffer.view(torch.uint8).numpy()
                if request.is_new:
                    bytes_of[rows[request.block_ids]] = request.content[name]
                elif not np.array_equal(bytes_of[rows[request.block_ids]], request.content[name]):
                    wrong.append(f"{name}: blocks {request.block_ids}")

    def show(self) -> None:
        computed = [each for each in self.live if not each.is_new]
        if computed:
            request = self.random.choice(computed)
            shown = self.store.show([request.block_ids])
            self.device.some()
            for name, pieces in shown.items():
                if not np.array_equal(np.concatenate(pieces), request.content[name]):
                    raise Corrupted(f"shown {name}: blocks {request.block_ids}")


def conduct(engine: Engine, actions: list[str]) -> None:
    for action in actions:
        engine.act(action)
    engine.step()


@settings(max_examples=examples(400), deadline=None)
@given(seed=st.integers(0, 2**32), outside=st.booleans(), actions=st.lists(st.sampled_from(ACTIONS), max_size=60))
def test_no_order_of_copies_and_kernels_changes_what_a_request_reads(
    seed: int, outside: bool, actions: list[str]
) -> None:
    conduct(Engine(seed, outside=outside), actions)


# ---------------------------------------------------------------------------------------- planted faults, each found


class NoMarks(Simulated):
    """As after an import of vLLM's CPU modules: events of which nothing is known."""

    def mark(self) -> Mark:
        return DONE


class MarksTooEarly(Simulated):
    """The event is recorded before the copies that it stands for."""

    def mark(self) -> Mark:
        event = super().mark()
        self.copies.remove(event.work)  # type: ignore[attr-defined]
        event.work.is_done = True  # type: ignore[attr-defined]
        return event


class LateIds(Simulated):
    """Ids are read when the copy runs, from memory that the next call has overwritten."""

    def ids(self, block_ids: Any) -> torch.Tensor:
        memory = self.__dict__.setdefault("memory", torch.zeros(BLOCKS, dtype=torch.int64))
        memory[: len(block_ids)] = torch.tensor(block_ids, dtype=torch.int64)
        return cast(torch.Tensor, memory[: len(block_ids)])


class TwoCopyStreams(Simulated):
    """Copies out and in are not ordered: every second context has a stream of its own."""

    def _queue_copy(self, work: Work) -> Work:
        if self.random.random() < 0.5 and work.run is not _nothing:
            self.engine.appendleft(work)
            return work
        return super()._queue_copy(work)


class HoldsUpNothing(Simulated):
    def hold_up(self, mark: Mark) -> None:
        pass


class HoldsUpTheFirst(Simulated):
    """Only the first write is awaited."""

    def hold_up(self, mark: Mark) -> None:
        super().hold_up(self.__dict__.setdefault("first", mark))


class ReusesOutlets(DeviceStore):
    def _load(self, batch: _Batch, ids: Any, blocks: Any) -> None:
        self._leaving = [DONE, DONE]
        super()._load(batch, ids, blocks)


class OneOutlet(DeviceStore):
    def _load(self, batch: _Batch, ids: Any, blocks: Any) -> None:
        self._outlets[1] = self._outlets[0]
        super()._load(batch, ids, blocks)


class ShowsUnawaited(DeviceStore):
    def show(self, block_ids: Any) -> Any:
        streams = self._streams
        try:
            self._streams = cast(Any, _WithoutMarks(streams))
            return super().show(block_ids)
        finally:
            self._streams = streams


class _WithoutMarks:
    def __init__(self, streams: Any) -> None:
        self._streams = streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def mark(self) -> Mark:
        return DONE


class WritesBesideTheLine(DeviceStore):
    """Blocks are copied on the engine's stream, without a wait for the stage."""

    def _load(self, batch: _Batch, ids: Any, blocks: Any) -> None:
        streams, self._streams = self._streams, cast(Any, _OnEngine(self._streams))
        try:
            super()._load(batch, ids, blocks)
        finally:
            self._streams = streams


class _OnEngine(_WithoutMarks):
    def run(self, copies: Callable[[], None]) -> None:
        self._streams.kernel(copies)


class WritesAfterTheEnd(Reservation):
    """A round that arrives at a closed reservation is written."""

    def close(self) -> None:
        blocks: dict[str, Pieces] = {name: [np.full((1, size), 7, np.uint8)] for name, size in self._layout.layers}
        super().close()
        self._store.write([self.own_ids[:1]], blocks)


PLANTED: dict[str, Callable[[int], Engine]] = {
    "join after the forward pass": lambda seed: Engine(seed, joins_late=True),
    "no join of what the step itself writes": lambda seed: Engine(seed, joins_scheduled=False),
    "no join of what the step of ranks elsewhere writes": lambda seed: Engine(
        seed, joins_scheduled=False, outside=True
    ),
    "no join": lambda seed: Engine(seed, joins=False),
    "events that are none": lambda seed: Engine(seed, device_class=NoMarks),
    "events before their copies": lambda seed: Engine(seed, device_class=MarksTooEarly),
    "ids in memory that is reused": lambda seed: Engine(seed, device_class=LateIds),
    "copies without an order": lambda seed: Engine(seed, device_class=TwoCopyStreams),
    "the engine waits for nothing": lambda seed: Engine(seed, device_class=HoldsUpNothing),
    "the engine waits for the first write": lambda seed: Engine(seed, device_class=HoldsUpTheFirst),
    "outlets are reused at once": lambda seed: Engine(seed, store_class=ReusesOutlets),
    "one outlet for two copies": lambda seed: Engine(seed, store_class=OneOutlet),
    "a show that is not awaited": lambda seed: Engine(seed, store_class=ShowsUnawaited),
    "copies on the engine's stream": lambda seed: Engine(seed, store_class=WritesBesideTheLine),
    "writes after the reservation's end": lambda seed: Engine(seed, reservation_class=WritesAfterTheEnd),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_order_is_found(fault: str) -> None:
    for seed in range(400):
        drawn = random.Random(seed)
        try:
            conduct(PLANTED[fault](seed), [drawn.choice(ACTIONS) for _ in range(60)])
        except Corrupted:
            return
    pytest.fail(f"not found in 400 runs: {fault}")
