"""What a request's state costs where its KV is counted in tokens: in orders to a target, and in the simulator."""

from types import SimpleNamespace
from typing import Any

import pytest

from dora.core import commands as do
from dora.data.types import EngineCapability
from dora.errors import InvalidValue
from dora.lab.sim.presets import preset
from dora.lab.sim.scenario import Cluster
from dora.lab.sim.world import World, core_config
from dora.orchestrator.rollout.orders import GROWTH_BLOCKS, worker_message
from tests.refusals import refused

HYBRID = EngineCapability("f", 8, 4096, 32, 256, 64, "float32", kv_token_bytes=100, state_bytes=5001)


def test_a_target_makes_room_for_the_state_beside_the_blocks() -> None:
    source: Any = SimpleNamespace(capability=HYBRID, epoch=3)
    unused: Any = None
    reserve = worker_message(do.ReserveSlot("w1", 1, 7, "r", 0, 40), unused, unused, source).reserve_slot
    block_bytes = 32 * 100
    assert reserve.kv_bytes == (2 + GROWTH_BLOCKS) * block_bytes + 5001
    assert reserve.most_bytes == 8 * block_bytes + 5001


def test_a_simulated_state_travels_with_the_last_of_the_kv_and_takes_room_in_a_pool() -> None:
    scenario = preset("hybrid-64")
    world, cluster = World(scenario, 1), scenario.cluster
    ahead_s = world.copy_s("w0", "w1", 100_000) - cluster.link_latency_s
    last_s = world.copy_s("w2", "w3", 1, is_last=True) - cluster.link_latency_s
    assert ahead_s == pytest.approx(100_000 * 24_576 / cluster.link_bytes_per_s)
    assert last_s == pytest.approx((24_576 + 39_518_208) / cluster.link_bytes_per_s)
    cost = core_config(scenario).balance.cost
    assert cost is not None and cost.copy_state_s == pytest.approx(1_608 * cost.copy_token_s)
    assert world.machine.state.state_tokens == 1_608
    assert world.pools["pool-0"].state_tokens == cluster.state_tokens == 1_608


def test_an_engine_needs_memory_for_the_states_of_its_slots() -> None:
    fits = {
        "gpus_per_engine": 4,
        "slots": 256,
        "kv_tokens": 4_000_000,
        "kv_token_bytes": 24_576,
        "weights_bytes": 159e9,
    }
    Cluster.model_validate({**fits, "state_bytes": 39_518_208})
    with refused(InvalidValue, field="cluster.gpus_per_engine", value=4, names=("at least 5",)):
        Cluster.model_validate({**fits, "state_bytes": 4 * 39_518_208, "gpu_memory_bytes": 70e9})
