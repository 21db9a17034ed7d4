"""Requests and KV of each worker, in columns by index that a view copies. Only changed rows are read again."""

from collections.abc import Sequence

from dora.core.fleet.worker import Worker
from dora.core.table import Column, IndexedColumns

COLUMNS = ("assigned", "kv_claimed", "kv_used", "kv_expected", "waiting")  # columns
NO_LOAD = (0, 0, 0, 0, 0)


class Loads:
    """Columns of workers' loads. Code that changes a worker's load must call ``changed``."""

    def __init__(self) -> None:
        self._changed: set[int] = set()  # indexes with outdated rows
        self._loads = IndexedColumns(COLUMNS, NO_LOAD)

    def changed(self, index: int) -> None:
        self._changed.add(index)

    def columns(self, indexes: Sequence[Worker | None]) -> dict[str, Column]:
        """Copies of the ``COLUMNS`` columns (int64), with 0 for an index without a worker."""
        for index in self._changed:
            self._loads[index] = load_row(indexes[index])
        self._changed.clear()
        return self._loads.copies(len(indexes))

    def outdated(self, indexes: Sequence[Worker | None]) -> list[int]:
        """Indexes whose row differs from their worker without a mark. Must be empty."""
        rows = zip(self._loads.rows(len(indexes)), indexes, strict=True)
        return [
            index for index, (row, worker) in enumerate(rows) if index not in self._changed and row != load_row(worker)
        ]


def load_row(worker: Worker | None) -> tuple[int, ...]:
    if worker is None:
        return NO_LOAD
    return worker.assigned, worker.kv_claimed, worker.kv_used, worker.kv_expected, worker.waiting
