"""Groups that take turns keep the trainer busy while the last of them run."""

import pytest

from dora.orchestrator.core.floor import Floor
from dora.orchestrator.core.policies import POLICIES, Strategy, pacing
from dora.orchestrator.core.policies.laxity import LaxityPolicy
from dora.sim.presets import composed
from dora.sim.run import simulate

# Most groups have a response at the limit, so all would end at once: an eighth of "StaleFlow", table 2, its mixture.
SMALL = {
    "cluster": {
        "gpus": 16,
        "rollout_gpus": 11,
        "gpus_per_engine": 1,
        "kv_tokens": 207_519,
        "kv_token_bytes": 98_304.0,
        "gpu_memory_bytes": 0.0,
        "cost": {
            "kv_token_s": 7.28e-8,
            "weights_s": 1.72e-3,
            "request_s": 1.25e-4,
            "step_s": 1.07e-2,
            "prefill_token_s": 0.00011232895363877732,
        },
    },
    "trainer": {"groups_per_step": 16, "step_s": 240.57587343441003},
    "workload": {"lengths": {"mu": 8.97440654571017, "cap_tokens": 20_480}},
}


def tail_shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of each step after the first few: share of its training that is done after its last group came."""
    seen: dict[int, tuple[float, float]] = {}  # version -> when it was published, and when its step was full

    class Watched(LaxityPolicy):
        def observe(self, floor: Floor) -> None:
            seen.setdefault(floor.newest, (floor.rhythm.published_s, floor.rhythm.filled_s))
            super().observe(floor)

    monkeypatch.setitem(POLICIES, "watched", Strategy(Watched))
    scenario = composed(SMALL, policy="watched", window=2)
    simulate(scenario, steps=10, warmup=4, seed=0)
    return [
        (published - filled) / scenario.trainer.step_s for version, (published, filled) in seen.items() if version > 4
    ]


def test_less_of_a_steps_training_is_left_when_its_last_group_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn = tail_shares(monkeypatch)
    monkeypatch.setattr(pacing, "TURNS_STEP", float("inf"))
    at_once = tail_shares(monkeypatch)
    assert sum(in_turn) / len(in_turn) < 0.85 * sum(at_once) / len(at_once)
