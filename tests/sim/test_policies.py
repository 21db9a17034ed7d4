"""Every live policy under random event orders and faults, and each strategy's own promise in the simulator."""

from collections import Counter

import pytest

from dora.orchestrator.core import events as on
from dora.orchestrator.core.policies import POLICIES, SIMULATED, WINDOW_MIN
from dora.sim.invariants import check_state
from dora.sim.presets import scenario_for
from dora.sim.world import World as SimulatedWorld
from tests.sim.world import World

DEFAULT = "dora"  # has its own thousand seeds: test_core_seeds.py
OTHERS = sorted(POLICIES.keys() - SIMULATED - {DEFAULT})
SHAPES = [
    {"window": 1, "groups": 3, "group_size": 2, "workers": 2, "faults": 0.1},
    {"window": 2, "groups": 4, "group_size": 3, "workers": 2, "faults": 0.1},
    {"window": 2, "groups": 2, "group_size": 4, "workers": 1, "faults": 0.2},
    {"window": 3, "groups": 5, "group_size": 2, "workers": 4, "faults": 0.1},
    {"window": 4, "groups": 3, "group_size": 1, "workers": 3, "faults": 0.3},
]


def world_of(policy: str, seed: int) -> World:
    shape = SHAPES[seed % len(SHAPES)]
    return World(seed, **{**shape, "window": max(shape["window"], WINDOW_MIN.get(policy, 1))}, policy=policy)


@pytest.mark.parametrize("policy", OTHERS)
def test_promises_hold_under_random_orders(policy: str) -> None:
    """C1-C3 after every event; no stall once the faults end."""
    for seed in range(40):
        world = world_of(policy, seed)
        try:
            world.run(events=150)
            if seed % 4:
                world.settle(steps=1)
            else:
                world.handle(on.AdmissionEnded())
                world.finish()
        except AssertionError as error:
            raise AssertionError(f"{policy}, seed {seed}: {error}") from error


def staleness(policy: str, window: int, steps: int = 6) -> list[Counter[int]]:
    """Staleness of the groups that each step trained on, in the simulator's ``small`` scenario."""
    scenario = scenario_for("small", policy).model_copy(update={"window": window})
    world = SimulatedWorld(scenario, seed=0)
    trained: list[Counter[int]] = []
    world.trainer.on_step = lambda step, _began, _ended, groups, _busy: trained.append(
        Counter(step - group.version for group in groups)
    )
    world.run_until(lambda: len(trained) == steps, limit_s=20_000.0)
    check_state(world.machine.state)
    return trained


@pytest.mark.parametrize("window", [1, 3])
def test_sync_is_on_policy_whatever_the_window(window: int) -> None:
    assert staleness("sync", window) == [Counter({0: 8})] * 6


@pytest.mark.parametrize("policy", ["one_step", "stream", "streamrl"])
@pytest.mark.parametrize("window", [2, 3])
def test_one_step_trains_on_batches_of_the_version_before(policy: str, window: int) -> None:
    """The first version makes two batches; from then on each makes one."""
    assert staleness(policy, window) == [Counter({0: 8})] + [Counter({1: 8})] * 5


@pytest.mark.parametrize("policy", ["laminar", "staleflow"])
def test_asynchronous_strategies_stay_within_the_window(policy: str) -> None:
    trained = staleness(policy, window=3)
    assert all(step.total() == 8 and max(step) <= 2 for step in trained)
    assert max(max(step) for step in trained) > 0


def test_partial_rollout_goes_on_under_its_only_version() -> None:
    trained = staleness("partial", window=16)
    assert [set(step) for step in trained] == [{step} for step in range(6)]
