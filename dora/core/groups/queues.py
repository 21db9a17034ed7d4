"""The queues of the core: prompts that are not admitted yet, and admitted requests without a worker."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final

import numpy as np

from dora.core.events import OfferedPrompt
from dora.core.table import Column


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """An offered prompt and the predictions for its group."""

    prompt: OfferedPrompt
    number: int  # in the order of arrival
    longest_tokens: float  # longest response
    lengths: tuple[float, ...]  # of each response


@dataclass(slots=True)
class _Rank:
    """The prompts of one priority."""

    entries: dict[int, QueuedPrompt] = field(default_factory=dict)  # by number, so in order of arrival
    by_length: list[tuple[float, int]] = field(default_factory=list)

    def add(self, entry: QueuedPrompt) -> None:
        self.entries[entry.number] = entry
        insort(self.by_length, (entry.longest_tokens, entry.number))

    def remove(self, entry: QueuedPrompt) -> None:
        del self.entries[entry.number]
        del self.by_length[bisect_left(self.by_length, (entry.longest_tokens, entry.number))]


_NONE: Final = _Rank()


class Backlog:
    """Drawn prompts in order of arrival, with look-up by predicted length. Bounded by the count of DrawPrompts.

    Look-ups return only prompts of the highest priority, until none of them is left: a policy sees a shorter backlog.
    The totals (``len``, ``lengths``) count every prompt.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}  # by priority; none is empty
        self._first = _NONE  # the highest priority
        self._all = _Rank()
        self._arrivals = 0
        self._changes = 0
        self._lengths: Column | None = None  # cached; None: out of date

    def __len__(self) -> int:
        return len(self._all.entries)

    def __iter__(self) -> Iterator[QueuedPrompt]:
        return iter(self._first.entries.values())

    @property
    def arrivals(self) -> int:
        """The number of prompts that have ever arrived."""
        return self._arrivals

    @property
    def changes(self) -> int:
        """Grows when more prompts can be looked up: some arrived, or a lower priority has its turn."""
        return self._changes

    def add(self, prompt: OfferedPrompt, longest_tokens: float, lengths: tuple[float, ...]) -> QueuedPrompt:
        self._arrivals += 1
        self._changes += 1
        entry = QueuedPrompt(prompt, self._arrivals, longest_tokens, lengths)
        self._all.add(entry)
        rank = self._ranks.get(prompt.priority)
        if rank is None:
            rank = self._ranks[prompt.priority] = _Rank()
            self._first = self._ranks[max(self._ranks)]
        rank.add(entry)
        self._lengths = None
        return entry

    def remove(self, entry: QueuedPrompt) -> None:
        self._all.remove(entry)
        rank = self._ranks[entry.prompt.priority]
        rank.remove(entry)
        if not rank.entries:
            del self._ranks[entry.prompt.priority]
            if rank is self._first:
                self._first = self._ranks[max(self._ranks)] if self._ranks else _NONE
                self._changes += bool(self._ranks)
        self._lengths = None

    def clear(self) -> None:
        self._ranks.clear()
        self._first, self._all = _NONE, _Rank()
        self._lengths = None

    def find(self, prompt_id: str) -> QueuedPrompt | None:
        return next((entry for entry in self._all.entries.values() if entry.prompt.prompt_id == prompt_id), None)

    def first(self) -> QueuedPrompt | None:
        return next(iter(self._first.entries.values()), None)

    def lengths(self) -> Column:
        """Predicted longest responses of all prompts, ascending. Read-only."""
        if self._lengths is None:
            self._lengths = np.array([length for length, _ in self._all.by_length])
        return self._lengths

    def longest_of_shortest(self, count: int) -> float:
        """The longest prediction among the ``count`` shortest; infinite if there are no more than these."""
        by_length = self._all.by_length
        return by_length[count - 1][0] if count < len(by_length) else inf

    def longest_beyond(self, limit_tokens: float, arrivals: int) -> QueuedPrompt | None:
        """The longest prediction above the limit among the first ``arrivals`` prompts that ever arrived."""
        for longest_tokens, number in reversed(self._first.by_length):
            if longest_tokens <= limit_tokens:
                return None
            if number <= arrivals:
                return self._first.entries[number]
        return None

    def longest_within(self, limit_tokens: float) -> QueuedPrompt | None:
        """The prompt with the longest predicted response within the limit."""
        by_length = self._first.by_length
        at = bisect_right(by_length, (limit_tokens, self._arrivals))
        return self._first.entries[by_length[at - 1][1]] if at else None


class WaitingRequests:
    """Requests of one version without a worker: the lowest rank starts first, equal ones in order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []  # rank, number, row; stale where ``_number`` says otherwise
        self._number: dict[int, int] = {}  # row -> number
        self._pushes = 0
        self.changes = 0  # grows with each change, for callers that keep an order of their own

    def __len__(self) -> int:
        return len(self._number)

    def __iter__(self) -> Iterator[int]:
        return iter(self._number)

    def __contains__(self, row: int) -> bool:
        return row in self._number

    def push(self, row: int, rank: float) -> None:
        self._pushes += 1
        self.changes += 1
        self._number[row] = self._pushes
        heappush(self._heap, (rank, self._pushes, row))

    def push_first(self, row: int) -> None:
        """Queues a request that has begun before all others."""
        self._pushes += 1
        self.changes += 1
        self._number[row] = -self._pushes
        heappush(self._heap, (-inf, -self._pushes, row))

    def extend(self, first: Sequence[int], others: Sequence[int]) -> None:
        """Fills an empty queue: begun requests first, then the others with rank 0, each in the given order."""
        self._pushes = len(first) + len(others)
        self.changes += self._pushes
        self._number = {row: place - len(first) for place, row in enumerate(first)}
        self._heap = [(-inf, number, row) for row, number in self._number.items()]
        for number, row in enumerate(others, start=len(first) + 1):
            self._number[row] = number
            self._heap.append((0.0, number, row))  # sorted, and so a heap

    def peek(self) -> int:
        """The next row. The queue must not be empty."""
        while self._number.get(self._heap[0][2]) != self._heap[0][1]:
            heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> int:
        row = self.peek()
        heappop(self._heap)
        self.remove(row)
        return row

    def remove(self, row: int) -> None:
        """Raises KeyError if the row is not queued."""
        del self._number[row]
        self.changes += 1
