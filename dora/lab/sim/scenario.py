"""A scenario: one frozen, validated description of a simulation. Presets (presets/) are instances of it."""

from math import ceil, fsum
from typing import Literal, Self

from pydantic import Field, model_validator

from dora.config import BalanceConfig, CostConfig, Section, WindowConfig
from dora.core.forecast.cost import CostModel
from dora.data.limits import (
    COUNT_MAX,
    GROUPS_MAX,
    KV_TOKENS_MAX,
    PROMPT_TOKENS_MAX,
    WINDOW_MAX,
    AddedTokens,
    Bytes,
    Count,
    Groups,
    GroupSize,
    GroupSizeMin,
    KvTokens,
    Latency,
    LatencySigma,
    LogTokens,
    PositiveBytes,
    PositiveShare,
    PromptTokens,
    Scale,
    Seconds,
    Share,
    Sigma,
    TokenBytes,
    Tokens,
    check_size_min,
)
from dora.data.limits import Turns as TurnCount
from dora.errors import InvalidValue

PROMPTS_MAX = 1 << 24
GROUP_TURNS_MAX = 1 << 15  # turns of one prompt's responses, as they are drawn for hundreds of prompts at once
TASKS_MAX = 256
SHARES_OFF = 1e-6  # allowed error of the sum of all shares, as thirds are not exact
FILTERED_MAX = 0.99  # a step then takes a hundred times as many groups
STEP_COST_LEAST_S = 1e-9  # of a whole step: a smaller one would be lost in rounding
READING_KINDS = ("histogram", "trace")  # length distributions that are read from a file
# Qwen2.5-32B on four H800
COST = CostConfig(
    kv_token_s=3.26e-8,
    weights_s=6.5e-3,
    request_s=47e-6,
    step_s=20e-3,
    prefill_token_s=41.7e-6,
)
# the reason why a field has no effect
TRACED_PROMPTS = "workload.prompt_lengths is trace, so prompts are as long as the trace says"


def no_file(kind: str) -> str:
    return f"lengths.kind is {kind}, and only {' and '.join(READING_KINDS)} read a file"


def not_lognormal(kind: str) -> str:
    return f"lengths.kind is {kind}, and only lognormal has it"


class EngineKind(Section):
    """Engines on one kind of machine, in one zone. The cluster's engines are numbered kind by kind."""

    name: str = Field("", max_length=64, description="of the kind; machines with the same name are alike")
    engines: Count = Field(1, description="workers of this kind; those of all kinds are the cluster's")
    step_scale: Scale = Field(1.0, description="duration of a step and of a prefill, as a multiple of cluster.cost")
    slots: int = Field(0, ge=0, le=COUNT_MAX, description="requests one engine decodes at once; 0: cluster.slots")
    kv_tokens: int = Field(0, ge=0, le=KV_TOKENS_MAX, description="KV cache of one engine; 0: cluster.kv_tokens")
    zone: str = Field("", max_length=64, description="where these machines are; empty: where the service is")


