"""A strategy's state between calls can be derived again: a new one continues where another stopped."""

from collections.abc import Callable

import pytest

from dora.core.dispatcher import Dispatcher
from dora.core.observation import view_of
from dora.core.plan import POOL, QUEUE, Move, Trigger
from dora.core.policies import POLICIES, policy_of
from dora.core.state import State
from dora.lab.sim.faults.fault_kinds import KINDS
from dora.lab.sim.faults.trial import Trial, conduct
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.presets import scenario_for
from dora.lab.sim.world import World

EVERY = 37  # events between two restarts: no divisor of any rhythm in the runs
FAULT_SEED, MORE_SEEDS = 11, (12, 13)


def check_moves(state: State, moves: tuple[Move, ...], target_of: Callable[[int], int]) -> None:
    """Each is of a request on a worker: to another one that hosts its version and keeps it, or where there is a pool
    off all of them."""
    for move in moves:
        source, version = state.owner(move.row), int(state.requests["version"][move.row])
        assert source is not None
        if move.target in (POOL, QUEUE):
            assert state.pools
            continue
        assert move.target >= 0
        target = state.worker_list[move.target]
        assert target is not None and source is not target
        assert target.loaded == version == target_of(move.target)


def check_fresh_plan(state: State) -> None:
    """A strategy that has seen nothing plans validly on this state."""
    policy = policy_of(state.config.balance, state.config.window)
    dispatcher = Dispatcher(state)
    policy.observe(dispatcher)
    plan = policy.plan(view_of(state), Trigger.TIME)
    present = {worker.index: worker.target for worker in state.workers.values() if not worker.draining}
    assert plan.targets.keys() == present.keys()
    changed = {version for index, version in plan.targets.items() if version != present[index]}
    assert changed <= {*dispatcher.versions(), dispatcher.newest}  # between two steps of window 1 none is live
    check_moves(state, plan.moves, plan.targets.__getitem__)
    check_moves(state, policy.relieve(view_of(state)), present.__getitem__)


def restarted(world: World) -> list[int]:
    """Now and then the strategy of this world is replaced by a fresh one; how many events there were, at the end."""
    events = [0]

    def see(_now_s: float, _event: object, _commands: object) -> None:
        state = world.machine.state
        events[0] += 1
        if events[0] % EVERY == 0:
            if state.workers and state.window.groups_per_step:
                check_fresh_plan(state)
            world.machine.policy = policy_of(state.config.balance, state.config.window)

    world.observers.append(see)
    return events


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_fresh_strategy_goes_on_in_the_middle_of_a_run(policy: str) -> None:
    world = World(scenario_for("small", policy), seed=0)
    events = restarted(world)
    world.run_until(lambda: world.trainer.committed == 6, limit_s=20_000.0)
    assert events[0] > 10 * EVERY


@pytest.mark.parametrize("seed", [FAULT_SEED, *(pytest.param(seed, marks=pytest.mark.full) for seed in MORE_SEEDS)])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_fresh_strategy_goes_on_under_faults(policy: str, seed: int) -> None:
    """Every promise is checked after every event, and that training goes on.

    Without ``crash``: an orchestrator that begins again has a fresh one anyway.
    """
    trial = Trial(seed, policy, ",".join(kind for kind in KINDS if kind != "crash"))
    world = UnreliableWorld(trial.cluster(), seed)
    events = restarted(world)
    conduct(world, trial.faults, trial.steps_after)
    assert events[0] > EVERY
