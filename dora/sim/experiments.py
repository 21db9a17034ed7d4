"""The papers' experiments: cluster, workload, and how each system divides the accelerators. Presets are made of them.

Training times are the only input that differs between the systems of one experiment. Where a paper states none they
come from one FLOP model, the same for all systems (``flop_training_s``); what else is assumed stands at each table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dora.config import merged
from dora.planning.hardware import coefficients, find_hardware, kv_tokens
from dora.planning.models import find_model
from dora.planning.workload import SIGMA, lognormal_of_mean
from dora.sim import papers
from dora.sim.scenario import Workload

# Share of the peak FLOP/s that training reaches. Laminar's authors "tune the placement by matching the generation and
# training throughput": 0.26 is the value (geometric mean over the 15 rows of its table 2) at which their own splits
# match, with the lengths assumed below. DORA's stated 8.0 min on 64 H800 are 0.18, verl's stated 377 s on 32 H20 0.41.
TRAINING_EFFICIENCY: Final = 0.26
GRPO_PASSES: Final = 8  # FLOP a parameter and token: 6 to train, 2 for the old policy's logprobs
PPO_PASSES: Final = 18  # GRPO's, a critic of the same size, and a reference model's logprobs
PROMPT_TOKENS: Final = 150
WINDOW_MOST: Final = 64  # as good as no bound on staleness
VERL_SLOTS: Final = 1024  # requests one engine takes at once: verl's default, Laminar's and AReaL's setting


@dataclass(frozen=True, slots=True)
class Placement:
    """How one system uses the accelerators, and its training time on them. ``window`` 0: the experiment's.

    ``in_flight_groups``: at most so many that are generated and not yet handed to the trainer; 0: no limit.
    """

    rollout_gpus: int
    training_s: float
    colocated: bool = False
    engine_gpus: int = 4
    window: int = 0
    in_flight_groups: int = 0


@dataclass(frozen=True, slots=True)
class Experiment:
    """One row of a paper. ``systems``: placements by policy; ``others``: of every policy that the paper does not run.

    An empty ``model`` is the cluster's default engine, Qwen2.5-32B on four H800.
    """

    gpus: int
    others: Placement
    workload: Workload
    systems: Mapping[str, Placement] = field(default_factory=dict)
    model: str = ""
    hardware: str = ""
    cluster: Mapping[str, Any] = field(default_factory=dict)  # replaces fields that model and hardware imply
    groups_per_step: int = 512
    window: int = 3
    slots: int = 256
    micro_batches: int = 16
    publish_s: float = 0.0
    period_s: float = 30.0  # between periodic re-balancings, of policies without a period of their own

    def placement(self, policy: str) -> Placement:
        return self.systems.get(policy, self.others)

    def engine(self, gpus: int) -> dict[str, Any]:
        """Fields of a cluster for one engine on ``gpus`` accelerators."""
        if not self.model:
            return {"gpu_memory_bytes": find_hardware("h800").memory_bytes, **self.cluster}
        model, hardware = find_model(self.model), find_hardware(self.hardware)
        implied = {
            "kv_tokens": kv_tokens(model, hardware, gpus),
            "kv_token_bytes": model.kv_token_bytes,
            "weights_bytes": model.weights_bytes,
            "gpu_memory_bytes": hardware.memory_bytes,
            "cost": coefficients(model, hardware, gpus).model_dump(),
        }
        return merged(implied, self.cluster)


def lognormal(mean_tokens: float, cap_tokens: int, sigma: float = SIGMA, **fields: Any) -> dict[str, Any]:
    """Fields of a workload: lognormal lengths of that mean, cut at ``cap_tokens``, by default with DORA's spread."""
    fit = lognormal_of_mean(mean_tokens, cap_tokens, sigma)
    return {"prompt_tokens": PROMPT_TOKENS, **fields} | {
        "lengths": {"mu": fit.mu, "sigma": fit.sigma, "cap_tokens": cap_tokens}
    }


def flop_training_s(model: str, hardware: str, gpus: int, tokens: float, passes: int = GRPO_PASSES) -> float:
    """Seconds to train ``tokens`` on ``gpus`` accelerators: passes x active parameters x tokens over the FLOP/s."""
    flop = passes * find_model(model).active_parameters * tokens
    return flop / (gpus * find_hardware(hardware).flops * TRAINING_EFFICIENCY)


# ----------------------------------------------------------------------------------------------------------- DORA
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


# -------------------------------------------------------------------------------------------------------- Laminar
# Splits and engine sizes are table 2 and appendix A.3. Lengths are shown in a figure only: assumed are DORA's mean of
# 2.4K (the same prompts, DAPO-Math-17k) and the stated cap. Laminar itself enforces no bound (section 8.1: "inherent
# staleness without manual enforcement"): its window is the largest there is. 4 was the most its authors saw, hence
# window 5 for every other policy. With 1,024 responses a replica, 7B at 256 GPUs has 8 batches in flight, so either
# those replicas were not full or responses longer than assumed here kept fewer of them running.


