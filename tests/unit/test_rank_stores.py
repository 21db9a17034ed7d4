"""The KV of several ranks on devices: what is read and written where, and the order of copies and the ranks' kernels.

The ranks' kernels run on streams of which the copies know nothing, as in other processes. Their order comes from the
engine alone: it joins before a step, and a step ends when the kernels of all ranks have run.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.errors import TransferFailed
from dora.worker.copying import rank_stores
from dora.worker.copying.cuda_blocks import DeviceStore
from dora.worker.copying.rank_stores import FromOutside, RankStores, store_of_ranks
from dora.worker.copying.streams import Mark
from tests.refusals import refused
from tests.streams import Simulated, Work, _nothing
from tests.sweeps import examples

BLOCKS = 8
BLOCK_BYTES = 12
# The layers of each rank. Ranks with the same heads hold the same shards.
SPLITS: dict[str, list[list[str]]] = {
    "tensors": [["a@0", "b@0"], ["a@1", "b@1"]],
    "shared heads": [["a@0"], ["a@0"], ["a@1"], ["a@1"]],
    "stages": [["a"], ["b", "c"]],
    "both": [["a@0"], ["a@1"], ["b@0"], ["b@1"]],
}


class Corrupted(AssertionError):
    """A block does not have its bytes."""


@dataclass
class Outside(Simulated):
    """A rank's device: copies wait for none of its kernels, which another process has queued."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self._queue_copy(Work(_nothing))
        yield
        self.some()


@dataclass
class Engine:
    """An engine whose ranks are simulated devices."""

    seed: int
    split: str
    store_class: type[RankStores] = RankStores
    streams_class: type[FromOutside] = FromOutside
    pinned_bytes: int = 1 << 20
    content: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)  # of live blocks
    arriving: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.numbers = np.random.default_rng(self.seed)
        self.devices = [Outside(self.random) for _ in SPLITS[self.split]]
        self.tensors = [
            {name: torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8) for name in names}
            for names in SPLITS[self.split]
        ]
        self.stores = [
            DeviceStore(
                own,
                dict.fromkeys(own, 0),
                BLOCKS,
                stage_bytes=2 * BLOCK_BYTES,
                pinned_bytes=self.pinned_bytes,
                streams=self.streams_class(device),
            )
            for own, device in zip(self.tensors, self.devices, strict=True)
        ]
        self.store = self.store_class(self.stores)
        self.free = list(range(BLOCKS))

    def act(self, action: str) -> None:
        getattr(self, action)()
        for device in self.devices:
            device.some()

    def arrive(self) -> None:
        """Some blocks of a reserved request arrive."""
        self.random.shuffle(self.free)
        block_ids = [self.free.pop() for _ in range(min(len(self.free), self.random.randint(0, 2)))]
        if block_ids:
            rows = {name: self.numbers.integers(1, 255, (len(block_ids), size), np.uint8) for name, size in self.layers}
            self.store.write([block_ids], {name: [given] for name, given in rows.items()})
            for at, block_id in enumerate(block_ids):
                self.arriving[block_id] = {name: given[at] for name, given in rows.items()}

    def take_in(self) -> None:
        self.content |= self.arriving
        self.arriving = {}

    def remove(self) -> None:
        """Some blocks are given back, also of requests that were not taken in."""
        for held in (self.content, self.arriving):
            if held and self.random.random() < 0.5:
                block_id = self.random.choice(list(held))
                del held[block_id]
                self.free.append(block_id)

    def step(self) -> None:
        """Each rank reads the live blocks, and computes a free one; blocks arrive meanwhile."""
        self.store.join()
        computed = self.free.pop() if self.free else None
        made = {} if computed is None else {name: self.numbers.integers(1, 255, size) for name, size in self.layers}
        wrong: list[str] = []
        live = dict(self.content)

        def kernel(own: dict[str, torch.Tensor]) -> None:
            for name, rows in own.items():
                if computed is not None:
                    rows[computed] = torch.from_numpy(made[name])
                wrong.extend(f"{name} {at}" for at, has in live.items() if not np.array_equal(rows[at], has[name]))

        done = [
            device.kernel(lambda own=own: kernel(own)) for device, own in zip(self.devices, self.tensors, strict=True)
        ]
        self.arrive()
        for each in done:
            each.synchronize()
        if computed is not None:
            self.content[computed] = made
        if wrong:
            raise Corrupted(wrong)

    def show(self) -> None:
        block_ids = list(self.content)
        try:
            shown = self.store.show([block_ids])
        except TransferFailed:
            return
        for device in self.devices:
            device.some()
        for name, pieces in shown.items():
            for at, block_id in enumerate(block_ids):
                if not np.array_equal(np.concatenate(pieces)[at], self.content[block_id][name]):
                    raise Corrupted(f"shown {name} {block_id}")

    @property
    def layers(self) -> Sequence[tuple[str, int]]:
        return self.store.layers


