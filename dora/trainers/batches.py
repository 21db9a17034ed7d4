"""Which rows go through the model together: micro-batches of about equal size, within a limit.

A step's rows come group by group, and are cut anew whenever the trainer is free: from what is there, one micro-batch is
trained on, and the rest is cut again together with what has come meanwhile.
"""

import heapq
import math
from collections.abc import Sequence

from dora.trainers.objectives.batch import Row
from dora.trainers.router_replay import shared_prompt

_Sets = list[tuple[int, list[int]]]  # sums of costs with the items, largest sum first


def karmarkar_karp(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divides items 0 .. n - 1 into ``parts`` sets with sums of ``costs`` near each other; the largest sum comes first.

    Largest differencing: every item begins as a partition of its own, in which one set holds it and the others are
    empty. The two partitions whose largest and smallest sums differ most are joined, large sets with small ones, until
    one is left. Takes about n log n + n * parts operations. Sets may be empty where there are fewer items than sets.

    Source: Karmarkar and Karp: *The Differencing Method of Set Partitioning* (1982); for more than two sets as in
    Korf: *Multi-Way Number Partitioning* (2009), section 2.
    """
    heap: list[tuple[int, int, _Sets]] = [
        (-cost, index, [(cost, [index]), *((0, []) for _ in range(parts - 1))]) for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    order = len(heap)  # of equal partitions the older one first, so the same costs are divided in the same way
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, items + more) for (a, items), (b, more) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda found: -found[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], order, joined))
        order += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


def fitting(costs: Sequence[int], most: int) -> list[list[int]]:
    """Items in as few balanced sets as hold at most ``most`` each; an item that costs more is alone."""
    parts = max(math.ceil(sum(costs) / most), 1) if most > 0 else len(costs)
    while parts < len(costs):
        found = karmarkar_karp(costs, parts)
        if all(len(items) == 1 or sum(costs[index] for index in items) <= most for items in found):
            return [items for items in found if items]
        parts += 1
    return [[index] for index in range(len(costs))]


def packed_batches(rows: Sequence[Row], tokens_max: int) -> list[list[Row]]:
    """Micro-batches for :mod:`dora.trainers.packing`: tokens within ``tokens_max``, where a prompt counts once.

    Rows of one group stay together, unless they are too many for one micro-batch: then each of theirs reads the prompt.
    A row that is longer than the limit is alone.
    """
    bundles: list[list[Row]] = []
    for members in by_group(rows):
        room = tokens_max - len(members[0].trajectory.prompt_token_ids)
        for items in fitting([row.trajectory.length_tokens for row in members], room):
            bundles.append([members[index] for index in items])
    sizes = [packed_tokens(bundle) for bundle in bundles]
    return [[row for index in items for row in bundles[index]] for items in fitting(sizes, tokens_max)]


def packed_tokens(rows: Sequence[Row]) -> int:
    """What rows of one group take in a pack."""
    return len(rows[0].trajectory.prompt_token_ids) + sum(row.trajectory.length_tokens for row in rows)


def by_group(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows with those of their group that go on from one reading of the prompt; in order of their first ones."""
    groups: dict[tuple[str, bytes], list[Row]] = {}
    for row in rows:
        groups.setdefault(shared_prompt(row.trajectory), []).append(row)
    return list(groups.values())
