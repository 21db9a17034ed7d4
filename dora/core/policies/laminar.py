"""Laminar's strategy (sections 3 and 5): each worker updates independently, and long tails are packed together.

Set ``balance.period_s`` to 5, the period of the check in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np

from dora.config import BalanceConfig
from dora.core.dispatcher import Dispatcher
from dora.core.fleet.worker import Worker
from dora.core.forecast.cost import CostModel
from dora.core.plan import Move, Plan, Trigger
from dora.core.policies.base import BasePolicy
from dora.core.policies.board import Board, staying
from dora.core.policies.targets import cover, present_targets, waiting_versions
from dora.core.view import View

KV_THRESHOLD = 0.99  # C_max as a share of the KV cache, from the paper's example
# Section 5.1: periodically (more often under pressure), and after each weight update.
LOOKS = (Trigger.TIME, Trigger.PRESSURE, Trigger.UPDATE, Trigger.OPERATOR)


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle worker (the paper's replica in its ramp-down), as input of algorithm 1. KV in tokens."""

    index: int
    kv_used: int  # C_used
    kv_max: float  # C_max
    requests: int  # N_reqs
    requests_max: int  # B


def consolidate(idle: Sequence[Idle]) -> list[tuple[int, int]]:
    """Algorithm 1 from line 4: best-fit packing of one version's idle workers. Returns (source, target) indexes.

    The smallest source goes first, to the target that becomes the fullest. A released worker cannot be a target.
    """
    ordered = sorted(idle, key=lambda worker: (worker.kv_used, worker.index))
    kv = {worker.index: worker.kv_used for worker in ordered}
    requests = {worker.index: worker.requests for worker in ordered}
    released: set[int] = set()
    filled: set[int] = set()  # targets. The printed algorithm may release a worker that was just a target
    plan: list[tuple[int, int]] = []
    for source in ordered:
        if source.index in filled:
            continue
        fits = [
            target
            for target in ordered
            if target is not source
            and target.index not in released
            and kv[target.index] + source.kv_used <= target.kv_max
            and requests[target.index] + source.requests <= target.requests_max
        ]
        if fits:
            best = max(fits, key=lambda target: (kv[target.index], -target.index))
            plan.append((source.index, best.index))
            released.add(source.index)
            filled.add(best.index)
            kv[best.index] += source.kv_used
            requests[best.index] += source.requests
    return plan


def roofline_requests(cost: CostModel | None, slots: int) -> int:
    """B: the batch size above which a decode step is compute-bound, k3 n = k2. All slots if the cost is unknown."""
    if cost is None or cost.request_s * slots <= cost.weights_s:  # no batch of this size is compute-bound
        return slots
    return max(1, min(slots, int(cost.weights_s / cost.request_s)))


class LaminarPolicy(BasePolicy):
    """Each worker generates a batch, then loads the newest version, without global synchronisation.

    A batch has as many responses as the worker has slots, all of the newest version. The engine gets the batch at once
    and queues the requests that its KV cannot hold. A worker takes no further request until all of its batch ended or
    were moved away by the repacking of algorithm 1, which works within one version. The idleness metric compares KV use
    with the previous check, and a batch needs to know whether it is complete, so this object keeps both between calls.
    """

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._kv_before: dict[int, int] = {}  # index -> KV use at the last check
        self._idle: dict[int, int] = {}  # index -> version of the batch whose KV use has begun to fall
        self._taken: dict[int, int] = {}  # index -> version of the batch that it has taken in full

    # ----------------------------------------------------------------------------------------------------- new work

    def dispatch(self, dispatcher: Dispatcher) -> None:
        for version in dispatcher.versions():
            if dispatcher.waiting_requests(version):
                self._deal(dispatcher, version, dispatcher.candidates(version), admits=False)
        if dispatcher.backlog and dispatcher.admissible(dispatcher.newest) > 0:
            begins = [worker for worker in dispatcher.candidates(dispatcher.newest) if self._begins(worker)]
            self._deal(dispatcher, dispatcher.newest, begins, admits=True)

    def _begins(self, worker: Worker) -> bool:
        if not worker.assigned:
            self._taken.pop(worker.index, None)
        return self._taken.get(worker.index) != worker.loaded

    def _deal(self, dispatcher: Dispatcher, version: int, workers: Sequence[Worker], *, admits: bool) -> None:
        """Gives queued requests, then those of new groups, to the worker with the most free slots, up to its batch."""
        heap = [(worker.assigned - worker.slots, worker.index, worker) for worker in workers]
        heapify(heap)
        while heap:
            free, index, worker = heap[0]
            if free >= 0:
                heappop(heap)
                dispatcher.full(worker)
                continue
            if not dispatcher.waiting_requests(version):
                entry = dispatcher.backlog.first() if admits and dispatcher.admissible(version) > 0 else None
                if entry is None:
                    break
                dispatcher.admit(entry, version, self.rank)
                continue  # a session without a prompt does not wait
            dispatcher.place(dispatcher.waiting_requests(version).peek(), worker)
            heapreplace(heap, (free + 1, index, worker))
        if admits:
            self._taken.update((worker.index, version) for worker in workers if worker.assigned >= worker.slots)

    # ---------------------------------------------------------------------------------------------------- repacking

    def plan(self, view: View, trigger: Trigger) -> Plan:
        workers, targets = view.workers, present_targets(view, view.newest)
        waited = waiting_versions(view)
        for index, version in targets.items():
            if not workers.assigned[index] and version not in waited:
                targets[index] = view.newest
        moves: list[Move] = []
        if trigger in LOOKS:
            for source, target in self._repack(view, targets):
                rows = np.flatnonzero(view.requests.movable & (view.requests.worker == source))
                moves += [Move(row, target) for row in rows.tolist()]
                targets[source] = view.newest
                self._taken[source] = int(workers.loaded[source])
        cover(view, targets)
        return Plan(targets, tuple(moves))

    def _repack(self, view: View, targets: dict[int, int]) -> list[tuple[int, int]]:
        """The moves between idle workers of each version (algorithm 1, line 3)."""
        workers, stays = view.workers, staying(view, targets)
        groups: dict[int, list[Idle]] = {}
        idle: dict[int, int] = {}
        for index in targets:
            version, kv_used = int(workers.loaded[index]), int(workers.kv_expected[index])
            assigned, kv_max = int(workers.assigned[index]), KV_THRESHOLD * int(workers.kv_tokens[index])
            falls = kv_used < self._kv_before.get(index, 0) or self._idle.get(index) == version
            if stays[index] and assigned and kv_used < kv_max and falls:
                idle[index] = version  # "from this time on" (section 5.2), even if long responses raise KV use again
                most = roofline_requests(view.cost, int(workers.slots[index]))
                if assigned < most:
                    groups.setdefault(version, []).append(Idle(index, kv_used, kv_max, assigned, most))
            self._kv_before[index] = kv_used
        self._idle = idle
        return [pair for version in sorted(groups) for pair in consolidate(groups[version])]

    def relieve(self, view: View) -> tuple[Move, ...]:
        """Moves requests off workers that change or leave, to the fullest worker with room."""
        board, workers = Board(view, {}), view.workers
        for row in board.displaced().tolist():
            fits = board.with_room(row, workers.slots, KV_THRESHOLD * workers.kv_tokens)
            if fits.any():
                board.move(row, int(np.where(fits, board.kv, -1).argmax()))
        return board.moves()
