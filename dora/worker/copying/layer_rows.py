"""One layer's tensor of a KV-cache on a device as rows of blocks.

Layouts of vLLM (``vllm/v1/kv_cache_layout.py``, L layers, B blocks, H heads, N tokens, C content of a token and head):

    LBNHC, LBHNC (NHD, HND)    a layer's block is one run of bytes
    BLNHC, BLHNC               likewise, with other layers' between it and the next block
    LHBNC, BHLNC               one run a head
    (2, B, ...)                two runs, keys and values (older releases)
    (B, N, C)                  MLA: one run, which may be padded
"""

import math
from collections.abc import Sequence
from typing import Final

import torch

# number types in which bytes are moved
_NUMBERS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TensorMisfit(RuntimeError):
    """A KV tensor does not consist of separate blocks. ``field`` is its shape or its stride, which shows that."""

    def __init__(self, tensor: torch.Tensor, field: str, finding: str) -> None:
        self.field = field
        super().__init__(f"KV tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()}: {finding}")


class LayerRows:
    """One layer's tensor: ``cells`` is a view of shape (blocks, ...), whose rows are blocks in memory order.

    ``order`` has the tensor's axes in their order inside a block. Two layers with different orders have different bytes
    for the same KV. It names an axis of length 1 too: a rank with one KV head has the order of one with several.
    """

    def __init__(self, tensor: torch.Tensor, block_count: int) -> None:
        """Raises RuntimeError if the tensor has not ``block_count`` blocks, or has overlapping bytes."""
        found = _blocks_first(tensor, block_count)
        number_bytes = tensor.element_size()
        every = [(size, step * number_bytes, axis) for axis, (size, step) in enumerate(_axes(found))]
        axes = [each for each in every if each[0] > 1]
        inner = sorted((each for each in axes if each[2] > 0), key=lambda each: -each[1])
        _check_apart(tensor, sorted((step, size) for size, step, _ in axes), number_bytes)
        named = sorted((-step, axis) for size, step, axis in every if axis > 1 or (axis == 1 and size > 1))
        self.order = "".join(str(axis) for _, axis in named)
        runs = _joined([(size, step) for size, step, _ in inner] + [(number_bytes, 1)])
        begin, pitch = found.storage_offset() * number_bytes, found.stride(0) * number_bytes
        unit = math.gcd(8, tensor.data_ptr(), begin, pitch, runs[-1][0], *(step for _, step in runs[:-1]))
        shape = [block_count, *(size for size, _ in runs[:-1]), runs[-1][0] // unit]
        steps = [pitch // unit, *(step // unit for _, step in runs[:-1]), 1]
        self.cells = torch.empty(0, dtype=_NUMBERS[unit], device=tensor.device)
        self.cells.set_(tensor.untyped_storage(), begin // unit, shape, steps)
        self.block_bytes = math.prod(shape[1:]) * unit

    def staged(self, stage: torch.Tensor, at: int, count: int) -> torch.Tensor:
        """Returns a place in a staging buffer, shaped as ``count`` rows of ``cells``."""
        place = stage[at : at + count * self.block_bytes].view(self.cells.dtype)
        return place.view(count, *self.cells.shape[1:])


def _blocks_first(tensor: torch.Tensor, block_count: int) -> torch.Tensor:
    """Returns the tensor with its blocks as first axis; kernel blocks within a block are the second.

    A tensor with five axes has one of length 2, for keys and values, before or after the blocks.
    """
    axes = [axis for axis in (0, 1) if block_count and tensor.dim() > axis and tensor.shape[axis] % block_count == 0]
    if tensor.dim() == 5:
        axes = [axis for axis in axes if tensor.shape[1 - axis] == 2]
    else:
        axes = [axis for axis in axes if axis == 0]
    if len(axes) != 1:
        raise TensorMisfit(tensor, "shape", f"not {block_count} blocks at one axis")
    return tensor.movedim(axes[0], 0).unflatten(0, (block_count, -1))


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.shape, tensor.stride(), strict=True))


def _check_apart(tensor: torch.Tensor, steps: Sequence[tuple[int, int]], number_bytes: int) -> None:
    """``steps`` has (bytes, count) of each axis, the smallest first."""
    extent = number_bytes
    for step, size in steps:
        if step < extent:
            raise TensorMisfit(tensor, "stride", "its blocks overlap")
        extent += (size - 1) * step


def _joined(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns (length, step in bytes) from the outermost axis; contiguous axes are merged."""
    found: list[tuple[int, int]] = []
    for size, step in axes:
        if found and found[-1][1] == size * step:
            found[-1] = (found[-1][0] * size, step)
        else:
            found.append((size, step))
    if found[-1][1] != 1:
        found.append((1, 1))
    return found
