"""The engine's KV-cache as raw blocks. The inside of a block is the attention kernel's own: blocks move whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dora.kvtransfer.snapshot import Pieces
from dora.worker.vllm_groups import LayerGroup


class BlockStore:
    """Views of the KV tensors in host memory: layer name -> uint8 of shape (blocks, bytes per block).

    Layers of one group have their blocks under the same ids; ids of two groups are never the same block's. That of
    tensors on a GPU is ``cuda_blocks.DeviceStore``.
    """

    orders: tuple[str, ...] = ()  # axes lie inside a block in the tensor's own order

    def __init__(self, kv_caches: Mapping[str, Any], block_count: int, groups: Sequence[LayerGroup]) -> None:
        self._groups = {name: number for number, group in enumerate(groups) for name in group.layers}
        self._layers = {name: _raw_blocks(kv_caches[name], block_count) for name in sorted(self._groups)}

    @property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """(layer name, bytes per block), sorted by name."""
        return tuple((name, raw.shape[1]) for name, raw in self._layers.items())

    def show(self, block_ids: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        """Some blocks of every layer, in the order of its group's ids: views, one for each run of neighbours."""
        runs = [_runs(ids) for ids in block_ids]
        return {name: [raw[first:end] for first, end in runs[self._groups[name]]] for name, raw in self._layers.items()}

    def write(self, block_ids: Sequence[Sequence[int]], blocks: Mapping[str, Pieces]) -> None:
        """Overwrites some blocks of every layer, of each group those of its ids."""
        for name, raw in self._layers.items():
            chosen, at = block_ids[self._groups[name]], 0
            for piece in blocks[name]:
                from_piece = 0
                for first, end in _runs(chosen[at : at + len(piece)]):  # other threads run during large copies
                    np.copyto(raw[first:end], piece[from_piece : from_piece + end - first])
                    from_piece += end - first
                at += len(piece)

    def join(self) -> None:
        """Nothing is left to wait for once ``write`` has returned."""


def _runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive ids as (first, one after the last)."""
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and runs[-1][1] == block_id:
            runs[-1] = (runs[-1][0], block_id + 1)
        else:
            runs.append((block_id, block_id + 1))
    return runs


def _raw_blocks(tensor: torch.Tensor, block_count: int) -> np.ndarray:
    if tensor.shape[0] != block_count or not tensor.is_contiguous():
        raise RuntimeError(
            f"KV tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()}: not {block_count} blocks"
        )
    return tensor.view(block_count, -1).view(torch.uint8).numpy()
