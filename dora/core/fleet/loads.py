"""What each worker holds, by index in columns that a view copies: only what has changed since is read anew."""

from collections.abc import Sequence

from dora.core.fleet.worker import Worker
from dora.core.table import Column, IndexedColumns

HELD = ("held", "kv_claimed", "kv_used", "kv_expected", "waiting")  # columns
NOTHING_HELD = (0, 0, 0, 0, 0)


class Loads:
    """Columns of what workers hold. Whoever changes what one holds says so with ``changed``."""

    def __init__(self) -> None:
        self._changed: set[int] = set()  # indexes whose row is out of date
        self._held = IndexedColumns(HELD, NOTHING_HELD)

    def changed(self, index: int) -> None:
        """The worker with this index holds something else from now on."""
        self._changed.add(index)

    def columns(self, indexes: Sequence[Worker | None]) -> dict[str, Column]:
        """Copies of the ``HELD`` (int64); 0 where no worker has it."""
        for index in self._changed:
            self._held[index] = held_row(indexes[index])
        self._changed.clear()
        return self._held.copies(len(indexes))

    def outdated(self, indexes: Sequence[Worker | None]) -> list[int]:
        """Indexes whose row is another than their worker's, though nobody said so: there must be none."""
        rows = zip(self._held.rows(len(indexes)), indexes, strict=True)
        return [
            index for index, (row, worker) in enumerate(rows) if index not in self._changed and row != held_row(worker)
        ]


def held_row(worker: Worker | None) -> tuple[int, ...]:
    """Its row of the ``HELD``."""
    if worker is None:
        return NOTHING_HELD
    return worker.held, worker.kv_claimed, worker.kv_used, worker.kv_expected, worker.waiting