def _laminar(size: str, gpus: int) -> Experiment:
    model, hardware, mean_tokens = f"qwen2.5-{size}", "h800", 2400
    tokens = 512 * 16 * (mean_tokens + PROMPT_TOKENS)
    own_gpus, others_gpus = papers.LAMINAR_ENGINE_GPUS[size]

    def placed(policy: str) -> Placement:
        row = next(row for row in papers.LAMINAR_SPLITS[policy] if (row.model, row.gpus) == (size, gpus))
        training_s = flop_training_s(model, hardware, row.train_gpus, tokens)
        engine_gpus = own_gpus if policy in ("laminar", "partial") else others_gpus
        return Placement(row.rollout_gpus, training_s, engine_gpus=engine_gpus)

    sync = Placement(gpus, flop_training_s(model, hardware, gpus, tokens), True, others_gpus)
    systems = {"sync": sync} | {policy: placed(policy) for policy in papers.LAMINAR_SPLITS}
    return Experiment(
        gpus,
        others=placed("laminar"),
        workload=Workload.model_validate(lognormal(mean_tokens, 16 * 1024)),
        systems=systems | {"laminar": replace(systems["laminar"], window=WINDOW_MOST)},
        model=model,
        hardware=hardware,
        window=5,
        slots=VERL_SLOTS,
        publish_s=papers.LAMINAR_ACTOR_STALL_S.get(size, 0.0),
    )


# ------------------------------------------------------------------------------------- StaleFlow, StreamRL, verl
# StaleFlow "tunes the ratio to optimal values" and states neither it nor the mean length. A mean of 12K at a cap of 40K
# has a bound of the 460 s that table 3 states for a step; the same distribution cut at 20K has a mean of 9.5K, and with
# 52:76 both stages take the same time. Its coefficients (table 4) fit one H20. A staleness of 3: window 4.


def _staleflow() -> Experiment:
    gpus, rollout_gpus, model, hardware, mean_tokens = 128, 76, "qwen3-30b-a3b", "h20", 9500
    tokens = 128 * 16 * (mean_tokens + PROMPT_TOKENS)
    fitted = papers.STALEFLOW_COST
    table_4 = {
        "kv_token_s": fitted["k1"], "weights_s": fitted["k2"], "request_s": fitted["k3"], "step_s": fitted["k4"],
        "expert_fraction": 1.0,
    }  # fmt: skip
    return Experiment(
        gpus,
        others=Placement(rollout_gpus, flop_training_s(model, hardware, gpus - rollout_gpus, tokens), engine_gpus=1),
        workload=Workload.model_validate(lognormal(mean_tokens, 20 * 1024)),
        systems={"sync": Placement(gpus, flop_training_s(model, hardware, gpus, tokens), True, engine_gpus=1)},
        model=model,
        hardware=hardware,
        cluster={"cost": table_4},
        groups_per_step=128,
        window=4,
    )


# StreamRL's ablation is of the 72B model at 20K: PPO, 1,024 prompts with one response each. Assumed: a mean of 6K and
# 48:80, where a batch generated on 80 takes about as long as its training on 48. Asynchronous by one step: window 2.
def _streamrl() -> Experiment:
    gpus, rollout_gpus, model, hardware, mean_tokens = 128, 80, "qwen2.5-72b", "h800", 6000
    tokens = 1024 * (mean_tokens + PROMPT_TOKENS)

    def training_s(train_gpus: int) -> float:
        return flop_training_s(model, hardware, train_gpus, tokens, PPO_PASSES)

    return Experiment(
        gpus,
        others=Placement(rollout_gpus, training_s(gpus - rollout_gpus), engine_gpus=8),
        workload=Workload.model_validate(lognormal(mean_tokens, 20 * 1024, group_size=1)),
        systems={"sync": Placement(gpus, training_s(gpus), True, engine_gpus=8)},
        model=model,
        hardware=hardware,
        groups_per_step=1024,
        window=2,
    )


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


# ----------------------------------------------------------------------------------------------- DORA's own presets


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


EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    "dora-64": _dora(64, 24, {"sync": 8.0, "partial": 9.39, "one_step": 15.4, "dora": 12.9}),
    "dora-128": _dora(128, 40, {"sync": 5.46, "partial": 6.65, "one_step": 7.7, "dora": 7.95}),
    **{f"laminar-{s}-{n}": _laminar(s, n) for s, scales in papers.LAMINAR_SCALES.items() for n in scales},
    "staleflow-128": _staleflow(),
    "streamrl-128": _streamrl(),
    "longcat-4096": _longcat(540.0, {}),
    "longcat-4096-agentic": _longcat(
        690.0, {"most": 16, "environment_mean_s": 30.0, "environment_sigma": 1.0, "answer_tokens": 500}
    ),
    "verl-async-32": _verl_async(32),
    "verl-async-64": _verl_async(64),
    "verl-async-128": _verl_async(128),
    "fleet-1024": _fleet(),
    "small": _small(),
}
