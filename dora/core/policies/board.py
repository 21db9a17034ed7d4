"""The moves of one plan and the predicted state of workers after them. All strategies share it."""

from bisect import insort
from collections.abc import Mapping
from math import inf
from typing import Final

import numpy as np

from dora.core.handoff.choice import TYPICAL, Choice, cheapest
from dora.core.plan import POOL, QUEUE, Move
from dora.core.table import Column
from dora.core.view import RequestColumns, View

PARK_ABOVE: Final = 0.975  # share of a worker's KV above which it would soon preempt
PARK_DOWN_TO: Final = 0.96  # parking reduces its KV to this share


def context_tokens(requests: RequestColumns) -> Column:
    """KV tokens of each request, by row (int64): its prompt and its generated tokens."""
    context: Column = requests.prompt_tokens + requests.tokens
    return context


def staying(view: View, targets: Mapping[int, int]) -> Column:
    """Returns whether each worker has its version in memory and keeps it (bool by index). Requests may move there."""
    workers = view.workers
    target = workers.target.copy()
    indexes = np.fromiter(targets, dtype=np.int64, count=len(targets))
    target[indexes] = np.fromiter(targets.values(), dtype=np.int64, count=len(targets))
    stays: Column = workers.alive & ~workers.draining & (workers.loaded == target) & (workers.loaded >= 0)
    return stays


class Board:
    """The predicted load of each worker and place of each request. ``targets`` are the plan's, {} the present ones.

    A strategy that counts a worker's load in another way overrides ``_add`` and ``_remove``.
    """

    def __init__(self, view: View, targets: Mapping[int, int]) -> None:
        self.workers, self.requests, self.cost = view.workers, view.requests, view.cost
        self._state_tokens = view.state_tokens
        self._zones, self._crosses = view.zones, view.crosses
        self.has_zones = len(view.zones) > 1
        self.pools = sorted(view.pools)  # free KV of each pool, the largest last
        self.stays = staying(view, targets)
        self.context = context_tokens(self.requests)  # by row
        self.assigned = self.workers.assigned.copy()  # by index
        self.kv = self.workers.kv_expected.astype(np.float64)  # by index, tokens
        self._to: dict[int, int] = {}  # row -> index of the last move; -1: taken off and on no worker
        self._peers: dict[int, Column] = {}  # version -> indexes that keep it

    def moves(self) -> tuple[Move, ...]:
        """The planned moves. Each request moves once, to the place of its last move."""
        moved = ((row, index) for row, index in self._to.items() if index != self.requests.worker[row])
        return tuple(Move(row, index) for row, index in moved)

    def peers(self, version: int) -> Column:
        """The indexes that keep this version."""
        if version not in self._peers:
            self._peers[version] = np.flatnonzero(self.stays & (self.workers.loaded == version))
        return self._peers[version]

    def release(self, index: int) -> None:
        self.stays[index] = False
        self._peers.pop(int(self.workers.loaded[index]), None)

    def displaced(self) -> Column:
        """The rows of movable requests on workers that do not keep their version."""
        rows = np.flatnonzero(self.requests.movable & (self.requests.worker >= 0))
        return rows[~self.stays[self.requests.worker[rows]]]

    def with_room(self, row: int, most_assigned: Column, most_kv: Column) -> Column:
        """Returns whether each worker keeps this row's version and has room within these limits (bool, by index)."""
        with_room: Column = (
            self.stays & (self.workers.loaded == self.requests.version[row]) & (self.assigned < most_assigned)
        )
        return with_room & (self.kv + self.context[row] <= most_kv)

    def near(self, row: int, indexes: Column) -> Column:
        """Returns whether the request's KV would go to each of these workers (bool): to those of its zone, and to those
        that it reaches faster than its prefill there takes. A move to another one is a prefill.
        """
        source = int(self.requests.worker[row])
        if not self.has_zones or source < 0:
            return np.ones(len(indexes), bool)
        here, at = self._zones[self.workers.zone[source]], self.workers.zone[indexes]
        goes = [self._crosses(here, there, float(self.context[row])) for there in self._zones]
        found: Column = np.array(goes)[at]
        return found

    def index_of(self, row: int) -> int:
        """The request's worker after the moves so far, or -1."""
        return self._to.get(row, int(self.requests.worker[row]))

    def move(self, row: int, index: int) -> None:
        """Moves the request to this worker and takes it off its present one."""
        self.take_off(row)
        self._to[row] = index
        self._add(row, index)

    def set_aside(self, row: int, held_up_s: float) -> Choice:
        """Parks a request that no worker has room for, or drops its KV, if that costs less than keeping it.

        ``held_up_s`` is the cost of keeping it. Without a pool the request stays.
        """
        if not self.pools:
            return Choice.STAY
        kv_tokens = float(self.context[row])
        choice = cheapest(self.cost, kv_tokens, held_up_s, slot=False, pool=self._fits_pool(row))
        if choice is Choice.PARK:
            self._park(row)
        elif choice is Choice.REPREFILL:
            self.take_off(row)
            self._to[row] = QUEUE
        return choice

    def relieve_engines(self, movable: Column) -> None:
        """Parks requests of workers whose KV is about to run out, as engines would preempt and recompute them.

        ``movable`` says by row whether the request may be parked.
        """
        if self.pools:
            above = PARK_ABOVE * self.workers.kv_tokens
            for index in np.flatnonzero(self.stays & (self.kv > above)).tolist():
                self._park_youngest(index, PARK_DOWN_TO * float(self.workers.kv_tokens[index]), movable)

    def _park_youngest(self, index: int, kv_most: float, movable: Column) -> None:
        """Parks requests with the least context until the worker holds at most ``kv_most``. The last request stays."""
        rows = np.flatnonzero(movable & (self.requests.worker == index))
        for row in rows[np.argsort(self.context[rows], kind="stable")].tolist():
            if self.kv[index] <= kv_most or self.assigned[index] <= 1:
                return
            room = bool(self.pools) and self._fits_pool(row)
            if cheapest(self.cost, float(self.context[row]), inf, slot=False, pool=room) is not Choice.PARK:
                return
            if row not in self._to:
                self._park(row)

    def _fits_pool(self, row: int) -> bool:
        return bool(self.pools[-1] >= self.context[row] + self._state_tokens)

    def _park(self, row: int) -> None:
        insort(self.pools, self.pools.pop() - int(self.context[row]) - self._state_tokens)
        self.take_off(row)
        self._to[row] = POOL

    def token_s(self, index: int) -> float:
        """Seconds of one decode step of this worker at its present load."""
        return self.step_s(index, int(self.workers.assigned[index]), float(self.workers.kv_expected[index]))

    def step_s(self, index: int, running: int, kv_tokens: float) -> float:
        """Seconds of one decode step of this worker with such a load."""
        return (self.cost or TYPICAL).decode_step_s(running, kv_tokens) * float(self.workers.step_scale[index])

    def take_off(self, row: int) -> None:
        """Takes the request off its worker, if it has one."""
        index = self.index_of(row)
        self._to[row] = -1
        if index >= 0:
            self._remove(row, index)

    def _add(self, row: int, index: int) -> None:
        self.assigned[index] += 1
        self.kv[index] += self.context[row]

    def _remove(self, row: int, index: int) -> None:
        self.assigned[index] -= 1
        self.kv[index] -= self.context[row]
