"""Whatever beginning of a service's log is left, it says where a service stood: a fresh core takes it."""

from collections.abc import Iterator

import pytest

from dora.core import Machine
from dora.core import events as on
from dora.journal import records
from dora.journal.durable import Durable
from dora.lab.sim.faults.trial import Trial, conduct
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.orchestrator.recovery import recovery_state
from tests.unit.journal.contents import content_of

LAST = 60  # beginnings of each log, up to its end, where the prompts run out


def beginnings(world: UnreliableWorld) -> Iterator[tuple[records.LogRecord, on.Restored]]:
    """Yields each record with the state that a later incarnation would restore, except for tokens and verdicts."""
    logged = world.logged.records
    durable = Durable()
    for count, record in enumerate(logged, start=1):
        durable.apply(record)
        if not isinstance(record, records.Tokens | records.Verdict) and count > len(logged) - LAST:
            content = content_of(logged[:count], durable)
            groups = content.groups()
            requests = content.requests(groups)
            offered, window = world.service._offered, world.config.window
            yield record, recovery_state.restored(durable, groups, requests, offered, window, world.now_s, 1)


@pytest.mark.parametrize("seed", [4, 7])
def test_each_can_be_carried_on_with(seed: int) -> None:
    trial = Trial(seed, "dora", "end,cancel,trainer,kill")
    world = UnreliableWorld(trial.cluster(), seed)
    conduct(world, trial.faults, trial.steps_after)
    tried = 0
    for record, restored in beginnings(world):
        machine = Machine(world.config)
        machine.handle(restored, 0.0)
        assert machine.state.window.newest == restored.newest, record
        tried += 1
    assert tried > 10
