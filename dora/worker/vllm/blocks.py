"""An engine's KV-cache as raw blocks. Their interior is private to the attention kernel, so they move whole.

An engine of several ranks has its KV in several processes, in memory that all of them can map, so the engine's process
reads and writes all of it. Tensor parallelism splits a layer's KV heads into *shards*: a layer ``n`` of two shards
appears as ``n@0`` and ``n@1``. If ranks hold the same heads, one is read and all are written. Pipeline parallelism
splits the layers themselves; each rank has its own.
"""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dora.kvtransfer.snapshot import Interior, Pieces
from dora.worker.reservation import SLICE_BYTES


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The kind of one layer's blocks and their place in a rank's KV memory."""

    name: str
    group: int  # its number
    window_tokens: int  # how many last tokens it reads, 0: all, ``STATE``: none, it keeps a state
    interior: Interior
    span: (
        tuple[int, int, int] | None
    )  # offset and size of the first block, offset of the next, in bytes; None: on a device


class BlockStore:
    """Views of KV tensors in host memory: layer name -> uint8 of shape (blocks, bytes per block).

    Layers of one group use the same block ids; groups share no ids. ``cuda_blocks.DeviceStore`` is for tensors on a
    GPU.
    """

    orders: tuple[str, ...] = ()  # axes lie inside a block in the tensor's own order
    slice_bytes = SLICE_BYTES
    device_memory = None

    def __init__(self, layers: Mapping[str, Sequence[np.ndarray]], groups: Mapping[str, int]) -> None:
        """``layers`` has each layer's blocks, once for each rank that holds them, and ``groups`` its group."""
        self._layers = dict(sorted(layers.items()))
        self._groups = groups

    @property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """(layer name, bytes per block), sorted by name."""
        return tuple((name, held[0].shape[1]) for name, held in self._layers.items())

    def show(self, block_ids: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        """Returns some blocks of every layer in the order of its group's ids: views, one for each run of neighbours."""
        runs = [_runs(ids) for ids in block_ids]
        return {
            name: [held[0][first:end] for first, end in runs[self._groups[name]]] for name, held in self._layers.items()
        }

    lend = show

    def write(self, block_ids: Sequence[Sequence[int]], blocks: Mapping[str, Pieces]) -> None:
        """Overwrites some blocks of every layer, by the ids of its group."""
        for name, held in self._layers.items():
            chosen, at = block_ids[self._groups[name]], 0
            for piece in blocks[name]:
                from_piece = 0
                for first, end in _runs(chosen[at : at + len(piece)]):  # other threads run during large copies
                    for raw in held:
                        np.copyto(raw[first:end], piece[from_piece : from_piece + end - first])
                    from_piece += end - first
                at += len(piece)

    def join(self) -> None:
        """Does nothing: ``write`` is synchronous."""


class KvMemory(TorchFunctionMode):
    """While entered, makes vLLM allocate a KV-cache in host memory where another process can map it.

    The memory is an unnamed file, which ends with the last process that has it. A KV-cache on a device stays there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.descriptor = -1  # none: the KV lies in this process's own memory
        self.size_bytes = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_device = torch.device((kwargs or {}).get("device") or "cpu").type != "cpu"
        if function is not torch.zeros or on_device or self.descriptor >= 0:
            return function(*args, **(kwargs or {}))
        (self.size_bytes,) = args
        self.descriptor, memory = shareable(self.size_bytes)
        return torch.frombuffer(memory, dtype=kwargs["dtype"])


def shareable(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Returns zeroed memory in an unnamed file, which another process maps with ``mapped``, and its descriptor."""
    descriptor = os.memfd_create("dora-kv", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    return descriptor, mmap.mmap(descriptor, size_bytes)


def mapped(pid: int, descriptor: int, size_bytes: int) -> np.ndarray:
    own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(own, size_bytes), np.uint8)
    finally:
        os.close(own)


def rows_of(memory: np.ndarray, layer: LayerBlocks, block_count: int) -> np.ndarray:
    assert layer.span is not None
    begin, block_bytes, step = layer.span
    return np.lib.stride_tricks.as_strided(memory[begin:], (block_count, block_bytes), (step, 1))


def shard_of(rank: int, tensor_parallel: int, shards: int) -> int:
    """Returns the shard that a rank holds; neighbours may hold the same (vLLM's ``QKVParallelLinear``)."""
    return rank % tensor_parallel * shards // tensor_parallel


def span_of(tensor: torch.Tensor, block_count: int) -> tuple[int, int, int] | None:
    """Returns offset, size and distance of a layer's blocks in its memory, in bytes, or None if it is on a device."""
    if not tensor.is_cpu:
        return None
    if tensor.shape[0] != block_count or not tensor[0].is_contiguous() or tensor.stride(0) < tensor[0].numel():
        raise RuntimeError(
            f"KV tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()}: not {block_count} blocks"
        )
    begin, size, step = tensor.storage_offset(), tensor[0].numel(), tensor.stride(0)
    return begin * tensor.element_size(), size * tensor.element_size(), step * tensor.element_size()


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Returns the whole memory of a KV tensor of this process."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def _runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Returns runs of consecutive ids as (first, one after the last)."""
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and runs[-1][1] == block_id:
            runs[-1] = (runs[-1][0], block_id + 1)
        else:
            runs.append((block_id, block_id + 1))
    return runs
