"""The paper's strategy: DP groups proportional to remaining work, locality, moves (paper 004, section 4.3)."""

from math import ceil

import numpy as np

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.migration import plan_moves
from dora.orchestrator.core.partition import Seat, assign, proportional, settled
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.hosts import living_targets
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
            targets = dict(zip(seats.tolist(), workers.target[seats].tolist(), strict=True))
        elif len(wanted) == 1:
            targets = dict.fromkeys(seats.tolist(), next(iter(wanted)))
        else:
            columns = (seats, workers.loaded[seats], workers.target[seats], workers.kv_used[seats])
            rows = [Seat(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
            targets = assign(rows, wanted)
        moves = plan_moves(snapshot, targets, self.config.level_gap, self.config.moves_at_once)
        return Plan(targets, moves)

    def ration(self, floor: Floor, version: int) -> int | None:
        """An even share, while more DP groups load the version: else the first would be filled, and levelled again."""
        loading = floor.loading(version)
        if not loading:
            return None
        hosts, first = floor.hosts(version), floor.backlog.first()
        groups = max(0, min(len(floor.backlog), floor.window.admissible(version)))
        supply = len(floor.line(version)) + groups * (first.prompt.group_size if first is not None else 0)
        held = sum([len(worker.rows) + worker.inbound for worker in hosts])
        return ceil((supply + held) / (len(hosts) + loading))

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        return plan_moves(snapshot, living_targets(snapshot), self.config.level_gap, self.config.moves_at_once)


def remaining_work(snapshot: Snapshot) -> dict[int, float]:
    """Predicted tokens still to generate, by version; the newest counts what it may still admit."""
    requests = snapshot.requests
    rows = np.flatnonzero(requests.unfinished)
    versions, inverse = np.unique(requests.version[rows], return_inverse=True)
    sums = np.bincount(inverse, weights=requests.remaining_tokens(rows) + 1, minlength=len(versions))
    work = {int(version): float(total) for version, total in zip(versions, sums, strict=True)}
    supply = max(0, snapshot.admissible.get(snapshot.newest, 0)) * snapshot.group_tokens
    work[snapshot.newest] = work.get(snapshot.newest, 0.0) + supply
    return work
