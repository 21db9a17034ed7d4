"""The KV-caches of several ranks on devices as one store: a ``DeviceStore`` for each rank, in the engine's process.

The ranks' processes compute, and the engine's process copies: it has opened their KV tensors (``Device.opened``). Ranks
may hold the same shards; then one of them is read and all are written.

A step returns when its sampled tokens are on the host. Each rank's attention kernels are complete by then, because the
tokens depend on a later message of that rank: an all-reduce of its tensor-parallel group, or the next stage's input.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from dora.kvtransfer.snapshot import Pieces
from dora.worker.copying.cuda_blocks import PINNED_BYTES, DeviceStore, Showing
from dora.worker.copying.streams import Mark, Streams, streams_of
from dora.worker.reservation import KvStore


class FromOutside:
    """The copy stream of a device whose engine runs in another process: ``hold_up`` makes the caller wait."""

    def __init__(self, streams: Streams) -> None:
        self._streams: Final = streams
        self.host_memory = streams.host_memory
        self.device_memory = streams.device_memory
        self.entered = streams.entered
        self.run = streams.run
        self.ids = streams.ids
        self.mark = streams.mark

    def hold_up(self, mark: Mark) -> None:
        mark.synchronize()


class RankStores:
    """A ``KvStore``. Thread-safe, as each rank's store is."""

    device_memory = None  # the shards of one body are on several devices

    def __init__(self, stores: Sequence[DeviceStore]) -> None:
        """``stores`` are those of the ranks, in their order."""
        self._stores = tuple(stores)
        self._readable: list[DeviceStore] = []  # ranks that together hold each shard once
        found: dict[str, int] = {}
        for store in self._stores:
            own = dict(store.layers)
            if not own.keys() <= found.keys():
                self._readable.append(store)
                found.update(own)
        self._layers = tuple(sorted(found.items()))

    @property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """(layer name, bytes per block), sorted by name."""
        return self._layers

    @property
    def orders(self) -> tuple[str, ...]:
        """The axis orders inside the layers' blocks. KV of other orders does not fit this engine."""
        return tuple(sorted({order for store in self._stores for order in store.orders}))

    @property
    def slice_bytes(self) -> int:
        """The stages of the ranks that share the layers."""
        return sum(store.slice_bytes for store in self._readable)

    def show(self, block_ids: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        """Returns copies of some blocks of every layer. All ranks copy at the same time.

        Raises TransferFailed if one of them has too little pinned memory; then no copy is under way.
        """
        begun: list[Showing] = []
        try:
            for store in self._readable:
                begun.append(store.begin_show(block_ids))
        finally:
            for showing in begun:  # pinned memory that a copy still writes must not be lent again
                showing.mark.synchronize()
        return {name: pieces for showing in begun for name, pieces in showing.blocks.items()}

    lend = show

    def write(self, block_ids: Sequence[Sequence[int]], blocks: Mapping[str, Pieces]) -> None:
        """Overwrites some blocks of every layer, in every rank that holds it."""
        for store in self._stores:
            store.write(block_ids, blocks)

    def join(self) -> None:
        """Waits until all earlier writes have reached the ranks."""
        for store in self._stores:
            store.join()


def store_of_ranks(
    tensors: Sequence[Mapping[str, torch.Tensor]], groups: Mapping[str, int], block_count: int, landing_bytes: int = 0
) -> KvStore:
    """Returns the store of an engine's KV-cache. ``tensors`` are each rank's by layer, ``groups`` each layer's.

    Several ranks share the bound of pinned memory. ``landing_bytes`` is as in ``DeviceStore``, for one rank.
    """
    if len(tensors) == 1:
        return DeviceStore(tensors[0], groups, block_count, landing_bytes=landing_bytes)
    return RankStores(
        [
            DeviceStore(
                own,
                {name: groups[name] for name in own},
                block_count,
                pinned_bytes=PINNED_BYTES // len(tensors),
                streams=FromOutside(streams_of(next(iter(own.values())).device)),
            )
            for own in tensors
        ]
    )
