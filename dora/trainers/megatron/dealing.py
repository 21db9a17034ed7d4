"""Deals rows to the data-parallel shards: micro-batches, equally many for each."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgpack
import numpy as np

from dora.trainers.batches import by_group, packed_batches, packed_tokens
from dora.trainers.dealing import rows_from_bytes, rows_to_bytes
from dora.trainers.objectives.batch import Row


def deal(rows: Sequence[Row], shards: int, tokens_max: int) -> list[list[list[Row]]]:
    """Returns the micro-batches of each of ``shards``, within ``tokens_max`` each, of nearly equal total size.

    Pipelines and experts of all shards work in step, so all shards get equally many. A shard with one fewer trains on a
    copy of a row with weight zero.
    """
    each = math.ceil(_tokens(rows) / shards)
    batches = sorted(packed_batches(rows, max(min(tokens_max, each), 1)), key=_tokens, reverse=True)
    least = min(rows, key=lambda row: row.length_tokens)
    batches += [[_silent(least)] for _ in range(-len(batches) % shards)]
    dealt: list[list[list[Row]]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for turn in range(0, len(batches), shards):
        order = sorted(range(shards), key=loads.__getitem__)  # the shard with the least load gets the largest
        for shard, batch in zip(order, batches[turn : turn + shards], strict=True):
            dealt[shard].append(batch)
            loads[shard] += _tokens(batch)
    return dealt


def batches_to_bytes(batches: Sequence[Sequence[Row]]) -> bytes:
    return bytes(msgpack.packb([rows_to_bytes(rows) for rows in batches]))


def batches_from_bytes(content: bytes) -> list[list[Row]]:
    return [rows_from_bytes(each) for each in msgpack.unpackb(content)]


def _tokens(rows: Sequence[Row]) -> int:
    return sum(packed_tokens(members) for members in by_group(rows))


def _silent(row: Row) -> Row:
    return Row(replace(row.trajectory, loss_mask=np.zeros(row.trajectory.length_tokens, np.uint8)), 0.0)
