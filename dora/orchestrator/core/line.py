"""Where work waits: prompts that are not admitted yet, and admitted requests that no worker holds."""

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from dora.orchestrator.core.events import OfferedPrompt
from dora.orchestrator.core.table import Column


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt on offer, and what is predicted of its group."""

    prompt: OfferedPrompt
    number: int  # of arrival
    longest_tokens: float  # longest response
    lengths: tuple[float, ...]  # of each response


class Backlog:
    """Drawn prompts in order of arrival, to be looked up by predicted length. Bounded by what DrawPrompts asks for."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # by number, so in order of arrival
        self._by_length: list[tuple[float, int]] = []
        self._arrivals = 0
        self._lengths: Column | None = None  # as last asked for; None: something has changed since

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def arrivals(self) -> int:
        """Prompts that have ever come."""
        return self._arrivals

    def add(self, prompt: OfferedPrompt, longest_tokens: float, lengths: tuple[float, ...]) -> Entry:
        self._arrivals += 1
        entry = self._entries[self._arrivals] = Entry(prompt, self._arrivals, longest_tokens, lengths)
        self._lengths = None
        insort(self._by_length, (longest_tokens, self._arrivals))
        return entry

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.number]
        self._lengths = None
        at = bisect_right(self._by_length, (entry.longest_tokens, entry.number)) - 1
        del self._by_length[at]

    def clear(self) -> None:
        self._entries.clear()
        self._by_length.clear()
        self._lengths = None

    def first(self) -> Entry | None:
        """The one that waits longest."""
        return next(iter(self._entries.values()), None)

    def lengths(self) -> Column:
        """Predicted longest responses, ascending. To be read only."""
        if self._lengths is None:
            self._lengths = np.array([length for length, _ in self._by_length])
        return self._lengths

    def longest_of_shortest(self, count: int) -> float:
        """The longest prediction among so many of the shortest; infinite where there are no more than these."""
        return self._by_length[count - 1][0] if count < len(self._by_length) else inf

    def longest_beyond(self, limit_tokens: float, arrivals: int) -> Entry | None:
        """The longest prediction above the limit, of the first so many prompts that have ever come."""
        for longest_tokens, number in reversed(self._by_length):
            if longest_tokens <= limit_tokens:
                return None
            if number <= arrivals:
                return self._entries[number]
        return None

    def count_within(self, limit_tokens: float) -> int:
        """How many are predicted to have no response beyond the limit."""
        return bisect_right(self._by_length, (limit_tokens, self._arrivals))

    def longest_within(self, limit_tokens: float) -> Entry | None:
        """The one with the longest predicted response of those within the limit."""
        at = self.count_within(limit_tokens)
        return self._entries[self._by_length[at - 1][1]] if at else None


class Line:
    """Requests of one version on no worker: the lowest rank starts first, then who came first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []  # rank, number, row; stale where ``_number`` says otherwise
        self._number: dict[int, int] = {}  # row -> number
        self._pushes = 0
        self.changes = 0  # so far: who keeps an order of its own sees by it that the line is another

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
        """Before all others: it has begun already."""
        self._pushes += 1
        self.changes += 1
        self._number[row] = -self._pushes
        heappush(self._heap, (-inf, -self._pushes, row))

    def peek(self) -> int:
        """The row that is next. The line must not be empty."""
        while self._number.get(self._heap[0][2]) != self._heap[0][1]:
            heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> int:
        row = self.peek()
        heappop(self._heap)
        self.remove(row)
        return row

    def remove(self, row: int) -> None:
        """Raises KeyError where the row is not in line."""
        del self._number[row]
        self.changes += 1
