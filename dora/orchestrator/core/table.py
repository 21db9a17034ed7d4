"""Columns in numpy for the many small things: one row a request or a group, re-used when freed.

At 131,072 requests a plan must not walk Python objects. Single cells are read and written event by event; planners
get whole columns as views (see snapshot.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Column = NDArray[Any]


class Table:
    """Growable named columns with a free list. ``table["tokens"][row]`` reads one cell."""

    def __init__(self, columns: Mapping[str, DTypeLike], rows: int = 1024) -> None:
        self._columns: dict[str, Column] = {name: np.zeros(rows, dtype=dtype) for name, dtype in columns.items()}
        self._free = list(range(rows - 1, -1, -1))
        self._rows = rows

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __len__(self) -> int:
        """Rows in use."""
        return self._rows - len(self._free)

    @property
    def capacity(self) -> int:
        return self._rows

    def allocate(self) -> int:
        """A zeroed row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        for column in self._columns.values():
            column[row] = 0
        return row

    def free(self, row: int) -> None:
        """Gives the row back. The caller forgets it."""
        for column in self._columns.values():
            column[row] = 0
        self._free.append(row)

    def _grow(self) -> None:
        self._columns = {
            name: np.concatenate([column, np.zeros(self._rows, dtype=column.dtype)])
            for name, column in self._columns.items()
        }
        self._free = list(range(2 * self._rows - 1, self._rows - 1, -1))
        self._rows *= 2
