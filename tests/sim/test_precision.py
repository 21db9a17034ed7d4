"""A fallback to full precision among faults: every promise is kept, and a version has one precision."""

from dataclasses import replace

import pytest

from dora.core import events as on
from dora.core.rules.precision import is_full
from dora.lab.sim.faults.trial import Trial, conduct
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.scenario import Scenario

GOOD_STEPS = 2


class LowPrecision(UnreliableWorld):
    """Engines in int8, whose mismatch is too large from step ``GOOD_STEPS`` on."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        workers = self.config.workers.model_copy(update={"quantisation": "int8", "mismatch_max": 0.1})
        self.config = self.machine.state.config = self.config.model_copy(update={"workers": workers})

    def post(self, event: on.Event) -> None:
        if isinstance(event, on.StepCommitted):
            event = replace(event, mismatch=0.5 if event.step >= GOOD_STEPS else 0.01)
        super().post(event)


@pytest.mark.parametrize("seed", range(6))
def test_workers_change_their_precision_among_faults(seed: int) -> None:
    trial = Trial(seed, ("dora", "streamrl", "laminar")[seed % 3])
    world = LowPrecision(trial.cluster(), seed)
    conduct(world, trial.faults, trial.steps_after)
    state = world.machine.state
    if state.window.newest > GOOD_STEPS:
        assert state.full_precision_from == GOOD_STEPS + 2
    assert all(
        worker.full_precision == is_full(state, worker.loaded)
        for worker in state.workers.values()
        if worker.loaded >= 0
    )
    assert state.window.newest < GOOD_STEPS + 2 or world.in_full_precision
