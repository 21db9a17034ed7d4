"""Marginal throughput of DP groups (paper 000, section 5.3, appendix B): where one more trajectory gains the most."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dora.orchestrator.core.cost import CostModel
from dora.orchestrator.core.plan import Move
from dora.orchestrator.core.policies.hosts import staying
from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.worker import Worker

MU = 0.3  # a DP group gets no trajectory whose gain is below this share of the ideal one


@dataclass(frozen=True, slots=True)
class Load:
    """A DP group as the cost model sees it, with all that was sent counted in: the speculative state (section 5.2).

    The paper discards a snapshot until every command it sent has taken effect. The core owns each request from the
    moment it is sent, and a version is hosted only once its load is acknowledged; what lags is what engines report. So
    ``running`` counts what is owned, and ``kv_tokens`` has what was given or is on its way since the last report.
    """

    running: int
    waiting: int  # queued inside the engine
    kv_tokens: int
    slots: int
    kv_capacity: int  # M

    def takes(self, tokens: int) -> bool:
        """y_i: a trajectory with this context would run at once. An empty group takes any."""
        fits = not self.waiting and self.running < self.slots and self.kv_tokens + tokens <= self.kv_capacity
        return fits or not (self.running or self.waiting)

    def given(self, tokens: int) -> "Load":
        """After one more trajectory was routed here (eq. 3)."""
        if self.takes(tokens):
            return replace(self, running=self.running + 1, kv_tokens=self.kv_tokens + tokens)
        return replace(self, waiting=self.waiting + 1)

    def without(self, tokens: int) -> "Load":
        """After one trajectory was taken off: a queued one, which holds no KV, where there is any."""
        if self.waiting:
            return replace(self, waiting=self.waiting - 1)
        return replace(self, running=max(0, self.running - 1), kv_tokens=max(0, self.kv_tokens - tokens))


def load_of(worker: Worker) -> Load:
    return reported_load(worker.held, worker.waiting, worker.kv_expected, worker.slots, worker.kv_tokens)


def reported_load(held: int, waiting: int, kv_tokens: int, slots: int, kv_capacity: int) -> Load:
    """``held`` requests are owned or on their way; ``waiting`` and most of ``kv_tokens`` are as last reported.

    What an empty group last reported was of requests that have left since.
    """
    queued = min(held, waiting)
    return Load(held - queued, queued, kv_tokens if held else 0, slots, kv_capacity)


def throughput(load: Load, cost: CostModel | None) -> float:
    """T_i (eq. 2): tokens a second. Where the cost is unknown: the running requests, as if all steps took the same."""
    return float(load.running) if cost is None else cost.tokens_per_s(load.running, load.kv_tokens)


def relative_gain(load: Load, tokens: int, cost: CostModel | None) -> float:
    """Marginal gain (eq. 3) of routing a trajectory with this context here, as a share of the ideal one (eq. 4).

    Algorithm 3 prints k1 k2 l in eq. 4; it is read as k1 l, KV being counted in tokens (of which k1 is the time). Where
    the cost is unknown the gain falls with the slots and KV in use, from 1 to ``MU``: what fits is taken.
    """
    if not load.takes(tokens):
        return 0.0
    if cost is None:
        used = max(load.running / load.slots, load.kv_tokens / load.kv_capacity)
        return 1.0 - (1.0 - MU) * min(1.0, used)
    ideal = 1.0 / cost.decode_step_s(1, tokens)
    return (throughput(load.given(tokens), cost) - throughput(load, cost)) / ideal


class Board:
    """A snapshot's DP groups and requests as they would be once the moves planned so far are done."""

    def __init__(self, snapshot: Snapshot, targets: dict[int, int]) -> None:
        workers, requests = snapshot.workers, snapshot.requests
        self.requests, self.version, self.cost = requests, workers.loaded, snapshot.cost
        self.stays = staying(snapshot, targets)
        columns = (workers.held, workers.waiting, workers.kv_expected, workers.slots, workers.kv_tokens)
        self.loads = [reported_load(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        self._on: list[list[int]] = [[] for _ in self.loads]  # by seat: rows that may move
        rows = np.flatnonzero(requests.movable & (requests.worker >= 0))
        for row in rows[np.argsort(requests.tokens[rows], kind="stable")].tolist():
            self._on[requests.worker[row]].append(row)
        self._fixed = [held - len(rows) for held, rows in zip(workers.held.tolist(), self._on, strict=True)]
        self._seat: dict[int, int] = {}  # row -> where it was routed last; -1: off its DP group

    def moves(self) -> list[Move]:
        """What is planned so far: each request moves once, to where it was routed last."""
        return [Move(row, seat) for row, seat in self._seat.items() if seat != self.requests.worker[row]]

    def hosts(self, version: int) -> list[int]:
        """Seats that have this version in memory and are to keep it."""
        return [int(seat) for seat in np.flatnonzero(self.stays & (self.version == version))]

    def on(self, seat: int) -> list[int]:
        """Movable requests of a DP group, the fewest tokens first: what an engine queues has done the least.

        What was routed here since the snapshot comes last.
        """
        return list(self._on[seat])

    def context(self, row: int) -> int:
        return int(self.requests.prompt_tokens[row] + self.requests.tokens[row])

    def route(self, row: int, seats: Iterable[int]) -> bool:
        """Onto the one of ``seats`` with the largest gain; False, and it stays, where none reaches ``MU``."""
        tokens = self.context(row)
        gains = [(relative_gain(self.loads[seat], tokens, self.cost), -seat) for seat in seats]
        gain, place = max(gains, default=(0.0, 0))
        if gain < MU:
            return False
        self.take_off(row)
        self.put(row, -place)
        return True

    def take_off(self, row: int) -> None:
        """Off its DP group, if it is on one."""
        seat = self._seat.get(row, int(self.requests.worker[row]))
        if seat >= 0:
            self._on[seat].remove(row)
            self.loads[seat] = self.loads[seat].without(self.context(row))
        self._seat[row] = -1

    def put(self, row: int, seat: int) -> None:
        self._on[seat].append(row)
        self.loads[seat] = self.loads[seat].given(self.context(row))
        self._seat[row] = seat

    def clear(self, seat: int) -> bool:
        """Routes all that is on a DP group, or was routed there, to other hosts of its version.

        False, and nothing has changed, where something has to stay.
        """
        if self._fixed[seat]:
            return False
        before = list(self.loads), [list(rows) for rows in self._on], dict(self._seat)
        others = [host for host in self.hosts(int(self.version[seat])) if host != seat]
        if all(self.route(row, others) for row in self.on(seat)):
            return True
        self.loads, self._on, self._seat = before
        return False
