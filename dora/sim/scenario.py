"""What is simulated: one frozen, validated description. Presets (presets.py) are instances of it."""

from math import ceil
from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from dora.config import DEFAULT_POLICY, GROUP_SIZE_MOST, GROUPS_PER_STEP_MOST, WINDOW_MOST, CostConfig, Section
from dora.errors import InvalidValue
from dora.orchestrator.core.cost import CostModel

PROMPT_TOKENS_MOST = 2048  # the longest prompt that a workload draws
# Far above any real use: beyond, numbers do not fit into their columns, or what is drawn not into memory.
GPUS_MOST = 1 << 20
TOKENS_MOST = 1 << 30  # of one response: its square has to fit into 64 bits
KV_TOKENS_MOST = 1 << 40  # of one engine: the sum over all has to
SLOTS_MOST = 1 << 20
PROMPTS_MOST = 1 << 24
TURNS_MOST = 4096
GROUP_TURNS_MOST = 1 << 15  # turns of one prompt's responses: they are drawn for hundreds of prompts at once
READING_KINDS = ("histogram", "trace")  # of length distributions: they are what a file says


class _Section(Section):
    model_config = ConfigDict(allow_inf_nan=False)


class Coefficients(CostConfig):
    """The cost model of one engine: StaleFlow eq. 11 (see dora/orchestrator/core/cost.py)."""

    model_config = ConfigDict(allow_inf_nan=False)
    PLACE: ClassVar[str] = "cluster.cost"

    kv_token_s: float = Field(3.26e-8, ge=0.0, description="k1: a step's seconds for each cached token")
    weights_s: float = Field(6.5e-3, ge=0.0, description="k2: a step's seconds to read the weights")
    request_s: float = Field(47e-6, ge=0.0, description="k3: a step's seconds for each running request")
    step_s: float = Field(20e-3, ge=0.0, description="k4: a step's other seconds")
    prefill_token_s: float = Field(41.7e-6, ge=0.0, description="seconds for each prefilled token")
    expert_fraction: float = Field(1.0, gt=0.0, le=1.0, description="share of the experts one token reads; 1: dense")
    imbalance: float = Field(0.0, ge=0.0, description="extra k3 from uneven experts, times 1/sqrt(requests)")
    shared_fraction: float = Field(0.0, ge=0.0, lt=1.0, description="share of the weights that every token reads")

    def model(self) -> CostModel:
        return CostModel(**self.model_dump())


class Cluster(_Section):
    """Accelerators, engines and links."""

    gpus: int = Field(
        64, ge=1, le=GPUS_MOST, description="all accelerators; colocated: both roles use all of them in turn"
    )
    rollout_gpus: int = Field(24, ge=1, le=GPUS_MOST, description="accelerators that generate")
    gpus_per_engine: int = Field(4, ge=1, le=GPUS_MOST, description="accelerators of one DP group")
    colocated: bool = Field(False, description="training and rollout share the accelerators, one at a time")
    slots: int = Field(256, ge=1, le=SLOTS_MOST, description="requests one engine decodes at once")
    kv_tokens: int = Field(772_000, ge=1, le=KV_TOKENS_MOST, description="KV-cache of one engine")
    kv_token_bytes: float = Field(262_144.0, gt=0.0)
    gpu_memory_bytes: float = Field(80e9, ge=0.0, description="memory of one accelerator, 0: not checked")
    weights_bytes: float = Field(65.5e9, gt=0.0, description="weights of one engine")
    link_bytes_per_s: float = Field(50e9, gt=0.0, description="KV between two engines")
    link_latency_s: float = Field(0.001, ge=0.0, description="control message, one way")
    load_s: float = Field(2.0, ge=0.0, description="one engine takes a version's weights")
    cost: Coefficients = Coefficients()

    @property
    def engines(self) -> int:
        return (self.gpus if self.colocated else self.rollout_gpus) // self.gpus_per_engine

    @property
    def train_gpus(self) -> int:
        return self.gpus if self.colocated else self.gpus - self.rollout_gpus

    @property
    def memory_bytes(self) -> float:
        """Memory of one engine; 0: not checked."""
        return self.gpu_memory_bytes * self.gpus_per_engine

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """An engine has room for its weights and the KV it claims."""
        needed_bytes = self.weights_bytes + self.kv_tokens * self.kv_token_bytes
        if 0.0 < self.memory_bytes < needed_bytes:
            least = ceil(needed_bytes / self.gpu_memory_bytes)
            held = f"{self.weights_bytes / 1e9:.1f} GB of weights and the KV of {self.kv_tokens:,} tokens"
            allowed = f"at least {least}, with {self.gpu_memory_bytes / 1e9:.0f} GB each: {held} do not fit into less"
            raise InvalidValue("cluster.gpus_per_engine", self.gpus_per_engine, allowed)
        return self