class Cluster(Section):
    """Accelerators, engines and links."""

    gpus: Count = Field(64, description="all accelerators; colocated: both roles use all of them in turn")
    rollout_gpus: Count = Field(24, description="accelerators that generate")
    gpus_per_engine: Count = Field(4, description="accelerators per worker")
    colocated: bool = Field(False, description="training and rollout share the accelerators, one at a time")
    slots: Count = Field(256, description="requests one engine decodes at once")
    kv_tokens: KvTokens = Field(772_000, description="KV cache of one engine")
    kv_token_bytes: TokenBytes = Field(262_144.0, description="KV size of one token")
    state_bytes: Bytes = Field(0.0, description="state of one request, of layers that keep one; 0: all have KV")
    gpu_memory_bytes: Bytes = Field(80e9, description="memory of one accelerator, 0: not checked")
    weights_bytes: PositiveBytes = Field(
        65.5e9, description="weights of one engine, for that check alone: load_s is their time"
    )
    link_bytes_per_s: PositiveBytes = Field(50e9, description="KV between two engines")
    link_latency_s: Latency = Field(0.001, description="control message, one way")
    zone_link_bytes_per_s: Bytes = Field(
        0.0, description="KV between two zones, over one link in each direction; 0: as between two engines of one"
    )
    zone_link_latency_s: Latency = Field(0.0, description="control message or KV from one zone to another, in addition")
    kinds: tuple[EngineKind, ...] = Field((), description="kinds of engines; none: all are alike")
    hosts: int = Field(
        0, ge=0, le=1 << 16, description="machines that engines and pools share in turn; 0: no machine ends as a whole"
    )
    pools: Count = Field(1, description="pools of host memory, where pool_tokens is not 0")
    pool_tokens: int = Field(
        0, ge=0, le=KV_TOKENS_MAX, description="KV that each pool holds of parked requests; 0: there is no pool"
    )
    pool_bytes_per_s: PositiveBytes = Field(25e9, description="KV between an engine and a pool")
    load_s: Seconds = Field(2.0, description="one engine takes a version's weights")
    cost: CostConfig = COST

    @property
    def engines(self) -> int:
        return (self.gpus if self.colocated else self.rollout_gpus) // self.gpus_per_engine

    @property
    def engines_by_kind(self) -> tuple[EngineKind, ...]:
        """The engines by kind, each with its own slots and KV."""
        kinds = self.kinds or (EngineKind(engines=max(1, self.engines)),)
        sizes = [{"slots": each.slots or self.slots, "kv_tokens": each.kv_tokens or self.kv_tokens} for each in kinds]
        return tuple(each.model_copy(update=size) for each, size in zip(kinds, sizes, strict=True))

    @property
    def mean_kv_tokens(self) -> float:
        """KV of an engine, the mean of all."""
        kinds = self.engines_by_kind
        return sum(kind.engines * kind.kv_tokens for kind in kinds) / sum(kind.engines for kind in kinds)

    def kind_of(self, number: int) -> EngineKind:
        """The kind of the engine with this number. Engines beyond the cluster's are of the last kind."""
        for kind in self.engines_by_kind:
            if number < kind.engines:
                return kind
            number -= kind.engines
        return self.engines_by_kind[-1]

    @property
    def train_gpus(self) -> int:
        return self.gpus if self.colocated else self.gpus - self.rollout_gpus

    @property
    def state_tokens(self) -> int:
        """The tokens whose KV is as large as a request's state."""
        return ceil(self.state_bytes / self.kv_token_bytes)

    @property
    def memory_bytes(self) -> float:
        """The memory of one engine, 0 if not checked."""
        return self.gpu_memory_bytes * self.gpus_per_engine

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """An engine has room for its weights and KV, and the duration of its steps is not lost in rounding."""
        if CostModel.of(self.cost).decode_step_s(1, 1) < STEP_COST_LEAST_S:
            allowed = f"such that a step of one request takes {STEP_COST_LEAST_S:g} s at least"
            raise InvalidValue("cluster.cost.step_s", self.cost.step_s, allowed)
        if 0.0 < self.gpu_memory_bytes < 1.0:
            raise InvalidValue("cluster.gpu_memory_bytes", self.gpu_memory_bytes, "0, or at least 1")
        needed_bytes = self.weights_bytes + self.kv_tokens * self.kv_token_bytes + self.slots * self.state_bytes
        if 0.0 < self.memory_bytes < needed_bytes:
            least = ceil(needed_bytes / self.gpu_memory_bytes)
            held = f"{self.weights_bytes / 1e9:.1f} GB of weights and the KV of {self.kv_tokens:,} tokens"
            allowed = f"at least {least}, with {self.gpu_memory_bytes / 1e9:.0f} GB each: {held} do not fit into less"
            raise InvalidValue("cluster.gpus_per_engine", self.gpus_per_engine, allowed)
        of_kinds = sum(kind.engines for kind in self.kinds)
        if self.kinds and of_kinds != self.engines:
            raise InvalidValue("cluster.kinds", f"{of_kinds} engines", f"the {self.engines} engines of the cluster")
        return self


class TrainerPace(Section):
    """The trainer's speed. It streams groups in micro-batches and commits when all are trained."""

    groups_per_step: Groups = Field(512, description="prompt groups a step takes")
    step_s: Seconds = Field(774.0, description="computing time of one step")
    micro_batches: Groups = Field(16, description="training of one begins when its groups are there")
    streams: bool = Field(True, description="False: training begins when the whole step is there")
    publish_s: Seconds = Field(0.0, description="from the last micro-batch to the published version")
    clip_per_step: Share = Field(
        0.0, description="window.size auto: clipped fraction of a batch for each step that it is stale on average"
    )


class Lengths(Section):
    """Distribution of response lengths."""

    kind: Literal["lognormal", "histogram", "trace"] = Field("lognormal", description="where lengths are drawn from")
    mu: LogTokens = Field(7.0881, description="lognormal: mean of the logarithm")
    sigma: Sigma = Field(1.2, description="lognormal: its standard deviation")
    file: str = Field(
        "", description="histogram (JSON: {'hist': {tokens: weight}}) or trace (JSONL: output_length, input_length)"
    )
    scale: Scale = Field(1.0, description="every length is multiplied by this")
    cap_tokens: Tokens = Field(30_000, description="longest response; longer ones are cut there")
    group_correlation: Share = Field(0.6, description="of log lengths within one prompt's group")
    drift_per_step: float = Field(0.0, gt=-0.5, lt=0.5, description="mean length grows by this share a step")

    @model_validator(mode="after")
    def _reads_its_file(self) -> Self:
        if self.file and self.kind not in READING_KINDS:
            raise InvalidValue("workload.lengths.file", self.file, f"left out: {no_file(self.kind)}")
        return self


