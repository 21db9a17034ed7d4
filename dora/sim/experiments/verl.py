"""The tables of verl's Fully Async Policy Trainer (its documentation)."""

from collections.abc import Mapping
from typing import Final

from dora.sim import papers
from dora.sim.experiments.base import VERL_SLOTS, Experiment, Placement, lognormal
from dora.sim.scenario import Workload

# verl measured the training times; engines on 4 GPUs are its published script's. Lengths are not given and changed as
# it trained, differently at each scale: mean and spread are those with which sync generates for as long as it did
# there. At most half of a step is a version old: window 2. The trainer takes 128 of a step's 512 prompts at a time.
VERL_MEAN_TOKENS: Final = {32: 1450, 64: 660, 128: 870}
VERL_SIGMA: Final = 0.9
VERL_GROUPS: Final = 512
VERL_FETCHES: Final = 4


def _verl_async(gpus: int) -> Experiment:
    rows = {row.policy: row for row in papers.VERL_ASYNC_STEPS if row.gpus == gpus}
    partial = rows["partial"]
    return Experiment(
        gpus,
        others=Placement(gpus // 2, partial.training_s),
        workload=Workload.model_validate(lognormal(VERL_MEAN_TOKENS[gpus], 28 * 1024, VERL_SIGMA)),
        systems={
            "sync": Placement(gpus, rows["sync"].training_s, colocated=True),
            "stream": Placement(gpus // 2, rows.get("stream", partial).training_s),
            "partial": Placement(
                gpus // 2, partial.training_s, in_flight_groups=verl_in_flight_groups(partial.staleness)
            ),
        },
        model="qwen2.5-7b",
        hardware="h20",
        groups_per_step=VERL_GROUPS,
        window=2,
        slots=VERL_SLOTS,
        micro_batches=VERL_FETCHES,
    )


def verl_in_flight_groups(staleness: float) -> int:
    """``rollout_num`` of verl's documentation: a step's groups, and ``staleness`` of them ahead."""
    return round((1.0 + staleness) * VERL_GROUPS)


EXPERIMENTS: Final[Mapping[str, Experiment]] = {f"verl-async-{gpus}": _verl_async(gpus) for gpus in VERL_MEAN_TOKENS}
