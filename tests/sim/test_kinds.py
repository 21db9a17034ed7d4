"""Strategies on two kinds of machines in two zones: the ledger checks every promise, and KV crosses only if it pays."""

import pytest

from dora.config import merged
from dora.core.policies import POLICIES
from dora.data.validation import validated_as
from dora.lab.sim.extent import expected_bound_s
from dora.lab.sim.presets import preset, scenario_for
from dora.lab.sim.run import simulate
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.world import World

FEW_BYTES_PER_S, MANY_BYTES_PER_S = 1e6, 1e12
POOLED = sorted(POLICIES.keys() - {"sync"})  # sync is colocated


def unlike(policy: str, link_bytes_per_s: float) -> Scenario:
    kinds = [{"name": "fast", "engines": 2}, {"name": "slow", "engines": 2, "step_scale": 2.0, "zone": "b"}]
    links = {"zone_link_bytes_per_s": link_bytes_per_s, "zone_link_latency_s": 0.0}
    cluster = {"gpus": 6, "rollout_gpus": 4, "kinds": kinds, "pool_tokens": 2000, "pools": 4, **links}
    over = {"cluster": cluster, "trainer": {"groups_per_step": 16}}
    return validated_as(Scenario, merged(scenario_for("small", policy).model_dump(), over))


@pytest.mark.parametrize("policy", POOLED)
def test_every_strategy_keeps_its_promises_on_unlike_machines(policy: str) -> None:
    report = simulate(unlike(policy, FEW_BYTES_PER_S), steps=3, warmup=0, seed=1)
    assert report.violations == report.lost == report.duplicated == 0


@pytest.mark.parametrize("link_bytes_per_s", [FEW_BYTES_PER_S, MANY_BYTES_PER_S])
def test_kv_crosses_a_fast_link_alone(link_bytes_per_s: float) -> None:
    world = World(unlike("laxity", link_bytes_per_s), 0)
    world.run_until(lambda: world.trainer.committed == 6)
    assert (world.crossed_bytes > 0.0) == (link_bytes_per_s == MANY_BYTES_PER_S)
    places = world.machine.state.places
    slow, fast = (places.step_scale(worker.host) for worker in map(world.machine.state.workers.get, ("w2", "w0")))
    assert slow / fast == pytest.approx(2.0, rel=0.1)


def test_the_bound_is_that_of_all_capacities() -> None:
    both, small = unlike("laxity", MANY_BYTES_PER_S), preset("small")
    alone = small.model_copy(update={"trainer": both.trainer})
    assert expected_bound_s(both) == pytest.approx(expected_bound_s(alone) / 1.5)
