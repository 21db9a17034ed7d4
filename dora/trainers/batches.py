"""Balanced micro-batches of rows that pass through the model together, within a token limit.

A step's rows arrive group by group. Whenever the trainer is free, the available rows are cut into micro-batches, one of
which is trained on; the rest is cut again together with the rows that arrived meanwhile.
"""

import heapq
import math
from collections.abc import Sequence

from dora.trainers.objectives.batch import Row
from dora.trainers.router_replay import shared_prompt

_Sets = list[tuple[int, list[int]]]  # (sum of costs, items), largest sum first


def karmarkar_karp(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divides items 0 .. n - 1 into ``parts`` sets with nearly equal sums of ``costs``; the largest sum comes first.

    Largest differencing: every item begins as a partition in which one set holds it and the others are empty. The two
    partitions whose largest and smallest sums differ most are joined, large sets with small ones, until one is left.
    Takes about n log n + n * parts operations. Sets may be empty if there are fewer items than sets.

    Source: Karmarkar and Karp: *The Differencing Method of Set Partitioning* (1982); for more than two sets as in Korf:
    *Multi-Way Number Partitioning* (2009), section 2.
    """
    heap: list[tuple[int, int, _Sets]] = [
        (-cost, index, [(cost, [index]), *((0, []) for _ in range(parts - 1))]) for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    order = len(heap)  # breaks ties by age, so equal costs are always divided in the same way
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, items + more) for (a, items), (b, more) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda found: -found[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
        order += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


def fitting(costs: Sequence[int], most: int) -> list[list[int]]:
    """Divides items into as few balanced sets of at most ``most`` as possible; an item that costs more is alone."""
    parts = max(math.ceil(sum(costs) / most), 1) if most > 0 else len(costs)
    while parts < len(costs):
        found = karmarkar_karp(costs, parts)
        if all(len(items) == 1 or sum(costs[index] for index in items) <= most for items in found):
            return [items for items in found if items]
        parts += 1
    return [[index] for index in range(len(costs))]


def packed_batches(rows: Sequence[Row], tokens_max: int) -> list[list[Row]]:
    """Makes micro-batches for :mod:`dora.trainers.packing` within ``tokens_max``, with each prompt counted once.

    Rows of one group stay together, unless they exceed one micro-batch; the prompt is then read in each of theirs. A
    row longer than the limit is alone.
    """
    bundles: list[list[Row]] = []
    for members in by_group(rows):
        room = tokens_max - len(members[0].trajectory.prompt_token_ids)
        for items in fitting([row.trajectory.length_tokens for row in members], room):
            bundles.append([members[index] for index in items])
    sizes = [packed_tokens(bundle) for bundle in bundles]
    return [[row for index in items for row in bundles[index]] for items in fitting(sizes, tokens_max)]


def packed_tokens(rows: Sequence[Row]) -> int:
    return len(rows[0].trajectory.prompt_token_ids) + sum(row.trajectory.length_tokens for row in rows)


def by_group(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups rows that can share one reading of their prompt, in order of their first rows."""
    groups: dict[tuple[str, bytes], list[Row]] = {}
    for row in rows:
        groups.setdefault(shared_prompt(row.trajectory), []).append(row)
    return list(groups.values())
