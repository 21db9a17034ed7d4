"""Machines that a scheduler takes by notice and gives back: C1 to C3 hold, and KV that leaves in time is not lost."""

from collections import Counter
from random import Random

import pytest

from dora.config import WindowConfig
from dora.core import commands as do
from dora.core import events as on
from dora.core.handoff.table import HandoffKind
from dora.lab.sim.faults.sweep import sweep
from dora.lab.sim.invariants import check_state
from dora.lab.sim.scenario import Cluster, Lengths, Scenario, TrainerPace, Workload
from dora.lab.sim.watch import Watch
from dora.lab.sim.world import World
from tests.sweeps import seeds_of

HOSTS = 4
KINDS = "notice,pool,session,handoff,kill,crash,evaluate,trainer"


@pytest.mark.parametrize("seeds", seeds_of(2, 40))
@pytest.mark.parametrize("policy", ["dora", "laxity"])
def test_promises_hold_while_machines_are_taken(policy: str, seeds: range) -> None:
    report = sweep(seeds, (policy,), KINDS)
    assert not [(failure.replay, failure.message) for failure in report.failures]


def scenario(link_bytes_per_s: float) -> Scenario:
    """Full engines whose KV takes a second or so to move, with a pool on each machine."""
    links = {"link_bytes_per_s": link_bytes_per_s, "pool_bytes_per_s": link_bytes_per_s}
    sizes = {"slots": 12, "kv_tokens": 9000, "pools": HOSTS, "pool_tokens": 20_000, "gpu_memory_bytes": 0.0}
    return Scenario(
        window=WindowConfig(size=3),
        cluster=Cluster(gpus=3 * HOSTS, rollout_gpus=2 * HOSTS, gpus_per_engine=1, hosts=HOSTS, **links, **sizes),
        trainer=TrainerPace(groups_per_step=24, step_s=5.0, micro_batches=2),
        workload=Workload(group_size=4, prompts=400, lengths=Lengths(mu=6.3, sigma=0.7, cap_tokens=2000)),
    )


def taken(seed: int, link_bytes_per_s: float, least_s: float, most_s: float) -> tuple[World, Counter[HandoffKind]]:
    """A world in which a machine was taken eight times, and the moves that the notices began, by kind."""
    world, random, kinds = World(scenario(link_bytes_per_s), seed), Random(seed), Counter[HandoffKind]()
    state = world.machine.state

    def saw(_now_s: float, _event: on.Event, commands: list[do.Command]) -> None:
        if world.events % 16 == 0:
            check_state(state)
        reserved = (each.request_id for each in commands if isinstance(each, do.ReserveSlot))
        handoffs = [state.handoffs.get(state.request_row.get(name, -1)) for name in reserved]
        kinds.update(each.kind for each in handoffs if each is not None and each.reason == "notice")

    world.observers += [Watch(lambda: world.machine).saw, saw]
    for number in range(8):
        at_s = 20.0 + 25.0 * number
        world.run_until(lambda at_s=at_s: world.now_s >= at_s)
        world.notice(
            f"h{random.randrange(HOSTS)}", least_s + (most_s - least_s) * random.random(), 5.0 * random.random()
        )
    world.run_until(lambda: world.now_s >= 240.0)
    return world, kinds


def test_kv_leaves_in_time_over_a_fast_link_and_none_of_it_is_lost() -> None:
    world, kinds = taken(0, 10e9, 15.0, 20.0)
    counters = world.machine.counters
    assert counters.hosts_noticed >= 7 and counters.groups_trained >= 24
    assert counters.requests_orphaned == counters.parked_lost == 0
    assert kinds[HandoffKind.MOVE] > 50 and kinds[HandoffKind.PARK] > 5


@pytest.mark.parametrize("seeds", seeds_of(1, 12, first=1))
def test_what_is_left_at_the_deadline_is_computed_again_and_delivered_once(seeds: range) -> None:
    """Over a slow link copies are under way when machines end. The ledger and the watch check the promises."""
    kinds, lost = Counter[HandoffKind](), 0
    for seed in seeds:
        world, found = taken(seed, 40e6, 0.5, 20.0)
        kinds += found
        lost += world.machine.counters.requests_orphaned
        assert world.machine.counters.groups_trained >= 24
    assert lost > 10 and kinds[HandoffKind.MOVE] and kinds[HandoffKind.PARK]
