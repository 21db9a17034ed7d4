"""Which requests move where (design: re-balancing, step 3; paper 004, section 4.3).

A request moves when its DP group is to change version or leave, or when groups of one version are unevenly loaded.
A DP group takes requests as far as its KV in use stays below the pressure at which it would be relieved again.
What finds no room finishes in place. A target may be over-subscribed once over: what exceeds its slots queues there
with its KV in host memory, which frees the source for its new version at once.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from dora.config import BalanceConfig
from dora.orchestrator.core.plan import Move
from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.table import Column

QUEUE_SLOTS = 2  # a target holds at most this many times its slots
MISSES_MAX = 16  # requests of one version that find no room before the rest is left where it is
LEVEL_SHARE = 0.05  # DP groups whose steps take the same time, but for this share, are level where the cost is known
SHORTEST_MOVE_TOKENS = 2  # a request this near its certain end is not worth a move


def plan_moves(snapshot: Snapshot, targets: Mapping[int, int], balance: BalanceConfig) -> tuple[Move, ...]:
    """At most ``moves_at_once`` moves: first off groups that change or leave, then levelling within each version."""
    board = _Board(snapshot, targets, balance.pressure)
    if not board.movable:
        return ()
    moves = board.displaced(balance.moves_at_once)
    return (*moves, *board.level(balance.level_gap, balance.moves_at_once - len(moves)))


def staying(snapshot: Snapshot, targets: Mapping[int, int]) -> Column:
    """By seat (bool): has its version in memory and is to keep it, so that requests may move to it."""
    workers = snapshot.workers
    target = workers.target.copy()
    seats = np.fromiter(targets, dtype=np.int64, count=len(targets))
    target[seats] = np.fromiter(targets.values(), dtype=np.int64, count=len(targets))
    stays: Column = workers.alive & ~workers.draining & (workers.loaded == target) & (workers.loaded >= 0)
    return stays


class _Board:
    """Loads as they would be once the moves planned so far are done."""

    def __init__(self, snapshot: Snapshot, targets: Mapping[int, int], pressure: float) -> None:
        workers = snapshot.workers
        requests = self.requests = snapshot.requests
        movable = np.flatnonzero(requests.movable & (requests.worker >= 0))
        self._remaining = np.zeros(len(requests.tokens))  # by row, of those that may move
        self._remaining[movable] = requests.remaining_tokens(movable)
        self._far_from_end = movable[self._remaining[movable] > SHORTEST_MOVE_TOKENS]
        self._seat_of = requests.worker[self._far_from_end]
        self.held = workers.held.copy()
        self.kv = workers.kv_expected.copy()
        self.cost = snapshot.cost
        self.slots = workers.slots
        self.room = pressure * workers.kv_tokens
        self.stays = staying(snapshot, targets)
        self.version = workers.loaded
        self._longest: dict[int, list[int]] = {}  # seat -> rows that may move off it, the longest last

    @property
    def movable(self) -> int:
        """How many requests may move."""
        return len(self._far_from_end)

    def displaced(self, moves_max: int) -> list[Move]:
        requests = self.requests
        rows = self._far_from_end[~self.stays[self._seat_of]]
        rows = rows[np.argsort(-self._remaining[rows], kind="stable")]  # the longest gain most
        moves: list[Move] = []
        misses: Counter[int] = Counter()
        for row, version in zip(rows.tolist(), requests.version[rows].tolist(), strict=True):
            if len(moves) >= moves_max:
                break
            if misses[version] >= MISSES_MAX:
                continue
            seat = self._roomiest(version, self._context(row))
            if seat is None:
                misses[version] += 1
            else:
                moves.append(self._move(row, seat))
        return moves

    def level(self, gap: int, moves_max: int) -> list[Move]:
        moves: list[Move] = []
        for version in np.unique(self.version[self.stays]).tolist():
            seats = np.flatnonzero(self.stays & (self.version == version))
            while len(seats) > 1 and len(moves) < moves_max:
                source = int(seats[np.argmax(self.held[seats])])
                target = int(seats[np.argmin(self.held[seats])])
                row = self._longest_on(source) if self.held[source] - self.held[target] >= max(gap, 2) else None
                if row is None or self.kv[target] + self._context(row) > self.room[target]:
                    break
                if not self._gains(row, source, target):
                    break
                moves.append(self._move(row, target))
        return moves

    def _roomiest(self, version: int, context: int) -> int | None:
        fits = self.stays & (self.version == version) & (self.held < QUEUE_SLOTS * self.slots)
        fits &= (self.kv + context <= self.room) | (self.held == 0)
        if not fits.any():
            return None
        return int(np.where(fits, self.slots - self.held, np.iinfo(np.int64).min).argmax())

    def _longest_on(self, seat: int) -> int | None:
        """The longest request of a DP group that stays, each asked for once; ties: the first row."""
        rows = self._longest.get(seat)
        if rows is None:
            on_seat = self._far_from_end[self._seat_of == seat]
            order = np.argsort(-self._remaining[on_seat], kind="stable")
            rows = self._longest[seat] = on_seat[order[::-1]].tolist()
        return rows.pop() if rows else None

    def _gains(self, row: int, source: int, target: int) -> bool:
        """Whether this request decodes markedly faster on the target, or KV is running out where it is.

        A step that reads the weights for a few requests takes as long as one that reads them for many. Where the cost
        of a step is not known, every move gains.
        """
        if self.cost is None or self.kv[source] > self.room[source]:
            return True
        here_s = self.cost.decode_step_s(int(self.held[source]), float(self.kv[source]))
        there_s = self.cost.decode_step_s(int(self.held[target]) + 1, float(self.kv[target] + self._context(row)))
        return there_s < (1.0 - LEVEL_SHARE) * here_s

    def _context(self, row: int) -> int:
        return int(self.requests.prompt_tokens[row] + self.requests.tokens[row])

    def _move(self, row: int, seat: int) -> Move:
        source = int(self.requests.worker[row])
        context = self._context(row)
        self.kv[source] -= context
        self.kv[seat] += context
        self.held[source] -= 1
        self.held[seat] += 1
        return Move(row, seat)
