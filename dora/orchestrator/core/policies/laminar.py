"""Laminar's strategy (paper 001, sections 3 and 5): workers update on their own; long tails are packed together.

Set ``balance.period_s`` to 5, the paper's period of the check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np

from dora.config import BalanceConfig
from dora.orchestrator.core.cost import CostModel
from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.plan import Move, Plan, Trigger
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.board import Board, staying
from dora.orchestrator.core.policies.targets import cover, present_targets, waiting_versions
from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.worker import Worker

KV_THRESHOLD = 0.99  # C_max, as a share of the KV-cache: the paper's example
# Section 5.1: periodically (under pressure the core looks more often), and after each weight update.
LOOKS = (Trigger.TIME, Trigger.PRESSURE, Trigger.UPDATE, Trigger.OPERATOR)


@dataclass(frozen=True, slots=True)
class Idle:
    """A worker that runs idle (the paper's replica in its ramp-down), as algorithm 1 sees it. KV in tokens."""

    seat: int
    kv_used: int  # C_used
    kv_max: float  # C_max
    requests: int  # N_reqs
    requests_max: int  # B


def consolidate(idle: Sequence[Idle]) -> list[tuple[int, int]]:
    """Algorithm 1 from line 4 on: best-fit packing of one version's idle workers. Returns (source, target) seats.

    The smallest source goes first, to the destination that becomes the fullest; a released one is no destination.
    """
    ordered = sorted(idle, key=lambda worker: (worker.kv_used, worker.seat))
    kv = {worker.seat: worker.kv_used for worker in ordered}
    requests = {worker.seat: worker.requests for worker in ordered}
    released: set[int] = set()
    filled: set[int] = set()  # destinations; the printed algorithm may release one under what it was just given
    plan: list[tuple[int, int]] = []
    for source in ordered:
        if source.seat in filled:
            continue
        fits = [
            target
            for target in ordered
            if target is not source
            and target.seat not in released
            and kv[target.seat] + source.kv_used <= target.kv_max
            and requests[target.seat] + source.requests <= target.requests_max
        ]
        if fits:
            best = max(fits, key=lambda target: (kv[target.seat], -target.seat))
            plan.append((source.seat, best.seat))
            released.add(source.seat)
            filled.add(best.seat)
            kv[best.seat] += source.kv_used
            requests[best.seat] += source.requests
    return plan


def roofline_requests(cost: CostModel | None, slots: int) -> int:
    """B: requests from which on a decode step is bound by computing, k3 n = k2; all slots where the cost is unknown."""
    if cost is None or cost.request_s * slots <= cost.weights_s:  # never, with so many
        return slots
    return max(1, min(slots, int(cost.weights_s / cost.request_s)))


class LaminarPolicy(BasePolicy):
    """Each worker generates a batch, then loads the newest version: no global synchronisation.

    A batch is as many responses as the worker has slots, all of the newest version, given to its engine at once: KV
    limits what runs, the engine queues the rest. A worker takes no more until all of them ended or were moved away by
    the repacking of algorithm 1, which runs among the workers of one version. The idleness metric needs the KV use at
    the last look, and a batch its beginning, so both are kept here between the calls.
    """

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._kv_before: dict[int, int] = {}  # seat -> KV use at the last look
        self._idle: dict[int, int] = {}  # seat -> version in whose batch its KV use has begun to fall
        self._taken: dict[int, int] = {}  # seat -> version of which it has taken its whole batch

    # ----------------------------------------------------------------------------------------------------- new work

    def dispatch(self, floor: Floor) -> None:
        for version in floor.versions():
            if floor.line(version):
                self._deal(floor, version, floor.candidates(version), admits=False)
        if floor.backlog and floor.window.admissible(floor.newest) > 0:
            begins = [worker for worker in floor.candidates(floor.newest) if self._begins(worker)]
            self._deal(floor, floor.newest, begins, admits=True)

    def _begins(self, worker: Worker) -> bool:
        """Whether it still takes requests of its batch."""
        if not worker.held:
            self._taken.pop(worker.seat, None)
        return self._taken.get(worker.seat) != worker.loaded

    def _deal(self, floor: Floor, version: int, workers: Sequence[Worker], *, admits: bool) -> None:
        """Requests in line, then of new groups, to the worker with the most free slots, up to its batch."""
        heap = [(worker.held - worker.slots, worker.seat, worker) for worker in workers]
        heapify(heap)
        while heap:
            free, seat, worker = heap[0]
            if free >= 0:
                heappop(heap)
                floor.full(worker)
                continue
            if not floor.line(version):
                entry = floor.backlog.first() if admits and floor.window.admissible(version) > 0 else None
                if entry is None:
                    break
                floor.admit(entry, version, self.rank)
            floor.place(floor.line(version).peek(), worker)
            heapreplace(heap, (free + 1, seat, worker))
        if admits:
            self._taken.update((worker.seat, version) for worker in workers if worker.held >= worker.slots)

    # ---------------------------------------------------------------------------------------------------- repacking

    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        workers, targets = snapshot.workers, present_targets(snapshot, snapshot.newest)
        waited = waiting_versions(snapshot)
        for seat, version in targets.items():
            if not workers.held[seat] and version not in waited:
                targets[seat] = snapshot.newest
        moves: list[Move] = []
        if trigger in LOOKS:
            for source, target in self._repack(snapshot, targets):
                rows = np.flatnonzero(snapshot.requests.movable & (snapshot.requests.worker == source))
                moves += [Move(row, target) for row in rows.tolist()]
                targets[source] = snapshot.newest
                self._taken[source] = int(workers.loaded[source])
        cover(snapshot, targets)
        return Plan(targets, tuple(moves))

    def _repack(self, snapshot: Snapshot, targets: dict[int, int]) -> list[tuple[int, int]]:
        """The idle workers of each version (algorithm 1, line 3), consolidated."""
        workers, stays = snapshot.workers, staying(snapshot, targets)
        groups: dict[int, list[Idle]] = {}
        idle: dict[int, int] = {}
        for seat in targets:
            version, kv_used = int(workers.loaded[seat]), int(workers.kv_expected[seat])
            held, kv_max = int(workers.held[seat]), KV_THRESHOLD * int(workers.kv_tokens[seat])
            falls = kv_used < self._kv_before.get(seat, 0) or self._idle.get(seat) == version
            if stays[seat] and held and kv_used < kv_max and falls:
                idle[seat] = version  # "from this time on" (section 5.2), though long responses may let it rise again
                most = roofline_requests(snapshot.cost, int(workers.slots[seat]))
                if held < most:
                    groups.setdefault(version, []).append(Idle(seat, kv_used, kv_max, held, most))
            self._kv_before[seat] = kv_used
        self._idle = idle
        return [pair for version in sorted(groups) for pair in consolidate(groups[version])]

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        """What a repacking has left behind, and what stands on leaving workers: to the fullest one that it fits."""
        board, workers = Board(snapshot, {}), snapshot.workers
        for row in board.displaced().tolist():
            fits = board.with_room(row, workers.slots, KV_THRESHOLD * workers.kv_tokens)
            if fits.any():
                board.move(row, int(np.where(fits, board.kv, -1).argmax()))
        return board.moves()
