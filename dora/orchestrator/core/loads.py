"""What each worker holds, by seat in columns that a snapshot copies: only what has changed since is read anew."""

from collections.abc import Sequence

from dora.orchestrator.core.table import Column, SeatColumns
from dora.orchestrator.core.worker import Worker

HELD = ("held", "kv_claimed", "kv_used", "kv_expected", "waiting")  # columns
NOTHING_HELD = (0, 0, 0, 0, 0)


class Loads:
    """Columns of what workers hold. Whoever changes what one holds says so with ``changed``."""

    def __init__(self) -> None:
        self._changed: set[int] = set()  # seats whose row is out of date
        self._held = SeatColumns(HELD, NOTHING_HELD)

    def changed(self, seat: int) -> None:
        """The worker on this seat holds something else from now on."""
        self._changed.add(seat)

    def columns(self, seats: Sequence[Worker | None]) -> dict[str, Column]:
        """Copies of the ``HELD`` columns (int64); 0 where nobody sits."""
        for seat in self._changed:
            self._held[seat] = held_row(seats[seat])
        self._changed.clear()
        return self._held.copies(len(seats))

    def outdated(self, seats: Sequence[Worker | None]) -> list[int]:
        """Seats whose row is another than their worker's, though nobody said so: there must be none."""
        rows = zip(self._held.rows(len(seats)), seats, strict=True)
        return [
            seat for seat, (row, worker) in enumerate(rows) if seat not in self._changed and row != held_row(worker)
        ]


def held_row(worker: Worker | None) -> tuple[int, ...]:
    """Its row of the ``HELD`` columns."""
    if worker is None:
        return NOTHING_HELD
    return worker.held, worker.kv_claimed, worker.kv_used, worker.kv_expected, worker.waiting
