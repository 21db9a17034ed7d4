"""Laminar's table 2 (appendix A.3), by model and scale."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Final

from dora.data.hardware import find_hardware
from dora.data.limits import WINDOW_MAX
from dora.lab.planning.models import find_model
from dora.lab.planning.workload import lognormal_of_mean, step_workload
from dora.lab.sim.scenario import Workload
from experiments import papers
from experiments.base import (
    PROMPT_TOKENS,
    SANDBOX,
    VERL_SLOTS,
    Experiment,
    Placement,
    flop_training_s,
    lognormal,
)
from experiments.stated_ranks import over_even

# Splits and engine sizes are table 2 and appendix A.3. Lengths are shown in a figure only: assumed are DORA's mean of
# 2.4K (the same prompts, DAPO-Math-17k) and the stated cap. Laminar itself enforces no bound (section 8.1: "inherent
# staleness without manual enforcement"): its window is the largest there is. 4 was the most its authors saw, hence
# window 5 for every other policy. With 1,024 responses a replica, 7B at 256 GPUs has 8 batches in flight, so either
# those replicas were not full or responses longer than assumed here kept fewer of them running.

# Tool calling (figure 12) is the 7B model with at most 8 calls, at table 2's splits. Assumed: the same lengths, and
# what a call takes and adds. A response makes half of the calls on average; the trainer computes their answers too.
TOOL_CALLS: Final = 8
TOOLS_SIZE: Final = "7b"
HARDWARE: Final = "h800"
GROUPS, GROUP_SIZE = 512, 16
MEAN_TOKENS, CAP_TOKENS = 2400, 16 * 1024


def _areal_over_even(size: str, train_gpus: int) -> float:
    """How much longer AReaL trains than the linear FLOP model says: 1 or more.

    "All baselines except AReaL use (...) PyTorch FSDP for training", AReaL Megatron-LM on ranks that appendix A.3 gives
    (section 8). Its pipelines wait in each of a step's 16 updates, the more the fewer tokens a replica has of one, and
    its replicas exchange gradients. The FLOP model's efficiency is from Laminar's splits, which FSDP trains on.
    """
    tensor, pipeline = papers.AREAL_TRAINER_RANKS[size]
    batch = step_workload(lognormal_of_mean(MEAN_TOKENS, CAP_TOKENS), GROUPS, GROUP_SIZE, PROMPT_TOKENS)
    return over_even(find_model(f"qwen2.5-{size}"), find_hardware(HARDWARE), batch, train_gpus, tensor, pipeline)


def _areal_publish_s(size: str) -> float:
    """How long AReaL's trainer stands until its weights are stored, in files that its ranks write all at once.

    Its trainers "store the resulting parameters in distributed storage" (AReaL's notes on version 0.3), which is a part
    of the training step (realhf/system/model_worker.py, "param-sync-save"); engines load them from there. How long that
    takes them is not reckoned: here a load takes every system's engines as long.
    """
    stage_bytes = find_model(f"qwen2.5-{size}").weights_bytes / papers.AREAL_TRAINER_RANKS[size][1]
    return stage_bytes / ceil(stage_bytes / papers.AREAL_SHARD_BYTES_MAX) / papers.LAMINAR_STORED_BYTES_PER_S


def _laminar(size: str, gpus: int, calls: int = 0) -> Experiment:
    model = f"qwen2.5-{size}"
    turns = {"most": calls + 1, **SANDBOX} if calls else {}
    tokens = GROUPS * GROUP_SIZE * (MEAN_TOKENS + PROMPT_TOKENS + calls * SANDBOX["answer_tokens"] / 2)
    own_gpus, others_gpus = papers.LAMINAR_ENGINE_GPUS[size]
    stall_s = papers.LAMINAR_ACTOR_STALL_S.get(size, 0.0)

    def placed(policy: str) -> Placement:
        row = next(row for row in papers.LAMINAR_SPLITS[policy] if (row.model, row.gpus) == (size, gpus))
        training_s = flop_training_s(model, HARDWARE, row.train_gpus, tokens)
        publish_s = stall_s
        if policy == "partial":
            training_s *= _areal_over_even(size, row.train_gpus)
            publish_s = _areal_publish_s(size)
        engine_gpus = own_gpus if policy in ("laminar", "partial") else others_gpus
        return Placement(row.rollout_gpus, training_s, engine_gpus=engine_gpus, publish_s=publish_s)

    sync = Placement(gpus, flop_training_s(model, HARDWARE, gpus, tokens), True, others_gpus, publish_s=stall_s)
    systems = {"sync": sync} | {policy: placed(policy) for policy in papers.LAMINAR_SPLITS}
    return Experiment(
        gpus,
        others=placed("laminar"),
        workload=Workload.model_validate(lognormal(MEAN_TOKENS, CAP_TOKENS, turns=turns)),
        systems=systems | {"laminar": replace(systems["laminar"], window=WINDOW_MAX)},
        model=model,
        hardware=HARDWARE,
        window=5,
        slots=VERL_SLOTS,
    )


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    f"laminar-{size}-{gpus}": _laminar(size, gpus) for size, scales in papers.LAMINAR_SCALES.items() for gpus in scales
} | {
    f"laminar-{TOOLS_SIZE}-{gpus}-tools": _laminar(TOOLS_SIZE, gpus, TOOL_CALLS)
    for gpus in papers.LAMINAR_SCALES[TOOLS_SIZE]
}
