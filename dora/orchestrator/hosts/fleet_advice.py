"""Advises how many hosts the cluster should have, and which of them can leave at the least cost (StreamRL 4.2)."""

from collections import defaultdict
from math import ceil
from typing import Final

from dora.config import Config
from dora.core.fleet.worker import Worker
from dora.core.forecast.fleet_size import FleetSize
from dora.core.rules import evaluation
from dora.core.state import State
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.rollout.telemetry import Telemetry
from dora.rpc import dora_pb2 as pb
from dora.system.awake import awake_s

UNKNOWN: Final = "too few steps have been measured with this number of workers"


class FleetAdvice:
    """Looks at the fleet at each tick, and at each step that the trainer has committed."""

    def __init__(self, config: Config, state: State, hosts: Hosts, telemetry: Telemetry) -> None:
        self._cluster, self._per_host = config.cluster, max(1, config.workers.count)
        self._state, self._hosts, self._telemetry = state, hosts, telemetry
        self._size = FleetSize(self._cluster.price / self._per_host, self._cluster.cooldown_s)
        self._step = -1  # the last one that was entered

    def look(self) -> None:
        if self._cluster.autoscale == "off":
            return
        staying = [worker for worker in self._state.workers.values() if not worker.draining and not worker.stopping]
        if staying:
            slots = sum(worker.assigned for worker in staying) / sum(worker.slots for worker in staying)
            kv = sum(worker.kv_used for worker in staying) / sum(worker.kv_tokens for worker in staying)
            self._size.looked(awake_s(), len(staying), min(1.0, max(slots, kv)))
        if self._telemetry.steps and (last := self._telemetry.steps[-1]).step != self._step:
            self._step = last.step
            if last.took_s is not None and last.waited_s is not None:
                self._size.committed(last.took_s, last.waited_s)

    def status(self) -> pb.FleetAdvice | None:
        """Returns the advice, or None if none is wanted."""
        if self._cluster.autoscale == "off":
            return None
        joined, own = self._workers_by_host()
        hosts, workers = len(joined), sum(map(len, joined.values()))
        each = workers / hosts if workers else float(self._per_host)
        least, most = (own + round(count * each) for count in (self._cluster.hosts_min, self._cluster.hosts_max))
        wish = self._size.wish(awake_s(), least, most)
        wanted = hosts if wish is None or wish.workers == own + workers else ceil((wish.workers - own) / each)
        return pb.FleetAdvice(
            act=self._cluster.autoscale == "act",
            hosts=hosts,
            hosts_wanted=min(max(wanted, self._cluster.hosts_min), self._cluster.hosts_max),
            reason=UNKNOWN if wish is None else wish.reason,
            leave_first=[] if wanted >= hosts else self._leave_first(joined),
        )

    def _workers_by_host(self) -> tuple[dict[str, list[Worker]], int]:
        """Returns the workers of each joined host that stays, and the number of the others."""
        joined: defaultdict[str, list[Worker]] = defaultdict(list)
        for name in self._hosts.staying():
            joined[name] = []
        own = 0
        for worker in self._state.workers.values():
            if worker.host in joined:
                joined[worker.host].append(worker)
            elif not worker.draining and not worker.stopping:
                own += 1
        return dict(joined), own

    def _leave_first(self, joined: dict[str, list[Worker]]) -> list[str]:
        """Returns the hosts without an evaluation: the slowest kind first, then those with the least KV."""
        free = [
            (-self._state.places.step_scale(name), sum(worker.kv_expected for worker in workers), name)
            for name, workers in joined.items()
            if not any(evaluation.keeps(self._state, worker) for worker in workers)
        ]
        return [name for *_, name in sorted(free)]
