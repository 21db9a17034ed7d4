"""The engine's KV-cache as raw blocks. The inside of a block is the attention kernel's own: blocks move whole."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


class BlockStore:
    """Views of the KV tensors in host memory: layer name -> uint8 of shape (blocks, bytes per block)."""

    def __init__(self, kv_caches: Mapping[str, Any], block_count: int) -> None:
        self._layers = {name: _raw_blocks(tensor, block_count) for name, tensor in sorted(kv_caches.items())}

    @property
    def layers(self) -> tuple[tuple[str, int], ...]:
        """(layer name, bytes per block), sorted by name."""
        return tuple((name, raw.shape[1]) for name, raw in self._layers.items())

    def read(self, block_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """A copy of some blocks of every layer, in the order of ``block_ids``."""
        chosen = np.asarray(block_ids, np.intp)
        return {name: raw[chosen] for name, raw in self._layers.items()}

    def write(self, block_ids: Sequence[int], blocks: Mapping[str, np.ndarray]) -> None:
        """Overwrites some blocks of every layer."""
        chosen = np.asarray(block_ids, np.intp)
        for name, raw in self._layers.items():
            raw[chosen] = blocks[name]


def _raw_blocks(tensor: torch.Tensor, block_count: int) -> np.ndarray:
    if tensor.shape[0] != block_count or not tensor.is_contiguous():
        raise RuntimeError(
            f"KV tensor of shape {tuple(tensor.shape)}, stride {tensor.stride()}: not {block_count} blocks"
        )
    return tensor.view(block_count, -1).view(torch.uint8).numpy()
