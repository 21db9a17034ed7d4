"""Columns with one entry a seat, kept as workers change: to read them off a thousand takes longer than most plans."""

from collections.abc import Sequence

import numpy as np

from dora.orchestrator.core.table import Column


class SeatColumns:
    """Named int64 columns of as many seats as were asked about; ``empty`` is the row of one that was not set."""

    def __init__(self, names: Sequence[str], empty: Sequence[int]) -> None:
        self._names, self._empty = tuple(names), np.array(empty, dtype=np.int64)
        self._rows: Column = np.zeros((0, len(self._names)), dtype=np.int64)

    def __setitem__(self, seat: int, row: Sequence[int]) -> None:
        self._reach(seat + 1)
        self._rows[seat] = row

    def copies(self, seats: int) -> dict[str, Column]:
        """All columns for the first so many seats."""
        self._reach(seats)
        return {name: self._rows[:seats, place].copy() for place, name in enumerate(self._names)}

    def rows(self, seats: int) -> list[tuple[int, ...]]:
        """The rows of the first so many seats."""
        self._reach(seats)
        return [tuple(row) for row in self._rows[:seats].tolist()]

    def _reach(self, seats: int) -> None:
        lacking = seats - len(self._rows)
        if lacking > 0:
            more = np.tile(self._empty, (max(lacking, len(self._rows)), 1))
            self._rows = np.concatenate([self._rows, more])
