"""Moves raw blocks between the KV-cache of an engine on a GPU and host memory.

A layer's block is the bytes that its tensor gives it, in memory order; their meaning is private to the kernels. Blocks
are gathered into one staging buffer on the device and cross the bus together, in both directions on a separate stream.
Engines differ in their memory order; ``DeviceStore.orders`` tells it.

The same code runs on CPU tensors, without a stream: tests need no GPU.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from dora.errors import TransferFailed
from dora.kvtransfer.device import OnDevice, is_on_device
from dora.kvtransfer.memory import BufferPool
from dora.kvtransfer.snapshot import Pieces
from dora.worker.copying.device_memory import Landings, LentBlocks
from dora.worker.copying.layer_rows import LayerRows
from dora.worker.copying.streams import DONE, Mark, Streams, streams_of

STAGE_BYTES: Final = 16 << 20  # cross the bus at once; so much on the device, and twice in pinned host memory
PINNED_BYTES: Final = 8 << 30  # pinned host memory for blocks that are shown, at most
_ALIGNED_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class _Part:
    """Some blocks of one layer and their place in a batch."""

    name: str
    first: int  # counted in the ids of the layer's group
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """The bytes that cross the bus together."""

    parts: tuple[_Part, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Showing:
    """Blocks by layer in pinned memory, complete after ``mark``."""

    blocks: dict[str, list[np.ndarray]]
    mark: Mark


class DeviceStore:
    """``vllm.blocks.BlockStore`` for tensors on a GPU. Thread-safe.

    ``show`` waits for its copies, and its result does not change later. ``write`` returns once the bytes were read:
    they reach the KV-cache later, in the order of the calls. Each step of the engine calls ``join`` first, and again
    once it has scheduled, so its forward pass sees all writes, and no write reaches a block that meanwhile belongs to
    another request.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        groups: Mapping[str, int],
        block_count: int,
        *,
        pinned_bytes: int = PINNED_BYTES,
        stage_bytes: int = STAGE_BYTES,
        landing_bytes: int = 0,
        streams: Streams | None = None,
    ) -> None:
        """``tensors`` and ``groups`` are by layer. ``streams`` are by default the device's. ``landing_bytes`` is the
        device's memory for KV that comes straight from another device, or 0 if none does.

        Raises RuntimeError as ``LayerRows`` and ``CudaStreams`` do.
        """
        self._layers = {name: LayerRows(tensors[name], block_count) for name in sorted(groups)}
        self._groups = groups
        self._block_count = block_count
        largest = max(rows.block_bytes for rows in self._layers.values())
        self._stage_bytes = max(stage_bytes, _aligned(largest))
        device = tensors[next(iter(groups))].device
        self._streams = streams_of(device) if streams is None else streams
        self._pinned = BufferPool(pinned_bytes, self._streams.host_memory)
        self._outlets = [self._streams.host_memory(self._stage_bytes) for _ in range(2)]
        self._leaving: list[Mark] = [DONE, DONE]  # the pending read of each of them
        self._written: Mark = DONE
        self._lock = threading.Lock()
        self._device = device
        self.device_memory = Landings(device.type, landing_bytes, self._landing) if landing_bytes else None
        with self._streams.entered():
            self._stage = torch.empty(self._stage_bytes, dtype=torch.uint8, device=device)

    @property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """(layer name, bytes per block), sorted by name."""
        return tuple((name, rows.block_bytes) for name, rows in self._layers.items())

    @property
    def orders(self) -> tuple[str, ...]:
        """The axis orders inside the layers' blocks. KV of other orders does not fit this engine."""
        return tuple(sorted({f"order-{rows.order}" for rows in self._layers.values()}))

    @property
    def slice_bytes(self) -> int:
        """The stage, which crosses the bus at once."""
        return self._stage_bytes

    def show(self, block_ids: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        """Returns some blocks of every layer in the order of its group's ids: copies in pinned memory.

        Raises TransferFailed if too much pinned memory is in use.
        """
        showing = self.begin_show(block_ids)
        showing.mark.synchronize()
        return showing.blocks

    def begin_show(self, block_ids: Sequence[Sequence[int]]) -> Showing:
        """Begins ``show``. The caller keeps the result until it has waited for its mark."""
        batches = self._batches(block_ids)
        size_bytes = sum(batch.size_bytes for batch in batches)
        host = self._pinned_array(size_bytes)
        shown: dict[str, list[np.ndarray]] = {name: [] for name in self._layers}
        with self._lock, self._streams.entered():
            ids = self._ids(block_ids)
            at = 0
            for batch in batches:
                for part in batch.parts:
                    rows, count = self._layers[part.name], part.end - part.first
                    begin = at + part.at
                    piece = host[begin : begin + count * rows.block_bytes]
                    shown[part.name].append(piece.reshape(count, rows.block_bytes))
                self._streams.run(partial(self._gather, batch, ids, host[at : at + batch.size_bytes]))
                at += batch.size_bytes
            return Showing(shown, self._streams.mark())

    def lend(self, block_ids: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray | OnDevice]]:
        """Returns the same blocks where they are, if they can leave the device so: they must not change. Else a copy.

        Raises TransferFailed as ``show``.
        """
        if self.device_memory is None:
            return dict[str, list[np.ndarray | OnDevice]](self.show(block_ids))  # type: ignore[arg-type]
        with self._lock, self._streams.entered():  # so that later copies wait for the engine's work so far
            self._ids(block_ids)
        found: dict[str, list[np.ndarray | OnDevice]] = {}
        for name, rows in self._layers.items():
            ids = tuple(block_ids[self._groups[name]])
            region = LentBlocks(self, name, ids, self._device)
            found[name] = [OnDevice(region, 0, (len(ids), rows.block_bytes))]
        return found

    def gather(self, name: str, block_ids: Sequence[int], begin: int, end: int, place: torch.Tensor) -> None:
        """Copies bytes of a layer's blocks, counted from the first of ``block_ids``. Returns once they are there."""
        rows = self._layers[name]
        size, most = rows.block_bytes, self._stage_bytes // rows.block_bytes
        mark: Mark = DONE
        for first in range(begin // size, -(-end // size), most):
            last = min(first + most, -(-end // size))
            low, high = max(begin, first * size), min(end, last * size)
            with self._lock, self._streams.entered():
                ids = self._streams.ids(block_ids[first:last])
                target = place[low - begin : high - begin]
                self._streams.run(partial(self._gather_some, rows, ids, low - first * size, target))
                mark = self._streams.mark()
        mark.synchronize()

    def gathered(self, name: str, block_ids: Sequence[int], begin: int, end: int) -> np.ndarray:
        """Returns the same in pinned memory. Raises TransferFailed if too much of it is in use."""
        host = self._pinned_array(end - begin)
        self.gather(name, block_ids, begin, end, torch.from_numpy(host))
        return host

    def _gather_some(self, rows: LayerRows, ids: torch.Tensor, skipped: int, place: torch.Tensor) -> None:
        torch.index_select(rows.cells, 0, ids, out=rows.staged(self._stage, 0, len(ids)))
        place.copy_(self._stage[skipped : skipped + len(place)], non_blocking=True)

    def _landing(self, size_bytes: int) -> torch.Tensor:
        with self._lock, self._streams.entered():
            memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            mark = self._streams.mark()
        mark.synchronize()  # copies that used this memory before are complete
        return memory

    def _pinned_array(self, size_bytes: int) -> np.ndarray:
        host = self._pinned.array(size_bytes)
        if host is None:
            lent = self._pinned.lent_bytes()
            raise TransferFailed(f"pinned memory: {size_bytes:,} bytes do not fit beside {lent:,} that are in use")
        return host

    def _gather(self, batch: _Batch, ids: Mapping[str, torch.Tensor], host: np.ndarray) -> None:
        for part in batch.parts:
            rows = self._layers[part.name]
            place = rows.staged(self._stage, part.at, part.end - part.first)
            torch.index_select(rows.cells, 0, ids[part.name][part.first : part.end], out=place)
        torch.from_numpy(host).copy_(self._stage[: batch.size_bytes], non_blocking=True)

    def write(self, block_ids: Sequence[Sequence[int]], blocks: Mapping[str, Pieces]) -> None:
        """Overwrites some blocks of every layer, by the ids of its group."""
        if is_on_device(piece for pieces in blocks.values() for piece in pieces):
            self._write_landed(block_ids, blocks)
            return
        blocks = {name: [np.asarray(piece) for piece in pieces] for name, pieces in blocks.items()}
        with self._streams.entered():
            ids = self._ids(block_ids)
        for batch in self._batches(block_ids):
            with self._lock, self._streams.entered():
                self._load(batch, ids, blocks)

    def _write_landed(self, block_ids: Sequence[Sequence[int]], blocks: Mapping[str, Any]) -> None:
        """Writes blocks that are on this device. Returns once they were read, so that their memory may go."""
        landed = {name: [piece.tensor() for piece in pieces] for name, pieces in blocks.items()}
        with self._streams.entered():
            ids = self._ids(block_ids)
        for batch in self._batches(block_ids):
            with self._lock, self._streams.entered():
                self._streams.run(partial(self._scatter_landed, batch, ids, landed))
                self._written = self._streams.mark()
        self._written.synchronize()

    def _scatter_landed(
        self, batch: _Batch, ids: Mapping[str, torch.Tensor], landed: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        for part in batch.parts:
            rows, at, begin = self._layers[part.name], part.at, 0
            for piece in landed[part.name]:
                end = begin + len(piece)
                low, high = max(begin, part.first * rows.block_bytes), min(end, part.end * rows.block_bytes)
                if low < high:
                    self._stage[at : at + high - low].copy_(piece[low - begin : high - begin], non_blocking=True)
                    at += high - low
                begin = end
            place = rows.staged(self._stage, part.at, part.end - part.first)
            rows.cells.index_copy_(0, ids[part.name][part.first : part.end], place)

    def queue(self, work: Callable[[], None]) -> None:
        """Queues other work on the copy stream. Later copies wait for it."""
        with self._lock, self._streams.entered():
            self._streams.run(work)

    def join(self) -> None:
        """Makes later work on the caller's stream see all earlier writes."""
        with self._lock:
            self._streams.hold_up(self._written)

    def _load(self, batch: _Batch, ids: Mapping[str, torch.Tensor], blocks: Mapping[str, Pieces]) -> None:
        """Requires the lock. One outlet is filled while the other is copied."""
        self._outlets.reverse()
        self._leaving.reverse()
        outlet = self._outlets[0]
        self._leaving[0].synchronize()
        for part in batch.parts:
            size_bytes = self._layers[part.name].block_bytes
            place = outlet[part.at : part.at + (part.end - part.first) * size_bytes].reshape(-1, size_bytes)
            _fill(place, blocks[part.name], part.first)
        self._streams.run(partial(self._scatter, batch, ids, outlet))
        self._leaving[0] = self._written = self._streams.mark()

    def _scatter(self, batch: _Batch, ids: Mapping[str, torch.Tensor], outlet: np.ndarray) -> None:
        self._stage[: batch.size_bytes].copy_(torch.from_numpy(outlet[: batch.size_bytes]), non_blocking=True)
        for part in batch.parts:
            rows = self._layers[part.name]
            place = rows.staged(self._stage, part.at, part.end - part.first)
            rows.cells.index_copy_(0, ids[part.name][part.first : part.end], place)

    def _ids(self, block_ids: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        for each in block_ids:
            if each and not 0 <= min(each) <= max(each) < self._block_count:
                found = f"block ids {min(each)} to {max(each)}"
                raise RuntimeError(f"{found}: the KV-cache has {self._block_count} blocks")  # the device would end
        there = [self._streams.ids(each) for each in block_ids]
        return {name: there[self._groups[name]] for name in self._layers}

    def _batches(self, block_ids: Sequence[Sequence[int]]) -> list[_Batch]:
        batches: list[_Batch] = []
        parts: list[_Part] = []
        at = 0
        for name, rows in self._layers.items():
            first, count = 0, len(block_ids[self._groups[name]])
            while first < count:
                fitting = (self._stage_bytes - at) // rows.block_bytes
                if not fitting:
                    batches.append(_Batch(tuple(parts), at))
                    parts, at = [], 0
                    continue
                end = min(count, first + fitting)
                parts.append(_Part(name, first, end, at))
                at = min(self._stage_bytes, _aligned(at + (end - first) * rows.block_bytes))
                first = end
        return [*batches, _Batch(tuple(parts), at)] if parts else batches


def _fill(place: np.ndarray, pieces: Pieces, first: int) -> None:
    """Copies the pieces' blocks from the ``first`` on. Large copies release Python's lock."""
    at = begin = 0
    for piece in pieces:
        end = begin + len(piece)
        if first + at < end and at < len(place):
            count = min(end - first - at, len(place) - at)
            np.copyto(place[at : at + count], piece[first + at - begin : first + at - begin + count])
            at += count
        begin = end


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
