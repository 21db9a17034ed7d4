"""Index of workers by hosted version. It is updated worker by worker, so that no event reads the whole fleet.

It also keeps the changing fields in columns by index (table.py), which a view copies.
"""

from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from dora.core.fleet.worker import Worker
from dora.core.table import Column, IndexedColumns

_BY_INDEX = attrgetter("index")
NOBODY: Set[int] = frozenset()
HOSTING_COLUMNS = ("alive", "loaded", "target", "draining", "slots", "kv_tokens")  # columns
NO_WORKER = (0, -1, -1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A worker's entry in the index."""

    hosts: int
    target: int
    loading: int
    leaves: int  # the version in memory if the worker is to leave it; -1: none


@dataclass(slots=True)
class Hosting:
    """Workers by their present and planned version. ``moved`` marks the workers whose entry is out of date."""

    _listed: dict[int, _Listed] = field(default_factory=dict)  # by index
    _hosts: dict[int, list[Worker]] = field(default_factory=dict)  # version -> workers, by index
    _vacating: list[Worker] = field(default_factory=list)  # by index
    _targeting: dict[int, set[int]] = field(default_factory=dict)  # version -> indexes
    _loading: dict[int, set[int]] = field(default_factory=dict)  # version -> indexes
    _leaving: dict[int, set[int]] = field(default_factory=dict)  # version -> indexes
    _columns: IndexedColumns = field(default_factory=partial(IndexedColumns, HOSTING_COLUMNS, NO_WORKER))
    _staying: dict[int, int] = field(default_factory=dict)  # index -> the worker's KV in tokens, if it is to stay
    _staying_kv: int = 0  # sum of ``_staying``
    _moved: dict[int, Worker | None] = field(default_factory=dict)  # index -> its present worker

    def moved(self, index: int, worker: Worker | None) -> None:
        """Marks a worker whose present or planned version changes now. ``worker`` is None if the index has none."""
        self._moved[index] = worker

    def workers_of(self, version: int) -> Sequence[Worker]:
        self._refresh()
        return self._hosts.get(version, ())

    def vacating(self) -> Sequence[Worker]:
        """Workers that are to leave their loaded version, by index."""
        self._refresh()
        return self._vacating

    def leaving(self) -> Set[int]:
        """Loaded versions that some workers are to leave."""
        self._refresh()
        return self._leaving.keys()

    def targeting(self, version: int) -> Set[int]:
        self._refresh()
        return self._targeting.get(version, NOBODY)

    def loading(self, version: int) -> Set[int]:
        self._refresh()
        return self._loading.get(version, NOBODY)

    def columns(self, indexes: int) -> dict[str, Column]:
        """Int64 copies of ``HOSTING_COLUMNS`` for the first ``indexes`` indexes, ``NO_WORKER`` without a worker."""
        self._refresh()
        return self._columns.copies(indexes)

    def rows(self, indexes: int) -> list[tuple[int, ...]]:
        """The same values as one row for each index."""
        self._refresh()
        return self._columns.rows(indexes)

    def staying(self) -> tuple[int, int]:
        """The number of workers that are to stay, and their KV in tokens."""
        self._refresh()
        return len(self._staying), self._staying_kv

    def _refresh(self) -> None:
        for index, worker in self._moved.items():
            self._unlist(index)
            self._columns[index] = hosting_row(worker)
            if worker is not None:
                self._list(index, worker)
        self._moved.clear()

    def _list(self, index: int, worker: Worker) -> None:
        if not worker.stopping and not worker.draining:
            self._staying[index] = worker.kv_tokens
            self._staying_kv += worker.kv_tokens
        entry = self._listed[index] = _Listed(
            worker.hosts, worker.target, worker.loading, worker.loaded if worker.vacating else -1
        )
        if entry.hosts >= 0:
            _insert(self._hosts.setdefault(entry.hosts, []), worker)
        if entry.leaves >= 0:
            _insert(self._vacating, worker)
            self._leaving.setdefault(entry.leaves, set()).add(index)
        self._targeting.setdefault(entry.target, set()).add(index)
        if entry.loading >= 0:
            self._loading.setdefault(entry.loading, set()).add(index)

    def _unlist(self, index: int) -> None:
        entry = self._listed.pop(index, None)
        if entry is None:
            return
        self._staying_kv -= self._staying.pop(index, 0)
        if entry.hosts >= 0:
            _delete(self._hosts[entry.hosts], index)
            if not self._hosts[entry.hosts]:
                del self._hosts[entry.hosts]
        if entry.leaves >= 0:
            _delete(self._vacating, index)
            _discard(self._leaving, entry.leaves, index)
        _discard(self._targeting, entry.target, index)
        if entry.loading >= 0:
            _discard(self._loading, entry.loading, index)


def hosting_row(worker: Worker | None) -> tuple[int, ...]:
    if worker is None:
        return NO_WORKER
    return (
        int(not worker.stopping), worker.loaded, worker.target, int(worker.draining), worker.slots, worker.kv_tokens
    )  # fmt: skip


def _insert(workers: list[Worker], worker: Worker) -> None:
    workers.insert(bisect_left(workers, worker.index, key=_BY_INDEX), worker)


def _discard(indexes_of: dict[int, set[int]], version: int, index: int) -> None:
    indexes_of[version].discard(index)
    if not indexes_of[version]:
        del indexes_of[version]


def _delete(workers: list[Worker], index: int) -> None:
    del workers[bisect_left(workers, index, key=_BY_INDEX)]
