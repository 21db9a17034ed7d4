"""What is simulated: one frozen, validated description. Presets (presets.py) are instances of it."""

from math import ceil, fsum
from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from dora.config import DEFAULT_POLICY, GROUP_SIZE_MOST, GROUPS_PER_STEP_MOST, WINDOW_MOST, CostConfig, Section
from dora.errors import InvalidValue
from dora.orchestrator.core.cost import CostModel

PROMPT_TOKENS_MOST = 2048  # where lognormal prompts are cut
# Far beyond any real use. Whole numbers: more do not fit into their columns, or what is drawn not into memory.
GPUS_MOST = 1 << 20
TOKENS_MOST = 1 << 30  # of one response: its square has to fit into 64 bits
KV_TOKENS_MOST = 1 << 40  # of one engine: the sum over all has to
SLOTS_MOST = 1 << 20
PROMPTS_MOST = 1 << 24
TURNS_MOST = 4096
GROUP_TURNS_MOST = 1 << 15  # turns of one prompt's responses: they are drawn for hundreds of prompts at once
TASKS_MOST = 256
SHARES_OFF = 1e-6  # of the sum of all shares from 1: thirds have no end
READING_KINDS = ("histogram", "trace")  # of length distributions: they are what a file says
# Others: more would overflow, or be waited for without end.
SECONDS_MOST = 1e5  # of one wait: more than a day
LATENCY_MOST_S = 60.0
PERIOD_LEAST_S = 1e-3
STEP_COST_MOST_S = 1e4  # of one part of an engine's step
STEP_COST_LEAST_S = 1e-9  # of a whole one: less is lost in rounding beside the time since the start
EXPERT_FRACTION_LEAST = 1e-6
IMBALANCE_MOST = 1e4
BYTES_MOST = 1e18
KV_TOKEN_BYTES_MOST = 1e12
LOG_TOKENS_MOST = 50.0  # e^21 is TOKENS_MOST
SIGMA_MOST = 20.0
ENVIRONMENT_SIGMA_MOST = 3.0  # of a million calls the longest then takes 17,000 times the mean
SCALE_MOST = 1e6  # and 1 / SCALE_MOST at least
FILTERED_MOST = 0.99  # a step takes a hundred times as many groups then
# Why a field has no effect.
TRACED_PROMPTS = "workload.prompt_lengths is trace, so prompts are as long as the trace says"


def no_file(kind: str) -> str:
    return f"lengths.kind is {kind}, and only {' and '.join(READING_KINDS)} read a file"


def not_lognormal(kind: str) -> str:
    return f"lengths.kind is {kind}, and only lognormal has it"


class _Section(Section):
    model_config = ConfigDict(allow_inf_nan=False)


class Coefficients(CostConfig):
    """The cost model of one engine: StaleFlow eq. 11 (see dora/orchestrator/core/cost.py)."""

    model_config = ConfigDict(allow_inf_nan=False)
    PLACE: ClassVar[str] = "cluster.cost"

    kv_token_s: float = Field(
        3.26e-8, ge=0.0, le=STEP_COST_MOST_S, description="k1: a step's seconds for each cached token"
    )
    weights_s: float = Field(
        6.5e-3, ge=0.0, le=STEP_COST_MOST_S, description="k2: a step's seconds to read the weights"
    )
    request_s: float = Field(
        47e-6, ge=0.0, le=STEP_COST_MOST_S, description="k3: a step's seconds for each running request"
    )
    step_s: float = Field(20e-3, ge=0.0, le=STEP_COST_MOST_S, description="k4: a step's other seconds")
    prefill_token_s: float = Field(41.7e-6, ge=0.0, le=STEP_COST_MOST_S, description="seconds for each prefilled token")
    expert_fraction: float = Field(
        1.0, ge=EXPERT_FRACTION_LEAST, le=1.0, description="share of the experts one token reads; 1: dense"
    )
    imbalance: float = Field(
        0.0, ge=0.0, le=IMBALANCE_MOST, description="extra k3 from uneven experts, times 1/sqrt(requests)"
    )
    shared_fraction: float = Field(0.0, ge=0.0, lt=1.0, description="share of the weights that every token reads")

    @model_validator(mode="after")
    def _takes_time_that_counts(self) -> Self:
        if self.model().decode_step_s(1, 1) < STEP_COST_LEAST_S:
            allowed = f"such that a step of one request takes {STEP_COST_LEAST_S:g} s at least"
            raise InvalidValue(f"{self.PLACE}.step_s", self.step_s, allowed)
        return self

    def model(self) -> CostModel:
        return CostModel(**self.model_dump())


