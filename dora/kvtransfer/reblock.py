"""Converts KV between the shards and block sizes of two engines. Bytes are moved; none are computed.

Block sizes convert exactly if the token axis of a block is known (``snapshot.Interior``). Blocks of an attention kernel
that packs tokens together, such as AMX, have no known token axis and fit only engines with the same block size.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dora.errors import LayoutMisfit
from dora.kvtransfer.layout import blocks_for, check_layout, first_block
from dora.kvtransfer.reslice import resliced
from dora.kvtransfer.snapshot import STATE, Interior, KvLayout, KvSnapshot, Pieces


def reblocked(snapshot: KvSnapshot, layout: KvLayout) -> KvSnapshot:
    """The same KV in the shards and blocks of ``layout``; the snapshot itself if it has them already.

    Bytes of a block beyond the request's tokens, or before those that a window covers, are zero. Raises LayoutMisfit if
    the conversion is not exact.
    """
    found = snapshot.layout
    check_layout(found, layout)
    if found == layout:
        return snapshot
    if snapshot.ahead:
        raise LayoutMisfit(f"ahead = {snapshot.ahead}: blocks of another layout were written unconverted")
    snapshot = resliced(snapshot, layout.shards)
    if snapshot.layout == layout:
        return snapshot
    windows = layout.windowed
    blocks: Mapping[str, Pieces] = {
        name: snapshot.blocks[name]
        if windows.get(name) == STATE
        else [
            _resized(
                np.concatenate([*snapshot.blocks[name]]),
                interior,
                first_block(snapshot.kv_tokens, found.block_tokens, windows.get(name, 0)) * found.block_tokens,
                first_block(snapshot.kv_tokens, layout.block_tokens, windows.get(name, 0)) * layout.block_tokens,
                snapshot.kv_tokens,
                layout.block_tokens,
            )
        ]
        for (name, _), interior in zip(layout.layers, layout.interiors, strict=True)
    }
    return replace(snapshot, layout=layout, blocks=blocks)


def _resized(
    blocks: np.ndarray, interior: Interior, found_first: int, first: int, end: int, block_tokens: int
) -> np.ndarray:
    """Tokens ``first`` to ``end`` of one layer in blocks of ``block_tokens``; ``blocks`` begins at ``found_first``."""
    times, strips = interior
    found_tokens = blocks.shape[1] // (times * sum(outer * inner for outer, inner in strips))
    count = blocks_for(end, block_tokens) - first // block_tokens
    rows = blocks.reshape(len(blocks), times, -1)
    made, at = [], 0
    for outer, inner in strips:
        strip = rows[:, :, at : at + outer * found_tokens * inner].reshape(-1, times, outer, found_tokens, inner)
        at += outer * found_tokens * inner
        by_token = np.moveaxis(strip, 0, 2).reshape(times, outer, -1, inner)
        resized = np.zeros((times, outer, count * block_tokens, inner), np.uint8)
        kept = max(first, found_first)
        resized[:, :, kept - first : end - first] = by_token[:, :, kept - found_first : end - found_first]
        split = np.moveaxis(resized.reshape(times, outer, count, block_tokens, inner), 2, 0)
        made.append(split.reshape(count, times, -1))
    return np.ascontiguousarray(np.concatenate(made, axis=2).reshape(count, -1))
