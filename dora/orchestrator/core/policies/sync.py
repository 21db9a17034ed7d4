"""Synchronous on-policy training, the classical baseline: generate a batch, train on it, load the new weights."""

from dora.config import BalanceConfig
from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.line import Entry
from dora.orchestrator.core.plan import Plan, Trigger
from dora.orchestrator.core.policies.base import BasePolicy
from dora.orchestrator.core.policies.hosts import plannable
from dora.orchestrator.core.snapshot import Snapshot
from dora.orchestrator.core.worker import Worker


class SyncPolicy(BasePolicy):
    """All DP groups on the newest version; exactly one step's batch of it, once it is published; nothing besides.

    In the simulator the trainer trains when the whole batch is there (``trainer.streams`` false) and, as the papers run
    it, on the same accelerators (``cluster.colocated``).
    """

    def __init__(self, config: BalanceConfig) -> None:
        super().__init__(config)
        self._pool = 0  # DP groups of the last plan

    def version_of(self, step: int, newest: int, window: int) -> int:
        """The version that generates the batch of ``step``."""
        return newest

    def plan(self, snapshot: Snapshot, trigger: Trigger) -> Plan:
        """Global synchronisation: the pool changes version together, once nothing of an older one is unfinished."""
        requests = snapshot.requests
        unfinished = requests.version[requests.unfinished]
        next_version = self.version_of(snapshot.step, snapshot.newest, snapshot.window)
        version = int(unfinished.min()) if len(unfinished) else next_version
        seats = plannable(snapshot).tolist()
        self._pool = len(seats)
        return Plan(dict.fromkeys(seats, version))

    def ready(self, floor: Floor) -> bool:
        """A batch begins on the whole pool at once: else the first to have its weights would take all of it."""
        hosts = [worker for version in floor.versions() for worker in floor.hosts(version)]
        return len(hosts) >= self._pool or any(worker.held for worker in hosts)

    def dispatch(self, floor: Floor) -> None:
        if self.ready(floor):
            super().dispatch(floor)

    def fits(self, floor: Floor, row: int, worker: Worker) -> bool:
        """Slots alone count: what exceeds the KV waits inside the engine, as in the systems that the papers compare."""
        return True

    def choose(self, floor: Floor, version: int) -> Entry | None:
        """Only the newest version, only for the step that trains on it fresh."""
        fresh = version == floor.newest == floor.window.step
        return floor.backlog.first() if fresh and batch_open(floor) else None


def batch_open(floor: Floor) -> bool:
    """Whether the step now being filled lacks groups: fewer are open than it still takes."""
    return floor.window.open_groups < floor.window.left
