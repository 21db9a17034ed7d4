"""Marginal throughput of workers (StaleFlow, section 5.3, appendix B): the gain of one more trajectory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dora.core.fleet.worker import Worker
from dora.core.forecast.cost import CostModel
from dora.core.policies.board import Board
from dora.core.view import View

MU = 0.3  # a worker gets no trajectory whose gain is below this share of the ideal one


@dataclass(frozen=True, slots=True)
class Load:
    """A worker as input of the cost model, including requests in transit: the speculative state (section 5.2).

    The paper discards a view until every command has taken effect. Here the core owns each request from the moment that
    it is sent, and a worker hosts a version only after it acknowledged the load. Only engine reports lag. So
    ``running`` counts owned requests, and ``kv_tokens`` includes requests given or sent since the last report.
    """

    running: int
    waiting: int  # queued inside the engine
    kv_tokens: float
    slots: int
    kv_capacity: int  # M

    def takes(self, tokens: int) -> bool:
        """y_i: whether a trajectory with this context would run at once. An empty worker takes any."""
        fits = not self.waiting and self.running < self.slots and self.kv_tokens + tokens <= self.kv_capacity
        return fits or not (self.running or self.waiting)

    def with_request(self, tokens: int) -> "Load":
        """The load after one more trajectory (eq. 3)."""
        if self.takes(tokens):
            return replace(self, running=self.running + 1, kv_tokens=self.kv_tokens + tokens)
        return replace(self, waiting=self.waiting + 1)


def load_of(worker: Worker) -> Load:
    """The worker's load. ``waiting`` and most of the KV come from its last report, ignored if it holds nothing."""
    waiting = min(worker.assigned, worker.waiting)
    kv_tokens = worker.kv_expected if worker.assigned else 0
    return Load(worker.assigned - waiting, waiting, kv_tokens, worker.slots, worker.kv_tokens)


def throughput(load: Load, cost: CostModel | None) -> float:
    """T_i (eq. 2): tokens per second. If the cost is unknown, it is the running requests, assuming equal step times."""
    return float(load.running) if cost is None else cost.tokens_per_s(load.running, load.kv_tokens)


def relative_gain(load: Load, tokens: int, cost: CostModel | None) -> float:
    """The marginal gain (eq. 3) of routing a trajectory with this context here, as a share of the ideal one (eq. 4).

    Algorithm 3 prints k1 k2 l in eq. 4. It is read as k1 l, since KV is counted in tokens and k1 is the time of one. If
    the cost is unknown, the gain falls from 1 to ``MU`` with the slots and KV in use: any request that fits is taken.
    """
    if not load.takes(tokens):
        return 0.0
    if cost is None:
        used = max(load.running / load.slots, load.kv_tokens / load.kv_capacity)
        return 1.0 - (1.0 - MU) * min(1.0, used)
    ideal = 1.0 / cost.decode_step_s(1, tokens)
    return (throughput(load.with_request(tokens), cost) - throughput(load, cost)) / ideal


class RoutingBoard(Board):
    """A board that counts as the cost model does: a request that does not run at once is queued and holds no KV."""

    def __init__(self, view: View, targets: dict[int, int]) -> None:
        super().__init__(view, targets)
        self.waiting = np.minimum(self.assigned, self.workers.waiting)
        self.kv[self.assigned == 0] = 0.0
        self._on: list[list[int]] = [[] for _ in self.assigned]  # by index: movable rows
        rows = np.flatnonzero(self.requests.movable & (self.requests.worker >= 0))
        for row in rows[np.argsort(self.requests.tokens[rows], kind="stable")].tolist():
            self._on[self.requests.worker[row]].append(row)
        self._fixed = [assigned - len(rows) for assigned, rows in zip(self.assigned.tolist(), self._on, strict=True)]

    def load(self, index: int) -> Load:
        assigned, waiting, workers = int(self.assigned[index]), int(self.waiting[index]), self.workers
        return Load(
            assigned - waiting, waiting, float(self.kv[index]), int(workers.slots[index]), int(workers.kv_tokens[index])
        )

    def on(self, index: int) -> list[int]:
        """Movable requests of a worker, those with the fewest tokens first: an engine queues those that did the least.

        Requests that were routed here since the view come last.
        """
        return list(self._on[index])

    def route(self, row: int, indexes: Iterable[int]) -> bool:
        """Routes the request to the one of ``indexes`` with the largest gain. Returns False if none reaches ``MU``."""
        tokens = int(self.context[row])
        at = np.fromiter(indexes, np.int64)
        near = self.near(row, at).tolist()
        gains = [(relative_gain(self.load(index), tokens, self.cost), index) for index in at.tolist()]
        scales = self.workers.step_scale
        fit = [
            (is_near, gain / scales[index], -index)
            for is_near, (gain, index) in zip(near, gains, strict=True)
            if gain >= MU
        ]
        if not fit:
            return False
        self.move(row, -max(fit)[2])
        return True

    def clear(self, index: int) -> bool:
        """Routes a worker's requests to its version's other hosts. Returns False, without a change, if one stays."""
        if self._fixed[index]:
            return False
        counts = self.assigned.copy(), self.waiting.copy(), self.kv.copy()
        where = [list(rows) for rows in self._on], dict(self._to)
        others = [peer for peer in self.peers(int(self.workers.loaded[index])).tolist() if peer != index]
        if all(self.route(row, others) for row in self.on(index)):
            return True
        (self.assigned, self.waiting, self.kv), (self._on, self._to) = counts, where
        return False

    def _add(self, row: int, index: int) -> None:
        """Adds a trajectory (eq. 3)."""
        runs = self.load(index).takes(int(self.context[row]))
        self._on[index].append(row)
        self.assigned[index] += 1
        if runs:
            self.kv[index] += self.context[row]
        else:
            self.waiting[index] += 1

    def _remove(self, row: int, index: int) -> None:
        """Removes a trajectory: a queued one, which holds no KV, if there is any."""
        self._on[index].remove(row)
        self.assigned[index] -= 1
        if self.waiting[index]:
            self.waiting[index] -= 1
        else:
            self.kv[index] = max(0.0, self.kv[index] - self.context[row])
