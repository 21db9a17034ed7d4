"""What each worker holds, by seat in columns that a snapshot copies: only what has changed since is read anew."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dora.orchestrator.core.seats import SeatColumns
from dora.orchestrator.core.table import Column

if TYPE_CHECKING:
    from dora.orchestrator.core.state import Worker

HELD = ("held", "kv_claimed", "kv_used", "kv_expected", "waiting")  # columns
NOTHING_HELD = (0, 0, 0, 0, 0)


class Loads:
    """``stirred``: seats whose worker holds something else than when the columns were last asked for."""

    def __init__(self) -> None:
        self.stirred: set[int] = set()
        self._held = SeatColumns(HELD, NOTHING_HELD)

    def columns(self, seats: Sequence["Worker | None"]) -> dict[str, Column]:
        """Copies of the ``HELD`` columns (int64); 0 where nobody sits."""
        for seat in self.stirred:
            self._held[seat] = held_row(seats[seat])
        self.stirred.clear()
        return self._held.copies(len(seats))

    def outdated(self, seats: Sequence["Worker | None"]) -> list[int]:
        """Seats whose row is another than their worker's, though nobody said so: there must be none."""
        rows = zip(self._held.rows(len(seats)), seats, strict=True)
        return [seat for seat, (row, worker) in enumerate(rows) if seat not in self.stirred and row != held_row(worker)]


def held_row(worker: "Worker | None") -> tuple[int, ...]:
    """Its row of the ``HELD`` columns."""
    if worker is None:
        return NOTHING_HELD
    return worker.held, worker.kv_claimed, worker.kv_used, worker.kv_expected, worker.waiting
