"""Tensors laid out as vLLM lays out KV on GPUs, with what lies in each block known. For CPU and GPU."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dora.worker.copying.cuda_blocks import DeviceStore


@dataclass(frozen=True, slots=True)
class Made:
    """Layers in one backing buffer, as ``allocate_kv_cache`` of vLLM makes them."""

    buffer: torch.Tensor  # all bytes
    tensors: dict[str, torch.Tensor]
    places: dict[str, np.ndarray]  # of each layer: (blocks, bytes of one) -> where in the buffer they lie

    def all_bytes(self) -> np.ndarray:
        return self.buffer.view(torch.uint8).cpu().numpy().copy()

    def bytes_of(self, name: str) -> np.ndarray:
        """(blocks, bytes of one)."""
        return self.all_bytes()[self.places[name]]


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int
    blocks: int
    heads: int
    tokens: int
    content: int  # numbers
    dtype: torch.dtype
    padding: int = 0  # numbers after each page, where a block is one page
    split: int = 1  # kernel blocks of one block


def made(kind: str, sizes: Sizes, device: str, seed: int) -> Made:
    return KINDS[kind](sizes, device, seed)


def check_both_ways(kind: str, sizes: Sizes, device: str, seed: int, stage_bytes: int) -> None:
    """Blocks are shown as they lie; written elsewhere they are the same, and no other byte is touched."""
    source, target = made(kind, sizes, device, seed), made(kind, sizes, device, seed + 1)
    groups = {name: number % 2 for number, name in enumerate(source.tensors)}
    chosen = np.random.default_rng(seed)
    from_ids = [chosen.permutation(sizes.blocks)[: chosen.integers(0, sizes.blocks + 1)].tolist() for _ in range(2)]
    to_ids = [chosen.permutation(sizes.blocks)[: len(ids)].tolist() for ids in from_ids]
    store = DeviceStore(source.tensors, groups, sizes.blocks, stage_bytes=stage_bytes)
    shown = store.show(from_ids)
    expected = target.all_bytes()
    for (name, size_bytes), group in zip(store.layers, groups.values(), strict=True):
        whole = np.concatenate([np.zeros((0, size_bytes), np.uint8), *shown[name]])
        assert np.array_equal(whole, source.bytes_of(name)[from_ids[group]])
        expected[target.places[name][to_ids[group]]] = whole
        cut = int(chosen.integers(0, len(whole) + 1))
        shown[name] = [whole[:cut], whole[cut:]]
    other = DeviceStore(target.tensors, groups, sizes.blocks, stage_bytes=stage_bytes)
    assert other.orders == store.orders
    other.write(to_ids, shown)
    other.join()
    assert np.array_equal(target.all_bytes(), expected)


def _permuted(order: str) -> Callable[[Sizes, str, int], Made]:
    """``order``: the axes L, B, H, N, C from the outermost on; each layer is shown as (B, H, N, C)."""

    def make(sizes: Sizes, device: str, seed: int) -> Made:
        lengths = {"L": sizes.layers, "B": sizes.blocks, "H": sizes.heads, "N": sizes.tokens, "C": sizes.content}
        steps, step = {}, 1
        for axis in reversed(order):
            steps[axis] = step
            step *= lengths[axis]
            if axis == order[2] and set(order[:2]) == {"L", "B"}:
                step += sizes.padding
        buffer = _random(step, sizes.dtype, device, seed)
        inner = [axis for axis in order if axis not in "LB"]
        shape = [sizes.blocks, *(lengths[axis] for axis in "HNC")]
        tensors, places = {}, {}
        for layer in range(sizes.layers):
            at = layer * steps["L"]
            view = buffer.as_strided(shape, [steps[axis] for axis in "BHNC"], at)
            tensors[f"layer.{layer}"] = view
            places[f"layer.{layer}"] = _places(at, sizes, steps["B"], [(lengths[a], steps[a]) for a in inner])
        return Made(buffer, tensors, places)

    return make


def _keys_and_values(sizes: Sizes, device: str, seed: int) -> Made:
    """A tensor a layer, (2, B, N, H, C): two runs a block."""
    shape = (2, sizes.blocks, sizes.tokens, sizes.heads, sizes.content)
    return _own_tensors(sizes, shape, 1, device, seed)


def _blocks_of_both(sizes: Sizes, device: str, seed: int) -> Made:
    """A tensor a layer, (B, 2, N, H, C)."""
    shape = (sizes.blocks, 2, sizes.tokens, sizes.heads, sizes.content)
    return _own_tensors(sizes, shape, 0, device, seed)


def _latent(sizes: Sizes, device: str, seed: int) -> Made:
    """A tensor a layer, (B, N, C), each block with padding after it; kernel blocks where there is none."""
    page, shape = sizes.tokens * sizes.content, (sizes.blocks, sizes.tokens, sizes.content)
    if sizes.split > 1:
        made = _own_tensors(sizes, (sizes.blocks * sizes.split, sizes.tokens, sizes.content), 0, device, seed)
        whole = {name: places.reshape(sizes.blocks, -1) for name, places in made.places.items()}
        return Made(made.buffer, made.tensors, whole)
    buffer = _random(sizes.layers * sizes.blocks * (page + sizes.padding), sizes.dtype, device, seed)
    tensors, places = {}, {}
    for layer in range(sizes.layers):
        at = layer * sizes.blocks * (page + sizes.padding)
        tensors[f"layer.{layer}"] = buffer.as_strided(shape, (page + sizes.padding, sizes.content, 1), at)
        places[f"layer.{layer}"] = _places(at, sizes, page + sizes.padding, [(page, 1)])
    return Made(buffer, tensors, places)


def _own_tensors(sizes: Sizes, shape: Sequence[int], axis: int, device: str, seed: int) -> Made:
    numbers = math.prod(shape)
    buffer = _random(sizes.layers * numbers, sizes.dtype, device, seed)
    tensors, places = {}, {}
    for layer in range(sizes.layers):
        tensors[f"layer.{layer}"] = buffer[layer * numbers : (layer + 1) * numbers].view(*shape)
        cells = np.arange(layer * numbers, (layer + 1) * numbers).reshape(shape)
        by_block = np.moveaxis(cells, axis, 0).reshape(shape[axis], -1)
        places[f"layer.{layer}"] = _in_bytes(by_block, sizes.dtype)
    return Made(buffer, tensors, places)


def _places(at: int, sizes: Sizes, pitch: int, inner: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the place of each block's numbers, in the order of memory."""
    found = at + pitch * np.arange(sizes.blocks)[:, None]
    for length, step in inner:
        found = (found[:, :, None] + step * np.arange(length)).reshape(sizes.blocks, -1)
    return _in_bytes(found, sizes.dtype)


def _in_bytes(numbers: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    width = dtype.itemsize
    return (numbers[:, :, None] * width + np.arange(width)).reshape(len(numbers), -1)


def _random(numbers: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, numbers * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).to(device).view(dtype)


KINDS: dict[str, Callable[[Sizes, str, int], Made]] = {
    **{order: _permuted(order) for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
    "2BNHC": _keys_and_values,
    "B2NHC": _blocks_of_both,
    "BNC": _latent,
}
