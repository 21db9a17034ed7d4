"""The tables of verl's Fully Async Policy Trainer (its documentation)."""

from collections.abc import Mapping
from typing import Any, Final

from dora.lab.sim.scenario import Workload
from experiments import papers
from experiments.base import SANDBOX, VERL_SLOTS, Experiment, Placement, lognormal

# verl measured the training times; engines on 4 GPUs are its published scripts'. Lengths are not given and changed as
# it trained, differently at each scale: mean and spread are those with which sync generates for as long as it did
# there. At most half of a step is a version old: window 2. The trainer takes 128 of a step's 512 prompts at a time.
MOE: Final = "verl-async-30b-128"
TOOLS: Final = "verl-async-32-tools"
VERL_MEAN_TOKENS: Final = {32: 1450, 64: 660, 128: 870}
VERL_SIGMA: Final = 0.9
VERL_GROUPS: Final = 512
VERL_FETCHES: Final = 4
MINI_BATCH_GROUPS: Final = 32  # require_batches of these are one fetch
# Tool calling. Stated: 64 prompts a step, 16 turns, staleness 1. Its script has 16 responses a prompt and the cap of
# 16K; what a call of its sandbox takes and adds is assumed. The mean is again the one with sync's generation time.
TOOLS_GROUPS: Final = 64
TOOLS_MEAN_TOKENS: Final = 1400
TOOLS_TURNS: Final = 16
# Qwen3-30B-A3B at 8K. No lengths have sync generate for the stated 348 s here: 8K tokens alone take less with this cost
# model, and its script runs without CUDA graphs. Assumed instead: DORA's mean of 2.4K (the same prompts) and spread.
MOE_MEAN_TOKENS: Final = 2400


def _verl_async(name: str, workload: Mapping[str, Any], **changed: Any) -> Experiment:
    """``changed``: fields of the experiment that are not those of the first table."""
    rows = {row.policy: row for row in papers.VERL_ROWS[name]}
    partial, gpus = rows["partial"], rows["partial"].gpus
    rollout_gpus = partial.rollout_gpus or gpus // 2
    groups = changed.get("groups_per_step", VERL_GROUPS)
    fields = {
        "model": "qwen2.5-7b",
        "hardware": "h20",
        "groups_per_step": groups,
        "window": 2,
        "slots": VERL_SLOTS,
        "micro_batches": VERL_FETCHES,
    }
    return Experiment(
        gpus,
        others=Placement(rollout_gpus, partial.training_s),
        workload=Workload.model_validate(workload),
        systems={
            "sync": Placement(gpus, rows["sync"].training_s, colocated=True),
            "stream": Placement(rollout_gpus, rows.get("stream", partial).training_s),
            "partial": Placement(
                rollout_gpus, partial.training_s, in_flight_groups=verl_in_flight_groups(partial.staleness, groups)
            ),
        },
        **(fields | changed),
    )


def verl_in_flight_groups(staleness: float, groups: int = VERL_GROUPS) -> int:
    """``rollout_num`` of verl's documentation: a step's groups, and ``staleness`` of them ahead."""
    return round((1.0 + staleness) * groups)


def _seven_billion(name: str) -> Experiment:
    """Qwen2.5-Math-7B with the lengths of its scale, whatever else of its table the row changes."""
    row = papers.VERL_ROWS[name][-1]
    lengths = lognormal(VERL_MEAN_TOKENS[row.gpus], 28 * 1024, VERL_SIGMA)
    fetches = VERL_GROUPS // (MINI_BATCH_GROUPS * row.require_batches)
    return _verl_async(name, lengths, micro_batches=fetches)


_TOOLS: Final = lognormal(TOOLS_MEAN_TOKENS, 16 * 1024, VERL_SIGMA, turns={"most": TOOLS_TURNS, **SANDBOX})
EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    **{name: _seven_billion(name) for name in papers.VERL_ROWS if name not in (MOE, TOOLS)},
    MOE: _verl_async(MOE, lognormal(MOE_MEAN_TOKENS, 8 * 1024), model="qwen3-30b-a3b"),
    TOOLS: _verl_async(TOOLS, _TOOLS, groups_per_step=TOOLS_GROUPS),
}
