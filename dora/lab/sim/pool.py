"""A simulated pool of host memory. It stores parked requests and returns them; it runs nothing."""

from dataclasses import dataclass, field

from dora.core import commands as do
from dora.core import events as on
from dora.core.forecast.cost import CostModel
from dora.lab.sim.ledger import Violation
from dora.lab.sim.scenario import Cluster
from dora.lab.sim.worker import Outcome, SimWorker, WorkerWorld
from dora.lab.sim_engine.engine import SimEngine
from dora.lab.sim_engine.request import SimRequest


@dataclass(slots=True, eq=False)
class SimPool(SimWorker):
    """One epoch of one pool. Its engine has no slots, so each request waits there, under its own version."""

    kv_tokens: int = 0
    state_tokens: int = 0  # room of a request's state
    reserved: dict[str, int] = field(default_factory=dict)  # incoming request -> its KV in tokens

    @classmethod
    def of(cls, pool_id: str, epoch: int, cost: CostModel, cluster: Cluster) -> "SimPool":
        kv_tokens, state_tokens = cluster.pool_tokens, cluster.state_tokens
        return cls(pool_id, epoch, SimEngine(cost, 0, kv_tokens), kv_tokens=kv_tokens, state_tokens=state_tokens)

    def obey(self, world: WorkerWorld, command: do.WorkerCommand, request: SimRequest | None) -> Outcome:
        if isinstance(command, do.LoadVersion | do.StartRequest | do.Park):
            raise Violation(f"{self.worker_id} is a pool, and is told to obey {command}")
        if isinstance(command, do.ReserveSlot):
            needed = command.kv_tokens + self.state_tokens
            if self.held_tokens + needed > self.kv_tokens:
                return self._failed(command, "no room", "refused")
            self.reserved[command.request_id] = needed
        elif isinstance(command, do.CopyIn | do.CancelReservation):
            self.reserved.pop(command.request_id, None)
        return super(SimPool, self).obey(world, command, request)

    @property
    def held_tokens(self) -> int:
        held = self.engine.requests.values()
        return sum(self.reserved.values()) + sum(request.context + self.state_tokens for request in held)

    def drop(self, subject: int, share: float) -> tuple[str, ...]:
        """Drops the KV of some requests, at least one, from the ``subject``-th on. Returns their ids."""
        names = sorted(self.engine.requests)
        lost = tuple(names[subject % len(names) :][: 1 + int(share * len(names))]) if names else ()
        for name in lost:
            self.outgoing.pop(name, None)
            self.engine.remove(name)
        return lost

    def takes(self, version: int) -> bool:
        return True

    def version_of(self, request: SimRequest) -> int:
        return request.version


def lost(member: SimWorker, reason: str) -> on.WorkerLost | on.PoolLost:
    kind = on.PoolLost if isinstance(member, SimPool) else on.WorkerLost
    return kind(member.worker_id, member.epoch, reason)
