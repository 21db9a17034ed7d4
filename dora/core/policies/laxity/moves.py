"""Chooses requests to move: off workers that change, to reserved workers, and off workers whose KV runs out."""

from collections.abc import Mapping

import numpy as np

from dora.core.policies.board import Board
from dora.core.policies.laxity.reserved import ReservedWorkers
from dora.core.policies.laxity.tuning import TUNING
from dora.core.table import Column
from dora.core.view import View


class LevelBoard(Board):
    """KV of each worker after the moves so far, now and ``TUNING.level_tokens`` later.

    ``later`` is the KV of each request at that time, by row.
    """

    def __init__(self, view: View, targets: Mapping[int, int], reserved: ReservedWorkers, later: Column) -> None:
        super().__init__(view, targets)
        self._reserved, self._later = reserved, later
        rows = np.flatnonzero(self.requests.unfinished & (self.requests.worker >= 0))
        self._ahead = np.bincount(self.requests.worker[rows], weights=later[rows], minlength=len(self.assigned))
        # by index: KV as a share of its limit. It is kept up to date, as every move searches for the least
        self._level = np.full(len(self.assigned), np.inf)
        for_all = TUNING.fill * np.maximum(self.kv, self._ahead)
        np.divide(for_all, reserved.cap, out=self._level, where=reserved.cap > 0)

    def plan(self) -> None:
        """Moves requests off workers that change or leave, the longest first, then to reserved ones, then off those
        whose KV runs out.
        """
        rows, requests = self.displaced(), self.requests
        remaining = requests.remaining_tokens(rows)
        order = np.argsort(-remaining, kind="stable")
        for row, left in zip(rows[order].tolist(), remaining[order].tolist(), strict=True):
            if not self._move_on(row) and not (self.has_zones and self._move_on(row, far=True)):
                self.set_aside(row, left * self.token_s(self.index_of(row)))
        assigned, slots, kv_tokens = self.assigned, self.workers.slots, TUNING.fill * self.workers.kv_tokens
        for row, index in self._reserved.to.items():  # even if that worker has other requests to give away first
            fits = assigned[index] < slots[index] and kv_tokens[index] >= self._filled(row, index)
            if fits and requests.movable[row] and self.stays[requests.worker[row]]:
                self.move(row, index)
        stay = np.flatnonzero(self.stays)
        for index in stay[self._level[stay] > TUNING.pressed].tolist():
            self._relieve(index)
        self.relieve_engines(requests.movable & ~self._reserved.hurried)

    def _move_on(self, row: int, level: float = TUNING.fill, *, far: bool = False) -> bool:
        """Moves a request to its reserved worker or its version's emptiest, up to ``level``; to workers that its KV
        does not go to only if ``far``. Returns whether it did.
        """
        source, peers = self.index_of(row), self.peers(int(self.requests.version[row]))
        if self.has_zones and not far:
            peers = peers[self.near(row, peers)]
        slots = self.workers.slots
        levels = np.where(self.assigned[peers] < slots[peers], self._level[peers], np.inf)
        levels[peers == source] = np.inf
        place = int(levels.argmin()) if len(levels) else 0
        if not len(levels) or levels[place] == np.inf:
            return False
        reserved = self._reserved.to.get(row, -1)
        target = reserved if reserved >= 0 and self.assigned[reserved] < slots[reserved] else int(peers[place])
        if self.assigned[target] and self._filled(row, target) * TUNING.fill > level * self._reserved.cap[target]:
            return False
        self.move(row, target)
        return True

    def _relieve(self, index: int) -> None:
        """Moves the largest requests without hurry off a pressed worker, while others of its version are emptier.

        The last request stays. It would press any other worker as much, and would move for ever without a token.
        """
        peers = self.peers(int(self.workers.loaded[index]))
        largest: list[int] | None = None
        while len(peers) > 1 and self.assigned[index] > 1 and (level := float(self._level[index])) > TUNING.pressed:
            if level - float(self._level[peers].min()) < TUNING.level_gap:
                return
            if largest is None:
                movable = self.requests.movable & ~self._reserved.hurried
                rows = np.flatnonzero(movable & (self.requests.worker == index))
                largest = rows[np.argsort(self.context[rows], kind="stable")].tolist()
            if not largest or not self._move_on(largest.pop(), level):
                return

    def _filled(self, row: int, index: int) -> float:
        return float(max(self.kv[index] + self.context[row], self._ahead[index] + self._later[row]))

    def _add(self, row: int, index: int) -> None:
        super()._add(row, index)
        self._ahead[index] += self._later[row]
        self._relevel(index)

    def _remove(self, row: int, index: int) -> None:
        super()._remove(row, index)
        self._ahead[index] -= self._later[row]
        self._relevel(index)

    def _relevel(self, index: int) -> None:
        cap = self._reserved.cap[index]
        if cap:
            self._level[index] = TUNING.fill * max(float(self.kv[index]), float(self._ahead[index])) / cap