class TrainerPace(_Section):
    """The trainer: it streams groups in micro-batches and commits when all are trained."""

    groups_per_step: int = Field(512, ge=1, le=GROUPS_PER_STEP_MOST)
    step_s: float = Field(774.0, ge=0.0, description="computing time of one step")
    micro_batches: int = Field(
        16, ge=1, le=GROUPS_PER_STEP_MOST, description="training of one begins when its groups are there"
    )
    streams: bool = Field(True, description="False: training begins when the whole step is there")
    publish_s: float = Field(0.0, ge=0.0, description="from the last micro-batch to the published version")


class Lengths(_Section):
    """Distribution of response lengths."""

    kind: Literal["lognormal", "histogram", "trace"] = "lognormal"
    mu: float = Field(7.0881, description="lognormal: mean of the logarithm")
    sigma: float = Field(1.2, ge=0.0, description="lognormal: its standard deviation")
    file: str = Field("", description="histogram (JSON: {'hist': {tokens: weight}}) or trace (JSONL: output_length)")
    scale: float = Field(1.0, gt=0.0, description="every length is multiplied by this")
    cap_tokens: int = Field(30_000, ge=1, le=TOKENS_MOST, description="longest response; longer ones are cut there")
    group_correlation: float = Field(0.6, ge=0.0, le=1.0, description="of log lengths within one prompt's group")
    drift_per_step: float = Field(0.0, gt=-0.5, lt=0.5, description="mean length grows by this share a step")

    @model_validator(mode="after")
    def _reads_its_file(self) -> Self:
        if self.file and self.kind not in READING_KINDS:
            allowed = f"left out: lengths.kind is {self.kind}, and only {' and '.join(READING_KINDS)} read a file"
            raise InvalidValue("workload.lengths.file", self.file, allowed)
        return self


class Turns(_Section):
    """Multi-turn trajectories: between turns an environment answers while the request holds no slot."""

    most: int = Field(1, ge=1, le=TURNS_MOST, description="turns of one trajectory, drawn uniformly from 1 .. most")
    environment_mean_s: float = Field(0.0, ge=0.0, description="lognormal latency of one environment call")
    environment_sigma: float = Field(1.0, ge=0.0)
    answer_tokens: int = Field(
        0, ge=0, le=TOKENS_MOST, description="tokens that one environment answer adds to the context"
    )


class Workload(_Section):
    """Prompts and how long their responses become."""

    group_size: int = Field(16, ge=1, le=GROUP_SIZE_MOST)
    prompts: int = Field(17_000, ge=1, le=PROMPTS_MOST, description="size of the prompt set; an epoch draws each once")
    prompt_tokens: int = Field(150, ge=1, le=PROMPT_TOKENS_MOST, description="mean prompt length")
    lengths: Lengths = Lengths()
    turns: Turns = Turns()
    feature_correlation: float = Field(
        0.85, ge=0.0, le=1.0, description="between what a prompt shows (its features) and its group's mean log length"
    )

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        most = GROUP_TURNS_MOST // self.group_size
        if self.turns.most > most:
            allowed = f"at most {most} with workload.group_size = {self.group_size}"
            raise InvalidValue("workload.turns.most", self.turns.most, allowed)
        return self


class Scenario(_Section):
    """One simulated run."""

    name: str = "custom"
    policy: str = DEFAULT_POLICY
    window: int = Field(3, ge=1, le=WINDOW_MOST)
    predictor: Literal["oracle", "statistics", "ranker"] = "oracle"
    cluster: Cluster = Cluster()
    trainer: TrainerPace = TrainerPace()
    workload: Workload = Workload()
    filter_fraction: float = Field(0.0, ge=0.0, lt=1.0, description="groups that a user's filter cancels once scored")
    redundant_fraction: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="a step's slowest groups that finished later ones may replace; they are cancelled",
    )
    in_flight_groups: int = Field(
        0,
        ge=0,
        le=WINDOW_MOST * GROUPS_PER_STEP_MOST,
        description="prompt groups drawn and not yet trained on, at most; 0: no limit",
    )
    period_s: float = Field(30.0, gt=0.0, description="time between periodic re-balancings")
