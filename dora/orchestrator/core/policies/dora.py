"""The paper's strategy: DP groups proportional to remaining work, locality, moves (paper 004, section 4.3).

Where the paper leaves it open: KV is filled up to the pressure at which a DP group would be relieved; an older version
keeps the DP groups that its KV still fills, and begins nothing more while that is above its share, so that it shrinks;
and it is supplemented with what can end before its deadline only, so that no step waits for what was begun too late.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Final

import numpy as np

from dora.config import BalanceConfig
from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.partition import Seat, assign, keeping_full, proportional, settled
from dora.orchestrator.core.plan import Move, Plan, Trigger
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.levelling import plan_moves
from dora.orchestrator.core.policies.targets import living_targets
from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.table import Column
from dora.orchestrator.core.worker import Worker

REACH: Final = 64  # prompts looked at for one that ends in time
MARGIN: Final = 0.9  # of the tokens that a response could have by its version's deadline


class DoraPolicy(BasePolicy):
    """Partition by predicted tokens, keep KV where it is, move the rest."""

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._shrinking: frozenset[int] = frozenset()  # versions with more DP groups than their share

    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        workers = snapshot.workers
        seats = np.flatnonzero(workers.alive & ~workers.draining)
        if not len(seats):
            return Plan()
        work = remaining_work(snapshot)
        shares = proportional(work, len(seats), snapshot.newest)
        wanted = keeping_full(shares, *self._occupied(snapshot, seats), snapshot.newest)
        self._shrinking = frozenset(version for version in wanted if wanted[version] > shares.get(version, 0))
        present, times = np.unique(workers.target[seats], return_counts=True)
        counts = dict(zip(present.tolist(), times.tolist(), strict=True))
        keep = trigger in (Trigger.TIME, Trigger.PRESSURE) and settled(
            counts, work, wanted, self.config.dora.hysteresis
        )
        if keep:
            targets = dict(zip(seats.tolist(), workers.target[seats].tolist(), strict=True))
        elif len(wanted) == 1:
            targets = dict.fromkeys(seats.tolist(), next(iter(wanted)))
        else:
            columns = (seats, workers.loaded[seats], workers.target[seats], workers.kv_used[seats])
            rows = [Seat(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
            targets = assign(rows, wanted)
        return Plan(targets, plan_moves(snapshot, targets, self.config))

    def relieve(self, snapshot: Snapshot) -> tuple[Move, ...]:
        return plan_moves(snapshot, living_targets(snapshot), self.config)

    def ration(self, floor: Floor, version: int) -> int | None:
        return self.even_share(floor, version)

    def fits(self, floor: Floor, row: int, worker: Worker) -> bool:
        """Whether KV in use stays below the pressure. An empty DP group takes anything."""
        kv_tokens = worker.kv_expected + floor.context_tokens(row)
        return not worker.held or kv_tokens <= self.config.pressure * worker.kv_tokens

    def choose(self, floor: Floor, version: int) -> Entry | None:
        """In order of arrival; for an older version what ends before its deadline, and nothing while it shrinks."""
        if version == floor.newest or not floor.rhythm.step_s:
            return floor.backlog.first()
        if version in self._shrinking:
            return None
        most = MARGIN * tokens_left(floor, version)
        return next((entry for entry in islice(floor.backlog, REACH) if entry.longest_tokens <= most), None)

    def _occupied(self, snapshot: Snapshot, seats: Column) -> tuple[Mapping[int, int], Mapping[int, float]]:
        """By version in memory: how many DP groups hold it, and how many its KV fills."""
        workers = snapshot.workers
        loaded = seats[workers.loaded[seats] >= 0]
        versions, inverse, times = np.unique(workers.loaded[loaded], return_inverse=True, return_counts=True)
        # what an idle engine has reported last says nothing: its KV is free
        kv = np.where(workers.held[loaded] > 0, workers.kv_expected[loaded], 0)
        shares = kv / (self.config.pressure * workers.kv_tokens[loaded])
        full = np.bincount(inverse, weights=shares, minlength=len(versions))
        names = versions.tolist()
        return dict(zip(names, times.tolist(), strict=True)), dict(zip(names, full.tolist(), strict=True))


def tokens_left(floor: Floor, version: int) -> float:
    """Tokens that a response could have until the last step that may take this version is full, as steps go of late."""
    rhythm = floor.rhythm
    steps = floor.window.deadline(version) - floor.newest + 1
    ends_s = rhythm.published_s + steps * rhythm.step_s - rhythm.tail_s
    return (ends_s - floor.now_s) / rhythm.pace_s


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
