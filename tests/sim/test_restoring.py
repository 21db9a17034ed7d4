"""A core that is restored from what is durable of another stands where that one stood: accounts, leases, deadlines."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.policies import POLICIES, allows_any
from dora.core.rules import restoring
from dora.core.state import RUNNING, State
from dora.errors import Conflict, InvalidValue
from dora.lab.sim.faults.trial import Trial, conduct
from dora.lab.sim.faults.unreliable import UnreliableWorld
from dora.lab.sim.invariants import check_state
from dora.lab.sim.presets import scenario_for
from dora.lab.sim.world import World
from tests.refusals import refused
from tests.sweeps import tenth_of

EVERY = 41  # events between two looks
KEPT = (
    *("newest", "step", "left", "groups_per_step", "window_versions", "trainer_epoch", "groups_named", "groups"),
    *("requests", "leased", "finished", "short_step", "rejected"),
)


def returned(state: State) -> tuple[on.WorkerJoined, ...]:
    """Every worker comes back with what it owns, in a new epoch."""
    requests = state.requests
    return tuple(
        on.WorkerJoined(
            worker.worker_id,
            worker.epoch + 1000,
            worker.slots + worker.lent_slots,
            worker.kv_tokens + worker.lent_kv_tokens,
            worker.host,
            worker.loaded,
            {state.request_id[row]: int(requests["tokens"][row]) for row in sorted(worker.rows)},
        )
        for worker in state.workers.values()
    )


def kept_pools(state: State) -> tuple[on.PoolJoined, ...]:
    return tuple(
        on.PoolJoined(
            pool.pool_id,
            pool.epoch + 1000,
            pool.kv_tokens,
            pool.host,
            {
                state.request_id[row]: int(state.requests["tokens"][row])
                for row in sorted(pool.rows)
                if row not in state.handoffs
            },
        )
        for pool in state.pools.values()
    )


def check_restored(world: World) -> None:
    state = world.machine.state
    event = replace(restoring.durable(state), workers=returned(state), pools=kept_pools(state))
    machine = Machine(world.config)
    commands = machine.handle(event, world.now_s + 1000.0)
    check_state(machine.state)
    assert not [command for command in commands if isinstance(command, do.AdmitGroup)], "nothing is on offer yet"
    if any(isinstance(command, do.DropGroup) for command in commands):
        return  # a step has enough without its redundant groups
    again = restoring.durable(machine.state)
    for name in KEPT:
        assert approximately(getattr(again, name)) == approximately(getattr(event, name)), name
    window, before = machine.state.window, state.window
    assert window.open_by_deadline == before.open_by_deadline
    for version in range(state.retired, before.newest + 1):
        if not before.closed and version not in before.quarantined - before.rejected:
            assert window.admissible(version) == before.admissible(version)
    sent_back = {
        command.request_id for command in commands if isinstance(command, do.RemoveRequest)
    }  # by the first plan
    for worker in state.workers.values():  # who outlived the service goes on with what it ran
        if worker.loaded >= 0 and worker.loaded >= state.retired:
            ran = {state.request_id[row] for row in worker.rows} - sent_back
            status, row_of = machine.state.requests["status"], machine.state.request_row
            assert {name for name in ran if status[row_of[name]] == RUNNING} == ran


def approximately(value: object) -> object:
    """A group's age is a difference of floats."""
    if isinstance(value, tuple) and value and isinstance(value[0], on.RestoredGroup):
        prompt = on.OfferedPrompt("", "", 1, 1, 1)
        return [replace(each, age_s=round(each.age_s, 6), prompt=prompt) for each in value] + [
            replace(each.prompt, prompt_id="", priority=0) for each in value
        ]
    if isinstance(value, on.RestoredRequests):  # a worker that returned may have what was given
        return replace(value, given=value.given[:0])
    return value


def looked_at(world: World) -> Iterator[int]:
    """Counts the looks while the world runs."""
    events = 0

    def see(_now_s: float, _event: object, _commands: object) -> None:
        nonlocal events
        events += 1
        if events % EVERY == 0:
            check_restored(world)

    world.observers.append(see)
    yield from iter(lambda: events, -1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_restored_core_stands_where_the_other_stood(policy: str) -> None:
    world = World(scenario_for("small", policy), seed=3)
    looks = looked_at(world)
    next(looks)
    world.run_until(lambda: world.trainer.committed == 5, limit_s=20_000.0)
    assert next(looks) > 5 * EVERY


@pytest.mark.parametrize("seed", tenth_of(range(12)))
@pytest.mark.parametrize("window", ["drawn", "auto"])
def test_so_it_does_under_faults(window: str, seed: int) -> None:
    """Handoffs, loads and evaluations under way are void; nothing that was admitted is."""
    policies = [name for name in sorted(POLICIES) if window == "drawn" or allows_any(name)]
    trial = Trial(seed, policies[seed % len(policies)], window=window)
    world = UnreliableWorld(trial.cluster(), seed)
    looks = looked_at(world)
    next(looks)
    conduct(world, trial.faults, trial.steps_after)
    assert next(looks) > EVERY


# ------------------------------------------------------------------------------------------------------ what is refused


def a_world() -> World:
    world = World(scenario_for("small", "laxity"), seed=0)
    world.run_until(lambda: world.trainer.committed == 2, limit_s=20_000.0)
    return world


def test_it_is_a_core_s_first_event() -> None:
    world = a_world()
    with refused(Conflict, field="restored", allowed="a core's first event"):
        world.machine.handle(restoring.durable(world.machine.state), world.now_s)


def test_what_no_core_can_have_left_behind_is_refused() -> None:
    world = a_world()
    event = restoring.durable(world.machine.state)
    requests = event.requests
    twice = replace(requests, rows=np.zeros_like(requests.rows))
    wrong = {
        "requests.rows": replace(event, requests=twice),
        "requests.tokens": replace(event, requests=replace(requests, tokens=requests.tokens[1:])),
        "requests.stages": replace(event, requests=replace(requests, stages=requests.stages + np.uint8(4))),
        "window_versions": replace(event, window_versions=99),
        "groups": replace(event, step=event.step + 3),
        "leased, finished": replace(event, leased=(event.groups[-1].group_id,) * 2),
        "retired": replace(event, retired=event.newest + 1),
        "workers, pools": replace(event, workers=(on.WorkerJoined("w0", 1, 1, 1),) * 2),
    }
    for field, given in wrong.items():
        machine = Machine(world.config)
        with refused(InvalidValue, field=field):
            machine.handle(given, 0.0)
        machine.handle(event, 0.0)  # nothing had changed