class Cluster(_Section):
    """Accelerators, engines and links."""

    gpus: int = Field(
        64, ge=1, le=GPUS_MOST, description="all accelerators; colocated: both roles use all of them in turn"
    )
    rollout_gpus: int = Field(24, ge=1, le=GPUS_MOST, description="accelerators that generate")
    gpus_per_engine: int = Field(4, ge=1, le=GPUS_MOST, description="accelerators of one worker")
    colocated: bool = Field(False, description="training and rollout share the accelerators, one at a time")
    slots: int = Field(256, ge=1, le=SLOTS_MOST, description="requests one engine decodes at once")
    kv_tokens: int = Field(772_000, ge=1, le=KV_TOKENS_MOST, description="KV-cache of one engine")
    kv_token_bytes: float = Field(262_144.0, ge=1.0, le=KV_TOKEN_BYTES_MOST, description="KV of one token")
    gpu_memory_bytes: float = Field(
        80e9, ge=0.0, le=BYTES_MOST, description="memory of one accelerator, 0: not checked"
    )
    weights_bytes: float = Field(
        65.5e9, ge=1.0, le=BYTES_MOST, description="weights of one engine, for that check alone: load_s is their time"
    )
    link_bytes_per_s: float = Field(50e9, ge=1.0, le=BYTES_MOST, description="KV between two engines")
    link_latency_s: float = Field(0.001, ge=0.0, le=LATENCY_MOST_S, description="control message, one way")
    load_s: float = Field(2.0, ge=0.0, le=SECONDS_MOST, description="one engine takes a version's weights")
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
        if 0.0 < self.gpu_memory_bytes < 1.0:
            raise InvalidValue("cluster.gpu_memory_bytes", self.gpu_memory_bytes, "0, or at least 1")
        needed_bytes = self.weights_bytes + self.kv_tokens * self.kv_token_bytes
        if 0.0 < self.memory_bytes < needed_bytes:
            least = ceil(needed_bytes / self.gpu_memory_bytes)
            held = f"{self.weights_bytes / 1e9:.1f} GB of weights and the KV of {self.kv_tokens:,} tokens"
            allowed = f"at least {least}, with {self.gpu_memory_bytes / 1e9:.0f} GB each: {held} do not fit into less"
            raise InvalidValue("cluster.gpus_per_engine", self.gpus_per_engine, allowed)
        return self


class TrainerPace(_Section):
    """The trainer: it streams groups in micro-batches and commits when all are trained."""

    groups_per_step: int = Field(512, ge=1, le=GROUPS_PER_STEP_MOST, description="prompt groups a step takes")
    step_s: float = Field(774.0, ge=0.0, le=SECONDS_MOST, description="computing time of one step")
    micro_batches: int = Field(
        16, ge=1, le=GROUPS_PER_STEP_MOST, description="training of one begins when its groups are there"
    )
    streams: bool = Field(True, description="False: training begins when the whole step is there")
    publish_s: float = Field(
        0.0, ge=0.0, le=SECONDS_MOST, description="from the last micro-batch to the published version"
    )


class Lengths(_Section):
    """Distribution of response lengths."""

    kind: Literal["lognormal", "histogram", "trace"] = Field("lognormal", description="where lengths are drawn from")
    mu: float = Field(7.0881, ge=-LOG_TOKENS_MOST, le=LOG_TOKENS_MOST, description="lognormal: mean of the logarithm")
    sigma: float = Field(1.2, ge=0.0, le=SIGMA_MOST, description="lognormal: its standard deviation")
    file: str = Field(
        "", description="histogram (JSON: {'hist': {tokens: weight}}) or trace (JSONL: output_length, input_length)"
    )
    scale: float = Field(1.0, ge=1 / SCALE_MOST, le=SCALE_MOST, description="every length is multiplied by this")
    cap_tokens: int = Field(30_000, ge=1, le=TOKENS_MOST, description="longest response; longer ones are cut there")
    group_correlation: float = Field(0.6, ge=0.0, le=1.0, description="of log lengths within one prompt's group")
    drift_per_step: float = Field(0.0, gt=-0.5, lt=0.5, description="mean length grows by this share a step")

    @model_validator(mode="after")
    def _reads_its_file(self) -> Self:
        if self.file and self.kind not in READING_KINDS:
            raise InvalidValue("workload.lengths.file", self.file, f"left out: {no_file(self.kind)}")
        return self


class Turns(_Section):
    """Multi-turn trajectories: between turns an environment answers while the request holds no slot."""

    most: int = Field(1, ge=1, le=TURNS_MOST, description="turns of one trajectory, drawn uniformly from 1 .. most")
    environment_mean_s: float = Field(
        0.0, ge=0.0, le=SECONDS_MOST, description="lognormal latency of one environment call"
    )
    environment_sigma: float = Field(
        1.0, ge=0.0, le=ENVIRONMENT_SIGMA_MOST, description="standard deviation of its logarithm"
    )
    answer_tokens: int = Field(
        0, ge=0, le=TOKENS_MOST, description="tokens that one environment answer adds to the context"
    )


