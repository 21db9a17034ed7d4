"""What each worker holds, by seat in columns that a snapshot copies: only what has changed since is read anew.

To read it off a thousand workers takes longer than most plans.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dora.orchestrator.core.table import Column

if TYPE_CHECKING:
    from dora.orchestrator.core.state import Worker

HELD = ("held", "kv_claimed", "kv_used", "kv_expected", "waiting")  # columns
NOTHING_HELD = (0, 0, 0, 0, 0)


class Loads:
    """``stirred``: seats whose worker holds something else than when the columns were last asked for."""

    def __init__(self) -> None:
        self.stirred: set[int] = set()
        self._held: Column = np.zeros((0, len(HELD)), dtype=np.int64)  # seat x column

    def columns(self, seats: Sequence["Worker | None"]) -> dict[str, Column]:
        """Copies of the ``HELD`` columns (int64); 0 where nobody sits."""
        lacking = len(seats) - len(self._held)
        if lacking > 0:
            self._held = np.concatenate([self._held, np.zeros((max(lacking, len(seats)), len(HELD)), dtype=np.int64)])
        for seat in self.stirred:
            self._held[seat] = held_row(seats[seat])
        self.stirred.clear()
        return {name: self._held[: len(seats), place].copy() for place, name in enumerate(HELD)}

    def outdated(self, seats: Sequence["Worker | None"]) -> list[int]:
        """Seats whose row is another than their worker's, though nobody said so: there must be none."""
        known = min(len(seats), len(self._held))
        rows = zip(range(known), self._held[:known].tolist(), seats, strict=False)
        return [seat for seat, row, worker in rows if seat not in self.stirred and tuple(row) != held_row(worker)]


def held_row(worker: "Worker | None") -> tuple[int, ...]:
    """Its row of the ``HELD`` columns."""
    if worker is None:
        return NOTHING_HELD
    return worker.held, worker.kv_claimed, worker.kv_used, worker.kv_expected, worker.waiting
