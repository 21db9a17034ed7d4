"""Plans moves: off workers that change, then from full workers to emptier ones (DORA, section 4.3).

A request moves if its worker is to change version or leave, or if workers of one version are unevenly loaded. A worker
takes requests while its KV in use stays below the pressure above which it would be relieved again. A request without
room is parked in a pool, which frees its worker for the new version at once. Without a pool it finishes in place, and a
target may be over-subscribed up to twice its slots: the excess queues there with its KV in host memory.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from dora.config import BalanceConfig
from dora.core.fleet.worker import QUEUE_SLOTS
from dora.core.handoff.choice import Choice
from dora.core.plan import Move
from dora.core.policies.board import Board
from dora.core.view import View

MISSES_MAX = 16  # requests of one version without room, after which its other requests stay
LEVEL_SHARE = 0.05  # if the cost is known, workers are level if their step times differ by at most this share
SHORTEST_MOVE_TOKENS = 2  # a request this close to its certain end is not worth a move


def plan_moves(view: View, targets: Mapping[int, int], balance: BalanceConfig) -> tuple[Move, ...]:
    """At most ``moves_at_once`` moves: first off workers that change or leave, then levelling within each version."""
    plan = _Levelling(view, targets, balance.pressure)
    if plan.movable:
        plan.displace(balance.moves_at_once)
        plan.level(balance.dora.level_gap, balance.moves_at_once)
        plan.relieve_engines(view.requests.movable)
    return plan.moves()


class _Levelling(Board):
    def __init__(self, view: View, targets: Mapping[int, int], pressure: float) -> None:
        super().__init__(view, targets)
        requests = self.requests
        movable = np.flatnonzero(requests.movable & (requests.worker >= 0))
        self._remaining = np.zeros(len(requests.tokens))  # by row, of movable requests
        self._remaining[movable] = requests.remaining_tokens(movable)
        self._far_from_end = movable[self._remaining[movable] > SHORTEST_MOVE_TOKENS]
        self._room = pressure * self.workers.kv_tokens
        self._longest: dict[int, list[int]] = {}  # index -> rows that may leave it, the longest last
        self._queue = 1 if self.pools else QUEUE_SLOTS
        self._moved = 0

    @property
    def movable(self) -> int:
        return len(self._far_from_end)

    def displace(self, moves_max: int) -> None:
        """Moves requests off workers that change or leave. The longest go first, as they gain most."""
        rows = self._far_from_end[~self.stays[self.requests.worker[self._far_from_end]]]
        rows = rows[np.argsort(-self._remaining[rows], kind="stable")]
        misses: Counter[int] = Counter()
        for row, version in zip(rows.tolist(), self.requests.version[rows].tolist(), strict=True):
            if self._moved >= moves_max:
                return
            if misses[version] >= MISSES_MAX:
                continue
            index = self._roomiest(row)
            if index is None:
                misses[version] += not self._sets_aside(row)
            else:
                self.move(row, index)

    def level(self, gap: int, moves_max: int) -> None:
        """Moves requests from the most loaded worker to the least loaded, while their counts differ by ``gap``."""
        for version in np.unique(self.workers.loaded[self.stays]).tolist():
            indexes = self.peers(version)
            while len(indexes) > 1 and self._moved < moves_max:
                source = int(indexes[np.argmax(self.assigned[indexes])])
                target = int(indexes[np.argmin(self.assigned[indexes])])
                row = self._longest_on(source) if self.assigned[source] - self.assigned[target] >= max(gap, 2) else None
                if row is None or self.kv[target] + self.context[row] > self._room[target]:
                    break
                if not self._gains(row, source, target) or not self.near(row, np.array([target]))[0]:
                    break
                self.move(row, target)

    def _sets_aside(self, row: int) -> bool:
        held_up_s = float(self._remaining[row]) * self.token_s(self.index_of(row))
        aside = self.set_aside(row, held_up_s) is not Choice.STAY
        self._moved += aside
        return aside

    def move(self, row: int, index: int) -> None:
        super().move(row, index)
        self._moved += 1

    def _roomiest(self, row: int) -> int | None:
        slots = self.workers.slots
        fits = self.with_room(row, self._queue * slots, np.where(self.assigned == 0, np.inf, self._room))
        if (near := fits & self.near(row, np.arange(len(fits)))).any():
            fits = near
        elif not fits.any():
            return None
        return int(np.where(fits, slots - self.assigned, np.iinfo(np.int64).min).argmax())

    def _longest_on(self, index: int) -> int | None:
        """The longest request of a worker that keeps its version, the first of equal rows. Each is returned once."""
        rows = self._longest.get(index)
        if rows is None:
            on_index = self._far_from_end[self.requests.worker[self._far_from_end] == index]
            order = np.argsort(-self._remaining[on_index], kind="stable")
            rows = self._longest[index] = on_index[order[::-1]].tolist()
        return rows.pop() if rows else None

    def _gains(self, row: int, source: int, target: int) -> bool:
        """Returns whether this request decodes markedly faster on the target, or its worker's KV is running out.

        A step that reads the weights for a few requests takes as long as one for many. If the cost of a step is
        unknown, every move counts as a gain.
        """
        if self.cost is None or self.kv[source] > self._room[source]:
            return True
        here_s = self.step_s(source, int(self.assigned[source]), float(self.kv[source]))
        there_s = self.step_s(target, int(self.assigned[target]) + 1, float(self.kv[target] + self.context[row]))
        return there_s < (1.0 - LEVEL_SHARE) * here_s