class Task(_Section):
    """What one kind of prompts has of its own; what it leaves out is the workload's."""

    name: str = Field(min_length=1, description="of the task")
    share: float = Field(gt=0.0, le=1.0, description="of the prompts; those of all tasks are 1 together")
    scale: float = Field(
        1.0, ge=1 / SCALE_MOST, le=SCALE_MOST, description="its lengths are multiplied by this, beside lengths.scale"
    )
    sigma: float | None = Field(None, ge=0.0, le=SIGMA_MOST, description="lognormal: instead of lengths.sigma")
    file: str = Field("", description="histogram or trace: instead of lengths.file")
    prompt_tokens: int | None = Field(None, ge=1, le=PROMPT_TOKENS_MOST, description="instead of the workload's")
    turns: Turns | None = Field(None, description="instead of the workload's, all of them")


class Workload(_Section):
    """Prompts and how long their responses become."""

    group_size: int = Field(16, ge=1, le=GROUP_SIZE_MOST, description="responses to one prompt")
    prompts: int = Field(17_000, ge=1, le=PROMPTS_MOST, description="size of the prompt set; an epoch draws each once")
    prompt_tokens: int = Field(
        150, ge=1, le=PROMPT_TOKENS_MOST, description=f"mean prompt length; lognormal, cut at {PROMPT_TOKENS_MOST}"
    )
    prompt_lengths: Literal["lognormal", "trace"] = Field(
        "lognormal", description="trace: a prompt is as long as the trace's line says whose response is like its own"
    )
    lengths: Lengths = Lengths()
    turns: Turns = Turns()
    tasks: tuple[Task, ...] = Field((), description="kinds of prompts; none: all are of one kind")
    feature_correlation: float = Field(
        0.85,
        ge=0.0,
        le=1.0,
        description="between what a prompt shows (its features) and its group's mean log length; the ranker reads it",
    )

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        most = GROUP_TURNS_MOST // self.group_size
        places = {f"workload.tasks.{index}.turns": task.turns for index, task in enumerate(self.tasks) if task.turns}
        for place, turns in {"workload.turns": self.turns, **places}.items():
            if turns.most > most:
                allowed = f"at most {most} with workload.group_size = {self.group_size}"
                raise InvalidValue(f"{place}.most", turns.most, allowed)
        if self.prompt_lengths == "trace" and self.lengths.kind != "trace":
            allowed = f"lognormal: lengths.kind is {self.lengths.kind}, and only a trace has prompts"
            raise InvalidValue("workload.prompt_lengths", self.prompt_lengths, allowed)
        return self

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        if len(self.tasks) > TASKS_MOST:
            raise InvalidValue("workload.tasks", f"{len(self.tasks):,} tasks", f"at most {TASKS_MOST}")
        names: set[str] = set()
        for index, task in enumerate(self.tasks):
            place = f"workload.tasks.{index}"
            if task.name in names:
                raise InvalidValue(f"{place}.name", task.name, "a name that no task before it has")
            names.add(task.name)
            if task.share * self.prompts < 1.0 - SHARES_OFF:
                allowed = (
                    f"at least {1 / self.prompts:.6g}: it has one of the {self.prompts:,} workload.prompts, or more"
                )
                raise InvalidValue(f"{place}.share", task.share, allowed)
            self._check_lengths_of(task, place)
        total = fsum(task.share for task in self.tasks)
        if self.tasks and abs(total - 1.0) > SHARES_OFF:
            last = len(self.tasks) - 1
            allowed = f"such that the shares of all {len(self.tasks)} are 1 together, not {total:.6g}"
            raise InvalidValue(f"workload.tasks.{last}.share", self.tasks[last].share, allowed)
        return self

    def _check_lengths_of(self, task: Task, place: str) -> None:
        """A task changes what the workload's kind of lengths has."""
        kind = self.lengths.kind
        if task.file and kind not in READING_KINDS:
            raise InvalidValue(f"{place}.file", task.file, f"left out: {no_file(kind)}")
        if task.sigma is not None and kind != "lognormal":
            raise InvalidValue(f"{place}.sigma", task.sigma, f"left out: {not_lognormal(kind)}")
        if task.prompt_tokens is not None and self.prompt_lengths == "trace":
            raise InvalidValue(f"{place}.prompt_tokens", task.prompt_tokens, f"left out: {TRACED_PROMPTS}")


class Scenario(_Section):
    """One simulated run."""

    name: str = Field("custom", description="shown in reports")
    policy: str = Field(DEFAULT_POLICY, description="strategy by name")
    window: int = Field(3, ge=1, le=WINDOW_MOST, description="policy versions that may be live")
    predictor: Literal["oracle", "statistics", "ranker"] = Field("oracle", description="of response lengths")
    cluster: Cluster = Cluster()
    trainer: TrainerPace = TrainerPace()
    workload: Workload = Workload()
    filter_fraction: float = Field(
        0.0, ge=0.0, le=FILTERED_MOST, description="groups that a user's filter cancels once scored"
    )
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
    period_s: float = Field(30.0, ge=PERIOD_LEAST_S, le=SECONDS_MOST, description="time between periodic re-balancings")
