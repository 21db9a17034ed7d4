"""The paper's strategy: DP groups proportional to remaining work, locality, moves (paper 004, section 4.3)."""

import numpy as np

from dora.orchestrator.core.migration import plan_moves
from dora.orchestrator.core.partition import Seat, assign, proportional, settled
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.snapshot import Move, Plan, Snapshot, Trigger


class DoraPolicy(BasePolicy):
    """Partition by predicted tokens, keep KV where it is, move the rest."""

    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        workers = snapshot.workers
        seats = np.flatnonzero(workers.alive & ~workers.draining)
        if not len(seats):
            return Plan()
        work = remaining_work(snapshot)
        wanted = proportional(work, len(seats), snapshot.newest)
        present, times = np.unique(workers.target[seats], return_counts=True)
        counts = dict(zip(present.tolist(), times.tolist(), strict=True))
        keep = trigger in (Trigger.TIME, Trigger.PRESSURE) and settled(counts, work, wanted, self.config.hysteresis)
        if keep:
            targets = {int(seat): int(workers.target[seat]) for seat in seats}
        else:
            rows = [
                Seat(int(seat), int(workers.loaded[seat]), int(workers.target[seat]), int(workers.kv_used[seat]))
                for seat in seats
            ]
            targets = assign(rows, wanted)
        moves = plan_moves(snapshot, targets, self.config.level_gap, self.config.moves_at_once)
        return Plan(targets, moves)

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        targets = {int(seat): int(snapshot.workers.target[seat]) for seat in np.flatnonzero(snapshot.workers.alive)}
        return plan_moves(snapshot, targets, self.config.level_gap, self.config.moves_at_once)


def remaining_work(snapshot: Snapshot) -> dict[int, float]:
    """Predicted tokens still to generate, by version; the newest counts what it may still admit."""
    requests = snapshot.requests
    rows = np.flatnonzero(requests.unfinished)
    versions, inverse = np.unique(requests.version[rows], return_inverse=True)
    sums = np.bincount(inverse, weights=requests.remaining_tokens[rows] + 1, minlength=len(versions))
    work = {int(version): float(total) for version, total in zip(versions, sums, strict=True)}
    supply = max(0, snapshot.admissible.get(snapshot.newest, 0)) * snapshot.group_tokens
    work[snapshot.newest] = work.get(snapshot.newest, 0.0) + supply
    return work
