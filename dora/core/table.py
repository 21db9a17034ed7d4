"""Numpy columns for the many small things: one row a request or a group, reused after it is freed.

At 131,072 requests a plan must not walk Python objects. Single cells are read and written event by event; planners get
whole columns as views (see view.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Column = NDArray[Any]


class Table(dict[str, Column]):
    """Growable named columns with a free list. ``table["tokens"][row]`` reads one cell.

    It is a dictionary of its columns, because a cell is read some ten times an event and no Python method is as fast.
    """

    def __init__(self, columns: Mapping[str, DTypeLike], rows: int = 1024) -> None:
        super().__init__((name, np.zeros(rows, dtype=dtype)) for name, dtype in columns.items())
        self._free = list(range(rows - 1, -1, -1))
        self._rows = rows

    def columns(self, *names: str) -> tuple[Column, ...]:
        """Several columns, for a loop over rows."""
        return tuple([self[name] for name in names])

    @property
    def used(self) -> int:
        return self._rows - len(self._free)

    @property
    def capacity(self) -> int:
        return self._rows

    def allocate(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._grow()
        kept = len(self._free) - count
        rows = self._free[kept:][::-1]
        del self._free[kept:]
        return rows

    def take(self, rows: Column) -> None:
        """Allocates these zeroed rows, all different and unused."""
        while len(rows) and int(rows.max()) >= self._rows:
            self._grow()
        free = np.array(self._free, np.int64)
        self._free = free[~np.isin(free, rows)].tolist()

    def free(self, rows: list[int]) -> None:
        for column in self.values():
            column[rows] = 0
        self._free.extend(reversed(rows))

    def _grow(self) -> None:
        for name, column in self.items():
            self[name] = np.concatenate([column, np.zeros(self._rows, dtype=column.dtype)])
        self._free = [*range(2 * self._rows - 1, self._rows - 1, -1), *self._free]
        self._rows *= 2


class IndexedColumns:
    """Named int64 columns by index; ``empty`` is the row of an index that was not set."""

    def __init__(self, names: Sequence[str], empty: Sequence[int]) -> None:
        self._names, self._empty = tuple(names), np.array(empty, dtype=np.int64)
        self._rows: Column = np.zeros((0, len(self._names)), dtype=np.int64)

    def __setitem__(self, index: int, row: Sequence[int]) -> None:
        self._reach(index + 1)
        self._rows[index] = row

    def copies(self, indexes: int) -> dict[str, Column]:
        self._reach(indexes)
        return {name: self._rows[:indexes, place].copy() for place, name in enumerate(self._names)}

    def rows(self, indexes: int) -> list[tuple[int, ...]]:
        self._reach(indexes)
        return [tuple(row) for row in self._rows[:indexes].tolist()]

    def _reach(self, indexes: int) -> None:
        lacking = indexes - len(self._rows)
        if lacking > 0:
            more = np.tile(self._empty, (max(lacking, len(self._rows)), 1))
            self._rows = np.concatenate([self._rows, more])
