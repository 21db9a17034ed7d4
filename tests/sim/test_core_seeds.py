"""1,000 seeds of the core under random event orders and faults; C1-C3 are checked after every event."""

import pytest

from dora.orchestrator.core import events as on
from tests.sim.world import World

SHAPES = [
    {"window": 1, "groups": 3, "group_size": 2, "workers": 2, "faults": 0.1},
    {"window": 2, "groups": 4, "group_size": 3, "workers": 2, "faults": 0.1},
    {"window": 2, "groups": 2, "group_size": 4, "workers": 1, "faults": 0.2},
    {"window": 3, "groups": 5, "group_size": 2, "workers": 4, "faults": 0.1},
    {"window": 4, "groups": 3, "group_size": 1, "workers": 3, "faults": 0.3},
]


@pytest.mark.parametrize("block", range(20))
def test_promises_hold_under_random_orders(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        world = World(seed, **SHAPES[seed % len(SHAPES)])
        try:
            world.run(events=300)
            world.settle(steps=2)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        missing = (
            set(world.delivered)
            - set(world.trained)
            - {group for group, step in world.delivered.items() if step >= world.machine.state.window.newest}
        )
        assert not missing, f"seed {seed}: delivered for a committed step but never trained {missing}"


@pytest.mark.parametrize("block", range(8))
def test_the_end_of_prompts_loses_nothing(block: int) -> None:
    """The source runs dry, or the service drains, in the midst of faults: what was admitted is trained, the last step
    is short, and the core is empty."""
    for seed in range(block * 25, block * 25 + 25):
        world = World(seed, **SHAPES[seed % len(SHAPES)])
        try:
            world.run(events=200)
            if seed % 2:
                world.prompts_left = seed % 17
                world.run(events=300)
            else:
                world.handle(on.AdmissionEnded())
            world.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
