"""The meter of a run, compared with the same measures taken without any shortcut."""

from dataclasses import dataclass, field

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.lab.sim.faults.fault_kinds import strike
from dora.lab.sim.faults.trial import HORIZON_S, Trial
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.figures.meter import Meter
from dora.lab.sim.presets import composed
from dora.lab.sim.world import World


@dataclass
class Counted:
    """Requests on workers over time: all workers are asked after every event."""

    world: World
    requests: int = 0
    since_s: float = 0.0
    at_steps: list[float] = field(default_factory=list)  # request seconds until each committed step
    request_s: float = 0.0

    def saw(self, now_s: float, _event: on.Event | None = None, _commands: list[do.Command] | None = None) -> None:
        self.request_s += self.requests * (now_s - self.since_s)
        self.since_s = now_s
        self.requests = sum(len(worker.rows) for worker in self.world.machine.state.workers.values())


def measured(world: World) -> tuple[Meter, Counted]:
    """A meter, and beside it what it is to come to. ``at_steps`` is filled as steps are committed."""
    meter, counted = Meter(world, 0, None), Counted(world)
    world.observers.append(counted.saw)
    counted.saw(world.now_s)
    told = world.trainer.on_step
    assert told is not None

    def on_step(*step: object) -> None:
        counted.saw(world.now_s)
        counted.at_steps.append(counted.request_s)
        told(*step)  # type: ignore[arg-type]

    world.trainer.on_step = on_step
    return meter, counted


@pytest.mark.parametrize("policy", ["laxity", "laminar", "staleflow"])
def test_the_time_of_requests_on_workers_is_that_of_all_their_stays(policy: str) -> None:
    """Those that moved have several; those that were cancelled count as long as they ran."""
    world = World(composed({"filter_fraction": 0.2, "redundant_fraction": 0.2}, "small", policy), seed=0)
    meter, counted = measured(world)
    world.run_until(lambda: meter.steps == 8, 20_000.0)
    assert world.machine.counters.migrations_kv > 0
    assert meter.end.resident_s == pytest.approx(counted.at_steps[-1], rel=1e-9)
    assert 0.0 < meter.end.still_s < meter.end.resident_s


@pytest.mark.parametrize("seed", [11, 16, 25])
def test_the_time_of_requests_on_workers_counts_deaths_and_undone_handoffs(seed: int) -> None:
    trial = Trial(seed, "dora", "kill,handoff,copy,partition,leave,migrate,cancel")
    scenario = trial.cluster()
    world = UnreliableWorld(scenario, seed)
    meter, counted = measured(world)
    for fault in trial.faults:
        world.after(fault.at_s, strike, world, fault)
    world.run_until(lambda: world.now_s >= HORIZON_S)
    reading = meter._read()
    counted.saw(world.now_s)
    assert world.machine.counters.workers_lost > 0
    assert reading.resident_s == pytest.approx(counted.request_s, rel=1e-9)
