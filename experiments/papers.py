"""What the papers report, as constants with their source: the numbers that a simulation is held against.

Values marked *derived* follow from ratios that a paper states; every such cell says so in its ``note``, and so does a
cell that contradicts another one. Policies have the names they have here: verl is ``sync``, verl's and AReaL's partial
rollout is ``partial``.
"""

from dataclasses import dataclass
from typing import Final

DORA: Final = "DORA, section 5"
LAMINAR: Final = "Laminar, section 8 and appendix A.3"
STALEFLOW: Final = "StaleFlow, section 6 and appendix B"
STREAMRL: Final = "StreamRL, section 7"
VERL_ASYNC: Final = "verl's documentation, Fully Async Policy Trainer"


@dataclass(frozen=True, slots=True)
class StepCell:
    """One system at one scale. ``None``: not stated."""

    gpus: int
    policy: str
    step_time_min: float
    rollout_only_fraction: float | None
    tokens_per_s: float | None
    note: str = ""

    @property
    def training_min(self) -> float | None:
        """The time outside of rollout is training, overlapped or not."""
        return None if self.rollout_only_fraction is None else self.step_time_min * (1 - self.rollout_only_fraction)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Shares of the total time, 0 to 1."""

    balancing: float
    transfer: float
    free_cache: float


@dataclass(frozen=True, slots=True)
class Speedup:
    """Throughput of a paper's system over ``policy``'s: mean and largest of its settings."""

    policy: str
    mean: float
    most: float


@dataclass(frozen=True, slots=True)
class SplitRow:
    """Accelerators of one system: ``train_gpus`` and ``rollout_gpus``."""

    model: str
    gpus: int
    train_gpus: int
    rollout_gpus: int


@dataclass(frozen=True, slots=True)
class AsyncRow:
    """verl: mean seconds of one step. ``generation_s``: in which the trainer has nothing to train.

    ``staleness``: share of a step's groups that may be begun ahead of it. ``require_batches``: mini-batches that the
    trainer takes at once. ``rollout_gpus`` 0: half of all.
    """

    gpus: int
    policy: str
    step_s: float
    generation_s: float
    staleness: float = 0.0
    require_batches: int = 4
    rollout_gpus: int = 0

    @property
    def training_s(self) -> float:
        """All that is not waiting: logprobs, updates, weights. Not the columns for these: two editions swap the 269.80
        and 313.81 s of 32 accelerators, and with one of them the parts of an asynchronous step exceed it."""
        return self.step_s - self.generation_s


# ----------------------------------------------------------------------------------------------------------- DORA

DORA_STEPS: Final = (
    StepCell(64, "sync", 22.91, 0.65, 14_143.0),
    StepCell(64, "one_step", 22.94, 0.33, 14_141.0),
    StepCell(64, "partial", 17.38, 0.46, 19_872.0, "colocated"),
    StepCell(64, "dora", 14.67, 0.12, 23_327.0, "neither split nor window stated; below the bound of 40:24"),
    StepCell(128, "sync", 20.23, 0.73, 16_070.0),
    StepCell(
        128,
        "one_step",
        14.02,
        None,
        23_221.0,
        "derived: 1.34 x 10.46 min, 34,135 / 1.47 tokens/s; shorter than sync's rollout alone (14.77 min)",
    ),
    StepCell(
        128,
        "partial",
        13.95,
        7.3 / 13.95,
        30_752.0,
        "rollout 7.3 min derived (2.9 x 2.5 min); tokens/s derived (34,135 / 1.11) and inconsistent with the step time",
    ),
    StepCell(128, "dora", 10.46, 0.24, 34_135.0, "neither split nor window stated"),
)
DORA_OVERHEAD: Final = {  # by preset; section 5.4, figure 12
    "dora-64": Overhead(0.00414, 0.03627, 0.00019),
    "dora-128": Overhead(0.01519, 0.02123, 0.00027),
}
LONGCAT_ROLLOUT_SPEEDUP: Final = {"maths": 3.6, "agentic": 6.2}  # section 5.2, figure 10: over sync, 4,096 accelerators

# -------------------------------------------------------------------------------------------------------- Laminar

LAMINAR_SPEEDUPS: Final = (  # section 8.1, figure 11: mathematics, 15 settings
    Speedup("sync", 2.56, 5.49),
    Speedup("one_step", 1.98, 4.09),
    Speedup("stream", 1.93, 4.06),
    Speedup("partial", 1.39, 1.81),
)
LAMINAR_TOOLS_SPEEDUP: Final = Speedup("", 2.62, 5.42)  # figure 12: tool calling, 7B; over all four baselines
LAMINAR_TOOLS_MIN: Final = 1.21
LAMINAR_SCALES: Final = {
    "7b": (16, 32, 64, 128, 256),
    "32b": (32, 64, 128, 256, 512),
    "72b": (64, 128, 256, 512, 1024),
}
_PIPELINES: Final = {
    "7b": (8, 8, 16, 32, 40),
    "32b": (16, 32, 48, 64, 80),
    "72b": (32, 64, 96, 192, 256),
}
_LAMINAR_TRAIN_GPUS: Final = {
    "one_step": _PIPELINES,
    "stream": _PIPELINES,
    "partial": {"7b": (8, 16, 32, 64, 128), "32b": (16, 32, 64, 128, 256), "72b": (32, 64, 128, 320, 640)},
    "laminar": {"7b": (8, 24, 40, 80, 192), "32b": (16, 32, 64, 128, 256), "72b": (32, 64, 128, 320, 768)},
}
LAMINAR_SPLITS: Final = {  # table 2; verl is colocated
    policy: tuple(
        SplitRow(model, gpus, train, gpus - train)
        for model, scales in LAMINAR_SCALES.items()
        for gpus, train in zip(scales, train_gpus[model], strict=True)
    )
    for policy, train_gpus in _LAMINAR_TRAIN_GPUS.items()
}
LAMINAR_ENGINE_GPUS: Final = {"7b": (1, 2), "32b": (4, 4), "72b": (8, 8)}  # appendix A.3: Laminar and AReaL, the others
AREAL_TRAINER_RANKS: Final = {"7b": (2, 1), "32b": (4, 2), "72b": (4, 4)}  # appendix A.3: tensor, pipeline; Megatron-LM
LAMINAR_ACTOR_STALL_S: Final = {"32b": 0.64, "72b": 1.40}  # section 8.3
# Section 4.1, of a shard of 4 GB: 8 s to serialize, 10 to 20 s "to/from the storage system"; half of the least.
LAMINAR_STORED_BYTES_PER_S: Final = 4e9 / (8.0 + 10.0 / 2)
# AReaL, realhf/impl/model/conversion/hf_registry.py: files of a pipeline stage are at most this large by default.
AREAL_SHARD_BYTES_MAX: Final = 10**10

# ------------------------------------------------------------------------------------------------------ StaleFlow

STALEFLOW_SPEEDUPS: Final = (  # section 6.2, figure 13: the models of table 2, staleness 1 to 3
    Speedup("sync", 2.01, 2.68),
    Speedup("one_step", 1.52, 1.95),
    Speedup("partial", 1.17, 1.42),
)
STALEFLOW_COST: Final = {"k1": 7.28e-8, "k2": 1.72e-3, "k3": 1.25e-4, "k4": 1.07e-2}  # table 4; k1 a token, not a byte

STALEFLOW_40K_STEP_S: Final = 7.8 + 2.0 + 0.6 + 36.4 + 413.3  # table 3: bound 3, training hidden by rollout

# ------------------------------------------------------------------------------------------------------- StreamRL

STREAMRL_ABLATION: Final = {  # table 3: 72B, 20K
    "colocated": 1.00,
    "skewness-aware scheduling": 1.08,
    "disaggregated, streaming": 1.23,
    "asynchronous": 1.48,
}
STREAMRL_SIZES: Final = ("7b", "32b", "72b")
STREAMRL_LENGTHS: Final = ("5k", "10k", "20k")
STREAMRL_RANGES: Final = {  # section 7.1, figure 8: least and most of its nine settings
    "disaggregated, streaming": ("ColocationRL", 1.06, 1.41),
    "asynchronous": ("verl, with another engine and trainer", 1.30, 2.66),
}

# ----------------------------------------------------------------------------------------------- verl, fully async

VERL_ASYNC_STEPS: Final = (
    AsyncRow(32, "sync", 790.10, 357.41),
    AsyncRow(64, "sync", 365.28, 150.72),
    AsyncRow(128, "sync", 356.30, 177.85),
    AsyncRow(128, "stream", 231.34, 128.47),
    AsyncRow(32, "partial", 294.77, 21.26, 0.5),
    AsyncRow(64, "partial", 189.26, 28.46, 0.5),
    AsyncRow(128, "partial", 150.63, 33.14, 0.5),
)
_SYNC_128: Final = VERL_ASYNC_STEPS[2]
VERL_ROWS: Final = {  # by preset
    **{f"verl-async-{n}": tuple(row for row in VERL_ASYNC_STEPS if row.gpus == n) for n in (32, 64, 128)},
    # the ablation of staleness: 0 and 0.5 are above
    "verl-async-128-stale-0.1": (_SYNC_128, AsyncRow(128, "partial", 171.30, 58.17, 0.1)),
    "verl-async-128-stale-0.3": (_SYNC_128, AsyncRow(128, "partial", 146.11, 38.88, 0.3)),
    # the ablation of require_batches; staleness as above, not stated. 4 has the total times of the 150.63 s above.
    "verl-async-128-batches-1": (_SYNC_128, AsyncRow(128, "partial", 203.47, 30.88, 0.5, 1)),
    "verl-async-128-batches-2": (_SYNC_128, AsyncRow(128, "partial", 158.72, 26.32, 0.5, 2)),
    "verl-async-128-batches-4": (_SYNC_128, AsyncRow(128, "partial", 124.64, 25.62, 0.5, 4)),
    "verl-async-30b-128": (
        AsyncRow(128, "sync", 497.89, 348.05),
        AsyncRow(128, "partial", 282.75, 22.06, 0.5, rollout_gpus=96),
    ),
    "verl-async-32-tools": (AsyncRow(32, "sync", 375.47, 228.03), AsyncRow(32, "partial", 221.36, 40.59, 1.0)),
}
