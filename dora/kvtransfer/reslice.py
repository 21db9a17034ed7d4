"""Converts KV between engines whose ranks split each layer into different numbers of shards.

Tensor parallelism gives each rank some of a layer's KV heads (vLLM's ``QKVParallelLinear``), so a layer consists of
*shards*: ``n@0``, ``n@1``, ... of equal size. If the heads of a block are consecutive, other shards are made by cutting
and joining blocks between heads. Bytes are moved, none are computed, and neither the interior of a head nor the block
size matters. A state is cut between its heads likewise, strip by strip. Pipeline stages need no conversion: each layer
is whole in one of them. KV that is the same on all ranks, as with MLA, is one shard regardless of their number.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dora.errors import LayoutMisfit, SnapshotRefused
from dora.kvtransfer.snapshot import STATE, UNKNOWN, Interior, KvLayout, KvSnapshot, Pieces

SHARDS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class _Whole:
    """A layer with all its shards."""

    block_bytes: int
    window: int
    interior: Interior

    @property
    def heads(self) -> int:
        """Consecutive heads of a block, or 0 if unknown."""
        return self.interior[0]

    @property
    def is_state(self) -> bool:
        return self.window == STATE


def shard_name(layer: str, shard: int, shards: int) -> str:
    """The name of a layer's shard: the layer's own name if it has only one."""
    return layer if shards == 1 else f"{layer}@{shard}"


def shard_names(layer: str, shards: int) -> list[str]:
    """All shards of a layer, in the order of a layout, and so of a body."""
    return sorted(shard_name(layer, shard, shards) for shard in range(shards))


def resharded(layout: KvLayout, shards: int) -> KvLayout:
    """The layout of the same KV in this number of shards.

    Raises LayoutMisfit if the conversion is not exact: the heads of a block are not consecutive, or cannot be divided
    by this number. Raises SnapshotRefused if the layout's shards are incomplete.
    """
    if layout.shards == shards:
        return layout
    layers, windows, interiors = [], [], []
    for name, whole in _wholes(layout).items():
        if not whole.heads or whole.heads % shards or whole.block_bytes % whole.heads:
            what = f"{whole.heads} KV heads in a row" if whole.heads else "no KV heads in a row"
            said = f"layout.shards = {layout.shards}, this engine has {shards}: {name} has {what}"
            raise LayoutMisfit(said, "layout.shards", layout.shards)
        for shard in shard_names(name, shards):
            layers.append((shard, whole.block_bytes // shards))
            windows.append(whole.window)
            interiors.append((whole.heads // shards, whole.interior[1]))
    return replace(
        layout,
        layers=tuple(layers),
        shards=shards,
        windows=tuple(windows) if layout.windows else (),
        interiors=tuple(interiors),
    )


def resliced(snapshot: KvSnapshot, shards: int) -> KvSnapshot:
    """The same snapshot with its KV in this number of shards.

    Blocks that are only cut are views of the same memory with gaps; blocks that are joined are copies. Raises
    SnapshotRefused as ``resharded`` does.
    """
    found = snapshot.layout
    layout = resharded(found, shards)
    if layout is found:
        return snapshot
    blocks: dict[str, Pieces] = {}
    for name, whole in _wholes(found).items():
        held = [snapshot.blocks[shard_name(name, shard, found.shards)] for shard in range(found.shards)]
        if whole.is_state:
            for shard, state in enumerate(_states(held, whole.interior, shards)):
                blocks[shard_name(name, shard, shards)] = [state]
            continue
        size = whole.block_bytes // shards
        for shard in range(shards):
            blocks[shard_name(name, shard, shards)] = _cut(held, shard * size, (shard + 1) * size)
    return replace(snapshot, layout=layout, blocks=blocks)


def _cut(held: list[Pieces], begin: int, end: int) -> Pieces:
    """The bytes ``begin`` to ``end`` of each block, out of consecutive shards of equal size."""
    size = held[0][0].shape[1]
    parts = []
    for shard in range(begin // size, -(-end // size)):
        at = shard * size
        parts.append([np.asarray(piece)[:, max(0, begin - at) : min(size, end - at)] for piece in held[shard]])
    if len(parts) == 1:
        return parts[0]
    return [np.concatenate([np.concatenate(part) for part in parts], axis=1)]


def _states(held: list[Pieces], interior: Interior, shards: int) -> list[np.ndarray]:
    """One state in this number of shards. In each shard, a strip has the shard's heads alone."""
    heads, strips = interior
    kept: list[list[np.ndarray]] = [[] for _ in range(shards)]
    rows = [np.concatenate([np.asarray(piece) for piece in pieces]).reshape(-1) for pieces in held]
    at = 0
    for outer, inner in strips:
        size = outer * heads * inner // len(held)
        parts = [row[at : at + size].reshape(outer, -1) for row in rows]
        for own, part in zip(kept, np.split(np.concatenate(parts, axis=1), shards, axis=1), strict=True):
            own.append(part.reshape(-1))
        at += size
    return [np.concatenate(own)[None] for own in kept]


def _wholes(layout: KvLayout) -> dict[str, _Whole]:
    count = len(layout.layers)
    if not 1 <= layout.shards <= SHARDS_MAX or {len(layout.windows), len(layout.interiors)} - {0, count}:
        said = f"layout.shards = {layout.shards}: layout.interiors has {len(layout.interiors)} layers"
        raise SnapshotRefused(said, "layout.shards", layout.shards)
    windows, interiors = layout.windows or (0,) * count, layout.interiors or (UNKNOWN,) * count
    found: dict[str, list[tuple[str, tuple[int, int, Interior]]]] = {}  # by layer: its shards
    for (name, size), window, interior in zip(layout.layers, windows, interiors, strict=True):
        whole = name if layout.shards == 1 else name.rpartition("@")[0]
        found.setdefault(whole, []).append((name, (size, window, interior)))
    wholes: dict[str, _Whole] = {}
    for name, parts in found.items():
        alike = {part for _, part in parts}
        if [shard for shard, _ in parts] != shard_names(name, layout.shards) or len(alike) > 1:
            said = f"layout.shards = {layout.shards}: {name!r} lacks that many equal shards in order"
            raise SnapshotRefused(said, "layout.shards", layout.shards)
        size, window, (heads, strips) = alike.pop()
        wholes[name] = _Whole(size * layout.shards, window, (heads * layout.shards, strips))
    return wholes
