"""The moves of one plan, and the workers as they would be once these are done: shared by all strategies."""

from bisect import insort
from collections.abc import Mapping
from math import inf
from typing import Final

import numpy as np

from dora.core.handoff.choice import TYPICAL, Choice, cheapest
from dora.core.plan import LINE, POOL, Move
from dora.core.table import Column
from dora.core.view import RequestColumns, View

PARK_ABOVE: Final = 0.975  # share of a worker's KV: fuller, it would soon preempt,
PARK_DOWN_TO: Final = 0.96  # and so much it may hold


def context_tokens(requests: RequestColumns) -> Column:
    """KV that each request holds, by row: its prompt and what it has generated; int64."""
    context: Column = requests.prompt_tokens + requests.tokens
    return context


def staying(view: View, targets: Mapping[int, int]) -> Column:
    """By index (bool): has its version in memory and is to keep it, so that requests may move to it."""
    workers = view.workers
    target = workers.target.copy()
    indexes = np.fromiter(targets, dtype=np.int64, count=len(targets))
    target[indexes] = np.fromiter(targets.values(), dtype=np.int64, count=len(targets))
    stays: Column = workers.alive & ~workers.draining & (workers.loaded == target) & (workers.loaded >= 0)
    return stays


class Board:
    """What each worker would hold, and where each request would be. ``targets``: as planned; {}: the present ones.

    A strategy that counts what a worker holds in another way overrides ``_add`` and ``_remove``.
    """

    def __init__(self, view: View, targets: Mapping[int, int]) -> None:
        self.workers, self.requests, self.cost = view.workers, view.requests, view.cost
        self.pools = sorted(view.pools)  # KV that each still has room for, the most last
        self.stays = staying(view, targets)
        self.context = context_tokens(self.requests)  # by row
        self.held = self.workers.held.copy()  # by index
        self.kv = self.workers.kv_expected.astype(np.float64)  # by index, tokens
        self._to: dict[int, int] = {}  # row -> where it was moved last; -1: taken off, and on none
        self._peers: dict[int, Column] = {}  # version -> indexes that stay with it

    def moves(self) -> tuple[Move, ...]:
        """What is planned so far: each request moves once, to where it was moved last."""
        moved = ((row, index) for row, index in self._to.items() if index != self.requests.worker[row])
        return tuple(Move(row, index) for row, index in moved)

    def peers(self, version: int) -> Column:
        """Indexes that stay with this version."""
        if version not in self._peers:
            self._peers[version] = np.flatnonzero(self.stays & (self.workers.loaded == version))
        return self._peers[version]

    def release(self, index: int) -> None:
        """This worker is to take up another version after all."""
        self.stays[index] = False
        self._peers.pop(int(self.workers.loaded[index]), None)

    def displaced(self) -> Column:
        """Rows that may move and stand on workers that do not stay with their version."""
        rows = np.flatnonzero(self.requests.movable & (self.requests.worker >= 0))
        return rows[~self.stays[self.requests.worker[rows]]]

    def with_room(self, row: int, most_held: Column, most_kv: Column) -> Column:
        """By index (bool): stays with the version of this request, which would not raise it above these limits."""
        with_room: Column = self.stays & (self.workers.loaded == self.requests.version[row]) & (self.held < most_held)
        return with_room & (self.kv + self.context[row] <= most_kv)

    def index_of(self, row: int) -> int:
        """Where this request is by now; -1: on no worker."""
        return self._to.get(row, int(self.requests.worker[row]))

    def move(self, row: int, index: int) -> None:
        """To this worker, off the one that it is on, if any."""
        self.take_off(row)
        self._to[row] = index
        self._add(row, index)

    def set_aside(self, row: int, held_up_s: float) -> Choice:
        """A request that no worker has room for: parks it, or drops its KV, where that costs less than that it stays.

        ``held_up_s``: what that would cost. Where there is no pool it stays.
        """
        if not self.pools:
            return Choice.STAY
        kv_tokens = float(self.context[row])
        choice = cheapest(self.cost, kv_tokens, held_up_s, slot=False, pool=self.pools[-1] >= kv_tokens)
        if choice is Choice.PARK:
            self._park(row)
        elif choice is Choice.REPREFILL:
            self.take_off(row)
            self._to[row] = LINE
        return choice

    def relieve_engines(self, movable: Column) -> None:
        """Parks requests off workers whose KV is about to run out, as they would preempt them and compute them again.

        ``movable``: by row, who may be parked.
        """
        if self.pools:
            above = PARK_ABOVE * self.workers.kv_tokens
            for index in np.flatnonzero(self.stays & (self.kv > above)).tolist():
                self._park_youngest(index, PARK_DOWN_TO * float(self.workers.kv_tokens[index]), movable)

    def _park_youngest(self, index: int, kv_most: float, movable: Column) -> None:
        """Those with the least context first, until the worker holds no more than ``kv_most``; never the last one."""
        rows = np.flatnonzero(movable & (self.requests.worker == index))
        for row in rows[np.argsort(self.context[rows], kind="stable")].tolist():
            if self.kv[index] <= kv_most or self.held[index] <= 1:
                return
            context = float(self.context[row])
            room = bool(self.pools) and self.pools[-1] >= context
            if cheapest(self.cost, context, inf, slot=False, pool=room) is not Choice.PARK:
                return
            if row not in self._to:
                self._park(row)

    def _park(self, row: int) -> None:
        insort(self.pools, self.pools.pop() - int(self.context[row]))
        self.take_off(row)
        self._to[row] = POOL

    def token_s(self, index: int) -> float:
        """Seconds of one decode step of this worker, as it is now."""
        held, kv_tokens = int(self.workers.held[index]), float(self.workers.kv_expected[index])
        return (self.cost or TYPICAL).decode_step_s(held, kv_tokens)

    def take_off(self, row: int) -> None:
        """Off its worker, if it is on one."""
        index = self.index_of(row)
        self._to[row] = -1
        if index >= 0:
            self._remove(row, index)

    def _add(self, row: int, index: int) -> None:
        self.held[index] += 1
        self.kv[index] += self.context[row]

    def _remove(self, row: int, index: int) -> None:
        self.held[index] -= 1
        self.kv[index] -= self.context[row]
