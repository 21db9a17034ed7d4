"""DORA's open experiments and its production runs (paper 004, section 5)."""

from collections.abc import Mapping
from typing import Any, Final

from dora.sim.experiments.base import VERL_SLOTS, Experiment, Placement, lognormal
from dora.sim.scenario import Workload

# The splits are inferred from the stated fractions, with training that scales linearly: 64 GPUs train 8.0 min in sync,
# (1 - 0.65) x 22.91, hence 40 of them 12.9, (1 - 0.12) x 14.67; 128 train 5.46 in sync and 88 of them 7.95. One-step
# trains (1 - 0.33) x 22.94 = 15.4 min on 32 GPUs, half of that on 64 (not stated). Partial rollout is colocated.


def _dora(gpus: int, rollout_gpus: int, minutes: Mapping[str, float]) -> Experiment:
    half = Placement(gpus // 2, minutes["one_step"] * 60)
    return Experiment(
        gpus,
        others=Placement(rollout_gpus, minutes["dora"] * 60),
        workload=Workload(),
        systems={
            "sync": Placement(gpus, minutes["sync"] * 60, colocated=True),
            "partial": Placement(gpus, minutes["partial"] * 60, colocated=True),
            "one_step": half,
            "stream": half,
        },
    )


# The production runs state model, accelerators, memory (60 GB) and the cap alone. Assumed: 512 prompts x 16 as in the
# open experiments, mean response 12K, engines on 32 accelerators, half of all for rollout; agentic: up to 16 turns,
# each but the last followed by a call of the environment, 30 s on average, and a 500-token answer. Rollout is "50-80%
# of the step" (section 1): training on all accelerators takes a quarter of what sync's rollout takes here.
def _longcat(colocated_training_s: float, turns: Mapping[str, Any]) -> Experiment:
    gpus = 4096
    return Experiment(
        gpus,
        others=Placement(gpus // 2, 2 * colocated_training_s, engine_gpus=32),
        workload=Workload.model_validate(lognormal(12_000, 64 * 1024, turns=dict(turns))),
        systems={"sync": Placement(gpus, colocated_training_s, colocated=True, engine_gpus=32)},
        model="longcat-flash",
        hardware="npu-60gb",
        slots=VERL_SLOTS,
    )


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "dora-64": _dora(64, 24, {"sync": 8.0, "partial": 9.39, "one_step": 15.4, "dora": 12.9}),
    "dora-128": _dora(128, 40, {"sync": 5.46, "partial": 6.65, "one_step": 7.7, "dora": 7.95}),
}
LONGCAT: Final[Mapping[str, Experiment]] = {
    "longcat-4096": _longcat(408.0, {}),
    "longcat-4096-agentic": _longcat(
        605.0, {"most": 16, "environment_mean_s": 30.0, "environment_sigma": 1.0, "answer_tokens": 500}
    ),
}
