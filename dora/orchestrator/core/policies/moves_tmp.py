"""The moves of one plan: off DP groups that change, to lanes, and off those whose KV runs out."""

import numpy as np

from dora.orchestrator.core.policies.lanes import Lanes
from dora.orchestrator.core.policies.outlook import FILL
from dora.orchestrator.core.snapshot import Move, Snapshot
from dora.orchestrator.core.table import Column

PRESSED = 0.90  # share of a DP group's KV above which it is relieved, as far as another one is this much emptier:
LEVEL_GAP = 0.06


class Board:
    """KV and requests of each DP group as they would be once the moves so far are done: now, and some tokens later."""

    def __init__(self, snapshot: Snapshot, stays: Column, lanes: Lanes, shares: Column, evened: int) -> None:
        workers = self._workers = snapshot.workers
        requests = self._requests = snapshot.requests
        self.stays, self.lanes = stays, lanes
        self._shares = shares
        # by seat: the level from which on it is relieved; at once where it hosts ``evened`` or an older version
        self._pressed = np.where(workers.loaded <= evened, 0.0, PRESSED)
        rows = np.flatnonzero(requests.unfinished & (requests.worker >= 0))
        ahead = np.bincount(requests.worker[rows], weights=self._shares[1][rows], minlength=len(workers.held))
        self._kv = np.stack([workers.kv_expected.astype(np.float64), ahead])
        self._held = workers.held.copy()
        self._peers: dict[int, Column] = {}  # version -> seats that stay with it
        # by seat: KV over what it is to hold, kept up to date, as every move asks for the least of many
        self._level = np.full(len(workers.held), np.inf)
        np.divide(FILL * self._kv.max(axis=0), self.lanes.cap, out=self._level, where=self.lanes.cap > 0)
        self.moves: list[Move] = []

    def peers(self, version: int) -> Column:
        """Seats that stay with this version."""
        if version not in self._peers:
            self._peers[version] = np.flatnonzero(self.stays & (self._workers.loaded == version))
        return self._peers[version]

    def move(self, row: int, level: float = FILL) -> bool:
        """To its lane, else the DP group of its version with the most free KV, as far as that fills it to ``level``."""
        source, peers = int(self._requests.worker[row]), self.peers(int(self._requests.version[row]))
        levels = np.where(self._held[peers] < self._workers.slots[peers], self._level[peers], np.inf)
        levels[peers == source] = np.inf
        place = int(levels.argmin()) if len(levels) else 0
        if not len(levels) or levels[place] == np.inf:
            return False
        lane = self.lanes.to_lane.get(row, -1)
        target = lane if lane >= 0 and self._held[lane] < self._workers.slots[lane] else int(peers[place])
        if self._held[target] and self._filled(row, target) * FILL > level * self.lanes.cap[target]:
            return False
        self._do(row, target)
        return True

    def hurry(self, row: int, lane: int) -> None:
        """To its lane, though that may have others to give away first."""
        room = FILL * self._workers.kv_tokens[lane] - self._filled(row, lane)
        if self._held[lane] < self._workers.slots[lane] and room >= 0:
            self._do(row, lane)

    def _filled(self, row: int, seat: int) -> float:
        """KV of a DP group with this request too."""
        return float((self._kv[:, seat] + self._shares[:, row]).max())

    def _do(self, row: int, target: int) -> None:
        source, share = int(self._requests.worker[row]), self._shares[:, row]
        self.moves.append(Move(row, target))
        self._kv[:, target] += share
        self._kv[:, source] -= share
        self._held[target] += 1
        self._held[source] -= 1
        for seat in (target, source):
            if self.lanes.cap[seat]:
                self._level[seat] = FILL * max(self._kv[:, seat].tolist()) / self.lanes.cap[seat]

    def pressed(self) -> list[int]:
        """Seats to be relieved, if others can."""
        stay = np.flatnonzero(self.stays)
        seats: list[int] = stay[self._level[stay] > self._pressed[stay]].tolist()
        return seats

    def relieve(self, seat: int) -> None:
        """Moves the largest requests without hurry off a pressed DP group, while others of its version are emptier.

        Never the last one: alone it would press any other as much, and be moved on for ever without a token.
        """
        peers = self.peers(int(self._workers.loaded[seat]))
        largest: list[int] | None = None
        while len(peers) > 1 and self._held[seat] > 1 and (level := float(self._level[seat])) > self._pressed[seat]:
            if level - float(self._level[peers].min()) < LEVEL_GAP:
                return
            if largest is None:
                movable = self._requests.movable & ~self.lanes.hurried
                rows = np.flatnonzero(movable & (self._requests.worker == seat))
                largest = rows[np.argsort(self._shares[0][rows], kind="stable")].tolist()
            if not largest or not self.move(largest.pop(), level):
                return
