"""DORA's own presets."""

from collections.abc import Mapping
from typing import Final

from dora.sim.experiments.base import Experiment, Placement, lognormal
from dora.sim.scenario import Workload


def _fleet() -> Experiment:
    """1,024 DP groups on long responses: for the simulator's speed. So large a fleet re-balances every few minutes."""
    sync = Placement(4096, 900.0, colocated=True)
    workload = Workload.model_validate(lognormal(16_000, 64 * 1024))
    return Experiment(6144, Placement(4096, 1800.0), workload, {"sync": sync}, period_s=300.0)


def _small() -> Experiment:
    """Two engines, seconds to simulate: for tests, faults and a first look."""
    workload = Workload.model_validate(lognormal(300, 2000, group_size=4, prompts=64))
    return Experiment(
        4,
        others=Placement(2, 5.0, engine_gpus=1),
        workload=workload,
        systems={"sync": Placement(4, 2.5, colocated=True, engine_gpus=1)},
        model="qwen2.5-7b",
        hardware="h800",
        cluster={"kv_tokens": 8000},  # scarce, so that pressure and preemption happen
        groups_per_step=8,
        slots=16,
    )


EXPERIMENTS: Final[Mapping[str, Experiment]] = {"fleet-1024": _fleet(), "small": _small()}