ACTIONS = ("arrive", "take_in", "remove", "step", "show")


def conduct(engine: Engine, actions: Sequence[str]) -> None:
    for action in actions:
        engine.act(action)
    engine.take_in()
    engine.step()
    engine.show()


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    split=st.sampled_from(list(SPLITS)),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=40),
)
def test_no_order_of_copies_and_kernels_of_ranks_changes_what_they_read(
    seed: int, split: str, actions: list[str]
) -> None:
    conduct(Engine(seed, split), actions)


class JoinsTheFirst(RankStores):
    def join(self) -> None:
        self._stores[0].join()


class WritesOneHolder(RankStores):
    """Only one of several ranks with the same heads is written."""

    def write(self, block_ids: Any, blocks: Any) -> None:
        for store in self._readable:
            store.write(block_ids, blocks)


class ShowsUnawaited(RankStores):
    def show(self, block_ids: Any) -> Any:
        begun = [store.begin_show(block_ids) for store in self._readable]
        begun[0].mark.synchronize()
        return {name: pieces for showing in begun for name, pieces in showing.blocks.items()}


class QueuesTheJoin(FromOutside):
    """The wait is queued on this process's stream, where no rank computes."""

    def hold_up(self, mark: Mark) -> None:
        pass


PLANTED: dict[str, Callable[[int], Engine]] = {
    "only the first rank's writes are joined": lambda seed: Engine(seed, "tensors", store_class=JoinsTheFirst),
    "only one rank of those with the same heads is written": lambda seed: Engine(
        seed, "shared heads", store_class=WritesOneHolder
    ),
    "only the first rank's copies are awaited": lambda seed: Engine(seed, "stages", store_class=ShowsUnawaited),
    "a join that blocks nobody": lambda seed: Engine(seed, "both", streams_class=QueuesTheJoin),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_of_ranks_is_found(fault: str) -> None:
    for seed in range(300):
        drawn = random.Random(seed)
        try:
            conduct(PLANTED[fault](seed), [drawn.choice(ACTIONS) for _ in range(40)])
        except Corrupted:
            return
    pytest.fail(f"not found in 300 runs: {fault}")


@pytest.mark.parametrize("split", SPLITS)
def test_each_shard_is_read_once_and_written_in_every_rank_that_holds_it(split: str) -> None:
    engine = Engine(1, split)
    names = sorted({name for own in SPLITS[split] for name in own})
    assert engine.store.layers == tuple((name, BLOCK_BYTES) for name in names)
    rows = {name: np.full((2, BLOCK_BYTES), at + 1, np.uint8) for at, name in enumerate(names)}
    engine.store.write([[3, 1]], {name: [given] for name, given in rows.items()})
    engine.store.join()
    for own in engine.tensors:
        for name, tensor in own.items():
            assert torch.all(tensor[[3, 1]] == rows[name][0, 0]) and int(tensor.sum()) == int(rows[name].sum())
    shown = engine.store.show([[1, 3]])
    assert sorted(shown) == names
    assert all(np.array_equal(np.concatenate(shown[name]), rows[name]) for name in names)


def test_no_copy_is_under_way_after_a_rank_had_too_little_pinned_memory() -> None:
    """The memory of the others is lent again at once."""
    engine = Engine(1, "tensors")
    held = engine.stores[1].show([list(range(BLOCKS))])
    engine.stores[1]._pinned = type(engine.stores[1]._pinned)(0, engine.devices[1].host_memory)
    with refused(TransferFailed):
        engine.store.show([[0, 1]])
    assert not engine.devices[0].copies
    assert held


def test_ranks_share_the_bound_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    large = 1 << 16
    tensors = [{name: torch.zeros((BLOCKS, large), dtype=torch.uint8)} for name in ("a@0", "a@1")]
    monkeypatch.setattr(rank_stores, "PINNED_BYTES", 4 * large)
    store = store_of_ranks(tensors, {"a@0": 0, "a@1": 0}, BLOCKS)
    assert isinstance(store, RankStores) and store.show([[0]])
    with refused(TransferFailed):
        store.show([[0, 1, 2, 3]])
    assert isinstance(store_of_ranks(tensors[:1], {"a@0": 0}, BLOCKS), DeviceStore)
