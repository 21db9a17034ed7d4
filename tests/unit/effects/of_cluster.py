"""Rows of the settings of ``cluster``: the number of hosts that the service advises."""

from dataclasses import dataclass
from typing import Any, Final, cast

from dora.config import Config
from dora.orchestrator.hosts.fleet_advice import FleetAdvice
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.rollout.telemetry import StepRecord, Telemetry
from tests.unit.effects.rows import Place, Seen
from tests.unit.test_machine import Bench

JOINED: Final = ("a", "b", "c")
LOOKS: Final = {"cluster.autoscale": "advise", "cluster.cooldown_s": 0.0, "workers.count": 1}


@dataclass
class Joined:
    """What the advice reads of hosts."""

    names: tuple[str, ...]

    def staying(self) -> list[str]:
        return list(self.names)


def advised(config: Config, _: Place) -> dict[str, Any] | None:
    """Three hosts with a worker each, full, where the trainer waits for half of each step."""
    bench, telemetry = Bench(), Telemetry()
    for name in (*JOINED, "own"):
        bench.join(f"w-{name}", slots=1, host=name)
    bench.start()
    bench.offer(4)
    hosts = cast(Hosts, Joined(JOINED))
    advice = FleetAdvice(config, bench.state, hosts, telemetry)
    for step in range(12):
        advice.look()
        telemetry.steps.append(StepRecord(step, 0.0, 0.0, 0.0, 0, 0, took_s=100.0, waited_s=50.0))
    advice.look()
    found = advice.status()
    return None if found is None else {"act": found.act, "wanted": found.hosts_wanted, "leave": list(found.leave_first)}


def wanted(config: Config, place: Place) -> int:
    found = advised(config, place)
    assert found is not None
    return int(found["wanted"])


ROWS: Final = {
    "cluster.autoscale": Seen("act", lambda config, place: bool((advised(config, place) or {}).get("act")), True),
    "cluster.hosts_min": Seen(30, wanted, 30, LOOKS),
    "cluster.hosts_max": Seen(5, wanted, 5, LOOKS),
    "cluster.cooldown_s": Seen(1e5, wanted, len(JOINED), {**LOOKS, "cluster.cooldown_s": 0.0}),
    "cluster.price": Seen(900.0, wanted, base=LOOKS),
}