class SimTurns(Section):
    """Multi-turn trajectories: an environment answers between turns while the request holds no slot."""

    most: TurnCount = Field(1, description="turns of one trajectory, drawn uniformly from 1 .. most")
    environment_mean_s: Seconds = Field(0.0, description="lognormal latency of one environment call")
    environment_sigma: LatencySigma = Field(1.0, description="standard deviation of its logarithm")
    answer_tokens: AddedTokens = Field(0, description="tokens that one environment answer adds to the context")


class SimTask(Section):
    """The settings of one kind of prompts. Omitted ones are the workload's."""

    name: str = Field(min_length=1, description="of the task")
    share: PositiveShare = Field(description="of the prompts; those of all tasks are 1 together")
    scale: Scale = Field(1.0, description="its lengths are multiplied by this, beside lengths.scale")
    sigma: Sigma | None = Field(None, description="lognormal: instead of lengths.sigma")
    file: str = Field("", description="histogram or trace: instead of lengths.file")
    prompt_tokens: PromptTokens | None = Field(None, description="instead of the workload's")
    turns: SimTurns | None = Field(None, description="instead of the workload's, all of them")


class Workload(Section):
    """Prompts and the lengths of their responses."""

    group_size: GroupSize = Field(16, description="responses per prompt")
    group_size_min: GroupSizeMin = Field(
        0, description="of these, so many start at once, and the rest once two rewards differ; 0: all start at once"
    )
    settled_fraction: Share = Field(0.5, description="prompts whose responses are all right, or all wrong")
    prompts: int = Field(17_000, ge=1, le=PROMPTS_MAX, description="size of the prompt set; an epoch draws each once")
    prompt_tokens: PromptTokens = Field(150, description=f"mean prompt length; lognormal, cut at {PROMPT_TOKENS_MAX}")
    prompt_lengths: Literal["lognormal", "trace"] = Field(
        "lognormal", description="trace: a prompt is as long as the trace's line says whose response is like its own"
    )
    lengths: Lengths = Lengths()
    turns: SimTurns = SimTurns()
    sessions: bool = Field(
        False, description="the core knows the turns: no slot is held between them. False: the engine waits for tools"
    )
    prompts_given: bool = Field(False, description="the first turn of each session brings its prompt")
    forks: Share = Field(0.0, description="share of the turns of sessions that follow an earlier place of theirs")
    tasks: tuple[SimTask, ...] = Field((), description="kinds of prompts; none: all are of one kind")
    feature_correlation: Share = Field(
        0.85,
        description="between what a prompt shows (its features) and its group's mean log length; the ranker reads it",
    )

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        check_size_min(self.group_size_min, self.group_size, "workload.group_size_min")
        most = GROUP_TURNS_MAX // self.group_size
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
        if len(self.tasks) > TASKS_MAX:
            raise InvalidValue("workload.tasks", f"{len(self.tasks):,} tasks", f"at most {TASKS_MAX}")
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

    def _check_lengths_of(self, task: SimTask, place: str) -> None:
        kind = self.lengths.kind
        if task.file and kind not in READING_KINDS:
            raise InvalidValue(f"{place}.file", task.file, f"left out: {no_file(kind)}")
        if task.sigma is not None and kind != "lognormal":
            raise InvalidValue(f"{place}.sigma", task.sigma, f"left out: {not_lognormal(kind)}")
        if task.prompt_tokens is not None and self.prompt_lengths == "trace":
            raise InvalidValue(f"{place}.prompt_tokens", task.prompt_tokens, f"left out: {TRACED_PROMPTS}")


class Scenario(Section):
    """One simulated run. ``balance.cost`` is the cost that the core assumes, by default the cluster's."""

    name: str = Field("custom", description="shown in reports")
    window: WindowConfig = WindowConfig(size=3)
    balance: BalanceConfig = BalanceConfig(predictor="oracle")
    cluster: Cluster = Cluster()
    trainer: TrainerPace = TrainerPace()
    workload: Workload = Workload()
    filter_fraction: float = Field(
        0.0, ge=0.0, le=FILTERED_MAX, description="groups that a user's filter cancels once scored"
    )
    redundant_fraction: Share = Field(
        0.0, description="a step's slowest groups that finished later ones may replace; they are cancelled"
    )
    in_flight_groups: int = Field(
        0,
        ge=0,
        le=WINDOW_MAX * GROUPS_MAX,
        description="prompt groups drawn and not yet trained on, at most; 0: no limit",
    )

    @model_validator(mode="after")
    def _has_one_batch(self) -> Self:
        own, trainers = self.window.groups_per_step, self.trainer.groups_per_step
        if own not in (0, trainers):
            raise InvalidValue("window.groups_per_step", own, f"0, or the {trainers} of trainer.groups_per_step")
        return self
