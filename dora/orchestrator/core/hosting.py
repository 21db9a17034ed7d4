"""Who hosts which version, kept up to date worker by worker: no event has to look at the whole fleet.

What changes with it is kept by seat in columns too (table.py), which a snapshot copies.
"""

from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from dora.orchestrator.core.table import Column, SeatColumns
from dora.orchestrator.core.worker import Worker

_BY_SEAT = attrgetter("seat")
NOBODY: Set[int] = frozenset()
SEATED = ("alive", "loaded", "target", "draining", "slots", "kv_tokens")  # columns
EMPTY_SEAT = (0, -1, -1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Where a worker stands in the index."""

    hosts: int
    target: int
    loading: int
    leaves: int  # the version in memory where it is not to keep that; -1: none


@dataclass(slots=True)
class Hosting:
    """Workers by the version they host or are to host. ``moved`` says whose reading is out of date."""

    _listed: dict[int, _Listed] = field(default_factory=dict)  # by seat
    _hosts: dict[int, list[Worker]] = field(default_factory=dict)  # version -> workers, by seat
    _vacating: list[Worker] = field(default_factory=list)  # by seat
    _targeting: dict[int, set[int]] = field(default_factory=dict)  # version -> seats
    _loading: dict[int, set[int]] = field(default_factory=dict)  # version -> seats
    _leaving: dict[int, set[int]] = field(default_factory=dict)  # version -> seats
    _seated: SeatColumns = field(default_factory=partial(SeatColumns, SEATED, EMPTY_SEAT))
    _staying: dict[int, int] = field(default_factory=dict)  # seat -> KV in tokens of the worker, where it is to stay
    _staying_kv: int = 0  # sum of these
    _moved: dict[int, Worker | None] = field(default_factory=dict)  # seat -> who sits there now

    def moved(self, seat: int, worker: Worker | None) -> None:
        """What ``worker`` hosts, or is to host, changes in this event; None: the seat is empty now."""
        self._moved[seat] = worker

    def hosts(self, version: int) -> Sequence[Worker]:
        """Workers that take requests of this version, by seat."""
        self._refresh()
        return self._hosts.get(version, ())

    def vacating(self) -> Sequence[Worker]:
        """Workers that have a version in memory and are to leave it, by seat."""
        self._refresh()
        return self._vacating

    def leaving(self) -> Set[int]:
        """Versions that some workers have in memory and are to leave."""
        self._refresh()
        return self._leaving.keys()

    def targeting(self, version: int) -> Set[int]:
        """Seats of the workers that are to host this version."""
        self._refresh()
        return self._targeting.get(version, NOBODY)

    def loading(self, version: int) -> Set[int]:
        """Seats of the workers that are loading this version."""
        self._refresh()
        return self._loading.get(version, NOBODY)

    def seated(self, seats: int) -> dict[str, Column]:
        """Copies of the ``SEATED`` columns (int64) for the first so many seats; ``EMPTY_SEAT`` where nobody sits."""
        self._refresh()
        return self._seated.copies(seats)

    def rows(self, seats: int) -> list[tuple[int, ...]]:
        """The same by seat, one row each."""
        self._refresh()
        return self._seated.rows(seats)

    def staying(self) -> tuple[int, int]:
        """How many workers are to stay, and their KV in tokens."""
        self._refresh()
        return len(self._staying), self._staying_kv

    def _refresh(self) -> None:
        for seat, worker in self._moved.items():
            self._unlist(seat)
            self._seated[seat] = seated_row(worker)
            if worker is not None:
                self._list(seat, worker)
        self._moved.clear()

    def _list(self, seat: int, worker: Worker) -> None:
        if not worker.stopping and not worker.draining:
            self._staying[seat] = worker.kv_tokens
            self._staying_kv += worker.kv_tokens
        entry = self._listed[seat] = _Listed(
            worker.hosts, worker.target, worker.loading, worker.loaded if worker.vacating else -1
        )
        if entry.hosts >= 0:
            _insert(self._hosts.setdefault(entry.hosts, []), worker)
        if entry.leaves >= 0:
            _insert(self._vacating, worker)
            self._leaving.setdefault(entry.leaves, set()).add(seat)
        self._targeting.setdefault(entry.target, set()).add(seat)
        if entry.loading >= 0:
            self._loading.setdefault(entry.loading, set()).add(seat)

    def _unlist(self, seat: int) -> None:
        entry = self._listed.pop(seat, None)
        if entry is None:
            return
        self._staying_kv -= self._staying.pop(seat, 0)
        if entry.hosts >= 0:
            _delete(self._hosts[entry.hosts], seat)
            if not self._hosts[entry.hosts]:
                del self._hosts[entry.hosts]
        if entry.leaves >= 0:
            _delete(self._vacating, seat)
            _discard(self._leaving, entry.leaves, seat)
        _discard(self._targeting, entry.target, seat)
        if entry.loading >= 0:
            _discard(self._loading, entry.loading, seat)


def seated_row(worker: Worker | None) -> tuple[int, ...]:
    """Its row of the ``SEATED`` columns."""
    if worker is None:
        return EMPTY_SEAT
    return (
        int(not worker.stopping), worker.loaded, worker.target, int(worker.draining), worker.slots, worker.kv_tokens
    )  # fmt: skip


def _insert(workers: list[Worker], worker: Worker) -> None:
    workers.insert(bisect_left(workers, worker.seat, key=_BY_SEAT), worker)


def _discard(seats_of: dict[int, set[int]], version: int, seat: int) -> None:
    seats_of[version].discard(seat)
    if not seats_of[version]:
        del seats_of[version]


def _delete(workers: list[Worker], seat: int) -> None:
    del workers[bisect_left(workers, seat, key=_BY_SEAT)]
