"""Marginal throughput of DP groups (paper 000, section 5.3, appendix B): where one more trajectory gains the most."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dora.orchestrator.core.cost import CostModel
from dora.orchestrator.core.policies.hosts import staying
from dora.orchestrator.core.snapshot import Move, Snapshot
from dora.orchestrator.core.state import Worker

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

    def without(self, contexts: Iterable[int]) -> "Load":
        """After running trajectories with these contexts were taken off."""
        tokens = list(contexts)
        running, kv_tokens = max(0, self.running - len(tokens)), max(0, self.kv_tokens - sum(tokens))
        return replace(self, running=running, kv_tokens=kv_tokens)


def load_of(worker: Worker) -> Load:
    if not worker.held:  # what it last reported was of requests that have left since
        return Load(0, 0, 0, worker.slots, worker.kv_tokens)
    running = max(0, worker.held - worker.waiting)
    return Load(running, worker.waiting, worker.kv_expected, worker.slots, worker.kv_tokens)


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
    """The loads of a snapshot's DP groups as they would be once the moves planned so far are done."""

    def __init__(self, snapshot: Snapshot, targets: dict[int, int]) -> None:
        workers = snapshot.workers
        self.requests, self.version, self.cost = snapshot.requests, workers.loaded, snapshot.cost
        self.stays = staying(snapshot, targets)
        self.loads = [
            Load(max(0, held - waiting), waiting, kv_tokens, slots, capacity)
            for held, waiting, kv_tokens, slots, capacity in zip(
                workers.held.tolist(),
                workers.waiting.tolist(),
                workers.kv_expected.tolist(),
                workers.slots.tolist(),
                workers.kv_tokens.tolist(),
                strict=True,
            )
        ]

    def hosts(self, version: int) -> list[int]:
        """Seats that have this version in memory and are to keep it."""
        return [int(seat) for seat in np.flatnonzero(self.stays & (self.version == version))]

    def on(self, seat: int) -> list[int]:
        """Movable requests of a DP group, the fewest tokens first: what an engine queues has done the least."""
        rows = np.flatnonzero(self.requests.movable & (self.requests.worker == seat))
        return [int(row) for row in rows[np.argsort(self.requests.tokens[rows], kind="stable")]]

    def context(self, row: int) -> int:
        return int(self.requests.prompt_tokens[row] + self.requests.tokens[row])

    def route(self, row: int, seats: Iterable[int]) -> Move | None:
        """Onto the one of ``seats`` with the largest gain; None where none reaches ``MU``."""
        tokens = self.context(row)
        gains = [(relative_gain(self.loads[seat], tokens, self.cost), -seat) for seat in seats]
        gain, place = max(gains, default=(0.0, 0))
        if gain < MU:
            return None
        self.loads[-place] = self.loads[-place].given(tokens)
        return Move(row, -place)
