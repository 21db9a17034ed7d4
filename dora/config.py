"""The whole configuration: frozen, validated once. One TOML file plus dotted overrides (``--set window.size=3``).

Field names carry their units. No value is silently corrected: a bad one raises :class:`dora.errors.InvalidValue` with
the dotted field, the value and what is allowed.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dora.data.limits import (
    GROUPS_MAX,
    STOP_TOKENS_MAX,
    STOPS_MAX,
    TEMPERATURE_MAX,
    TEMPERATURE_MIN,
    WINDOW_REQUESTS_MAX,
    Count,
    Fraction,
    GroupSize,
    GroupSizeMin,
    Period,
    PositiveShare,
    Seconds,
    Share,
    StepSeconds,
    StopString,
    StopTokenId,
    Timeout,
    VariableName,
    Versions,
    check_size_min,
)
from dora.data.types import EngineNumerics
from dora.data.validation import kind_of, validated_as, words_of
from dora.errors import InvalidValue

CONTEXT_MIN: Final = 16
CONTEXT_MAX: Final = 1 << 22  # while neither the model's nor the KV-cache's is known
KV_TOKENS_MIN: Final = 64
DEFAULT_POLICY: Final = "laxity"  # docs/strategy.md explains it
# Former names of settings in recorded event logs, with their present names; likewise for values.
RENAMED: Final = {
    "balance.hysteresis": "balance.dora.hysteresis",
    "balance.level_gap": "balance.dora.level_gap",
    "window.clip_fraction_most": "window.clip_fraction_max",
    "window.effective_sample_least": "window.effective_sample_min",
    "workers.outlive_s": "workers.orphan_timeout_s",
    "workers.roll_call_s": "workers.reattach_timeout_s",
}
REMOVED: Final = ("service.event_log",)
VALUES_RENAMED: Final = {"balance.predictor": {"given": "oracle"}}

Setting = str | int | float | bool
WindowSize = Versions | Literal["auto"]
Override = str | tuple[str, Setting]  # "window.size=3", its value in TOML, or ("window.size", 3)


class Section(BaseModel):
    """Frozen fields, no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _only_a_number_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Otherwise ``true`` and ``"1"`` would pass as 1."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool | str) and kind_of(field) in (int, float) and value not in words_of(field):
            raise PydanticCustomError("number", "a number")
        return value


class WindowConfig(Section):
    """The sliding window of policy versions (C3)."""

    size: WindowSize = Field(
        2,
        description="versions that may be live; staleness is at most size - 1; auto: from min to max, as the trainer's "
        "wait and its off-policy signals ask for",
    )
    groups_per_step: int = Field(0, ge=0, le=GROUPS_MAX, description="prompt groups a step takes; 0: the trainer says")
    freshness: Share = Field(
        0.005,
        description="share of a step's time that the trainer may wait for groups to begin later, under newer versions; "
        "0: they begin as early as the window allows; size auto: more than this while staleness costs more",
    )
    min: Versions = Field(1, description="auto: the narrowest window, with which a run begins")
    max: Versions = Field(4, description="auto: the widest window")
    wait_share: PositiveShare = Field(
        0.02, description="auto: a wider window is tried where the trainer waits for more of a step than this"
    )
    clip_fraction_max: Share = Field(0.2, description="auto: a narrower window where more of the tokens are clipped")
    effective_sample_min: Share = Field(
        0.5, description="auto: a narrower window where the effective sample size is below this"
    )
    staleness_cost: float = Field(
        0.7,
        ge=0.0,
        le=1000.0,
        description="auto: share of the samples that a version of staleness costs, divided by the square root of the "
        "policy's movement in a step (the metric movement, in nats); about 2.7 for the objective dapo; 0: staleness is "
        "taken to cost nothing",
    )
    look_steps: int = Field(4, ge=1, le=256, description="auto: steps that are looked at before a change")
    rest_steps: int = Field(
        64, ge=0, le=1024, description="auto: steps until a window that was of no use is tried again; twice each time"
    )

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.min > self.max:
            raise InvalidValue("window.max", self.max, f"at least window.min, {self.min}")
        return self

    @property
    def is_adaptive(self) -> bool:
        return self.size == "auto"

    @property
    def least(self) -> int:
        """The narrowest size of the window."""
        return self.min if self.size == "auto" else self.size

    @property
    def most(self) -> int:
        """The widest size of the window: the most live versions."""
        return self.max if self.size == "auto" else self.size


class RolloutConfig(Section):
    """The sampling of responses, unless their prompt says otherwise."""

    group_size: GroupSize = Field(8, description="responses per prompt")
    group_size_min: GroupSizeMin = Field(
        0, description="of these, so many start at once, and the rest once two rewards differ; 0: all start at once"
    )
    max_tokens: int = Field(256, ge=1, le=1 << 22, description="longest response")
    temperature: float = Field(
        1.0, ge=0.0, le=TEMPERATURE_MAX, description="of sampling; 0: the likeliest token, else at least 0.01"
    )
    top_p: PositiveShare = Field(1.0, description="sample from the likeliest tokens of this total probability")
    top_k: int = Field(0, ge=0, lt=1 << 31, description="sample from so many likeliest tokens; 0: no limit")
    min_p: Share = Field(0.0, description="least probability of a token, as a share of the likeliest's")
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="of the logit of a token that has occurred")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="the same, for each time it has")
    repetition_penalty: float = Field(1.0, gt=0.0, le=2.0, description="factor of such a logit; 1: none")
    ignore_eos: bool = Field(False, description="go on after the end-of-sequence token, to the longest response")
    stop: tuple[StopString, ...] = Field(
        (), max_length=STOPS_MAX, description="texts that end a response: at most 16, of 1 to 128 characters each"
    )
    stop_token_ids: tuple[StopTokenId, ...] = Field(
        (), max_length=STOP_TOKENS_MAX, description="token ids that end a response: at most 64"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="every response's seed follows from this and its prompt id")
    reference_version: int = Field(0, ge=0, description="the frozen version a KL term refers to")

    @model_validator(mode="after")
    def _is_sampled_as_it_says(self) -> Self:
        if 0.0 < self.temperature < TEMPERATURE_MIN:  # an engine would raise it
            raise InvalidValue("rollout.temperature", self.temperature, f"0, or a number from {TEMPERATURE_MIN:g} on")
        return self

    @model_validator(mode="after")
    def _starts_some_at_once(self) -> Self:
        check_size_min(self.group_size_min, self.group_size, "rollout.group_size_min")
        return self


class CostConfig(Section):
    """Cost of one engine step (dora/core/forecast/cost.py defines the coefficients)."""

    kv_token_s: StepSeconds = Field(description="k1: a step's seconds for each cached token")
    weights_s: StepSeconds = Field(description="k2: a step's seconds to read the weights")
    request_s: StepSeconds = Field(description="k3: a step's seconds for each running request")
    step_s: StepSeconds = Field(description="k4: a step's other seconds")
    prefill_token_s: StepSeconds = Field(0.0, description="seconds for each prefilled token")
    copy_token_s: StepSeconds = Field(1e-5, description="seconds to copy a token's KV into a pool, or out of it")
    expert_fraction: float = Field(1.0, ge=1e-6, le=1.0, description="share of the experts one token reads; 1: dense")
    imbalance: float = Field(0.0, ge=0.0, le=1e4, description="extra k3 from uneven experts, times 1/sqrt(requests)")
    shared_fraction: Fraction = Field(0.0, description="share of the weights that every token reads")

    def check(self, place: str) -> None:
        """Raises InvalidValue if a step takes no time: no forecast would be possible, and a simulated engine would
        generate without end at one moment. ``place``: of this section.
        """
        if self.kv_token_s + self.weights_s + self.request_s + self.step_s <= 0.0:
            raise InvalidValue(f"{place}.step_s", self.step_s, "above 0 where k1, k2 and k3 are 0 too")


class DoraConfig(Section):
    """Settings of the strategy ``dora`` only."""

    hysteresis: Share = Field(0.6, description="share of a worker that a periodic change must be worth")
    level_gap: Count = Field(2, description="difference of requests between workers that is levelled, if it gains")


class BalanceConfig(Section):
    """Re-balancing and handoff."""

    policy: str = Field(DEFAULT_POLICY, description="strategy by name: see dora.core.policies")
    predictor: Literal["oracle", "statistics", "ranker"] = Field(
        "statistics", description="of response lengths; oracle: the simulator's, which knows them, and no service's"
    )
    cost: CostConfig | None = Field(None, description="of one engine's steps, as `dora profile` prints it")
    period_s: Period = Field(30.0, description="time between two periodic re-balancings")
    pressure: PositiveShare = Field(0.9, description="KV use above which a worker is relieved")
    handoff_timeout_s: Timeout = Field(30.0, description="after this a handoff is undone")
    moves_at_once: int = Field(64, ge=1, le=1 << 16, description="handoffs in flight")
    dora: DoraConfig = DoraConfig()

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.cost is not None:
            self.cost.check("balance.cost")
        return self


class WorkersConfig(Section):
    """The rollout workers: one process and one engine each."""

    count: int = Field(2, ge=0, le=1024, description="workers that the service starts itself")
    engine: Literal["vllm", "fake"] = Field("vllm", description="fake: no model, for tests of the service")
    launcher: str = Field(
        "processes", min_length=1, description="starts the workers: processes, or an entry point of dora.launchers"
    )
    device: str = Field(
        "cpu",
        min_length=1,
        description="cpu; cuda: all GPUs that the service sees, or some by number or UUID (cuda:0,1); of "
        "the service's own host",
    )
    gpus_for_trainer: int = Field(0, ge=0, le=64, description="GPUs, the last ones, that no worker gets")
    gpu_memory_utilisation: PositiveShare = Field(
        0.9, description="share of a GPU's memory for a worker's weights, activations and KV"
    )
    slots: int = Field(16, ge=1, le=4096, description="requests decoded at once")
    kv_tokens: int = Field(
        32768, ge=0, description="KV-cache of one worker, at least 64; 0, on GPUs: as many as fit into its memory"
    )
    block_tokens: int = Field(
        32, ge=0, description="KV block; a multiple of 32 on CPU; 0, on GPUs: the attention backend's own"
    )
    max_model_len_tokens: int = Field(
        0, ge=0, description="prompt and response together, at least 16; 0: the model's context, or kv_tokens if less"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of weights and KV; on GPUs the default is bfloat16"
    )
    batch_invariant: bool = Field(
        False,
        description="on GPUs: a request's logits do not depend on its neighbours (vLLM's mode, slower); on CPUs that "
        "needs threads = 1 and not this",
    )
    weights_from: Literal["file", "trainer"] = Field(
        "file",
        description="on GPUs: where engines on the trainer's host read a version: its file, or the trainer's memory, "
        "with the file as the fallback",
    )
    quantisation: Literal["", "int8"] = Field(
        "", description="int8: projections, quantised as each version is loaded; logprobs are the quantised model's own"
    )
    tensor_parallel: int = Field(1, ge=1, le=8, description="ranks that share each layer of an engine, each a process")
    pipeline_parallel: int = Field(1, ge=1, le=64, description="stages of an engine's layers, each of so many ranks")
    router_replay: bool = Field(
        False, description="trajectories say to which experts each token was sent, for trainers to do the same"
    )
    threads: int = Field(1, ge=1, le=256, description="CPU threads of one rank")
    report_period_ms: int = Field(
        50,
        ge=1,
        le=10000,
        description="time between two reports of a worker; of more than 12 workers longer, up to 1 s",
    )
    silence_timeout_s: Timeout = Field(60.0, description="a worker silent for so long is lost")
    load_timeout_s: Timeout = Field(
        60.0,
        description="a worker that takes longer to load a version is replaced; its silence does not count then; it is "
        "at least 30 s and 10 s for each GB of the weights",
    )
    stall_timeout_s: Seconds = Field(
        300.0,
        description="a worker that reports, but yields no token, is replaced after 30 of its longest gaps or twice its "
        "longest prefill; at least 30 s, at most this; 0: never",
    )
    start_timeout_s: Timeout = Field(300.0, description="a worker that has not answered by then has failed")
    orphan_timeout_s: Seconds = Field(
        300.0, description="a worker lives on for so long without a service that keeps its state; 0: it ends with it"
    )
    reattach_timeout_s: Seconds = Field(
        5.0, description="a service that starts again waits so long for workers that live on"
    )
    environment: tuple[VariableName, ...] = Field(
        (), description="variables of the surroundings that workers and pools get too; * stands for any text"
    )
    restarts: int = Field(
        16, ge=0, description="deaths of one worker within ten minutes after which it is not started again"
    )

    @model_validator(mode="before")
    @classmethod
    def _dtype_of_device(cls, values: Any) -> Any:
        on_gpus = isinstance(values, Mapping) and str(values.get("device", "")).startswith("cuda")
        return {"dtype": "bfloat16", **values} if on_gpus else values

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        on_gpus = self.device.startswith("cuda")
        if self.kv_tokens < KV_TOKENS_MIN and (self.kv_tokens or not on_gpus):
            allowed = f"at least {KV_TOKENS_MIN}, or 0 with workers.device = cuda"
            raise InvalidValue("workers.kv_tokens", self.kv_tokens, allowed)
        if not self.block_tokens and not on_gpus:
            raise InvalidValue("workers.block_tokens", 0, "at least 1, or 0 with workers.device = cuda")
        if 0 < self.max_model_len_tokens < CONTEXT_MIN:
            allowed = f"at least {CONTEXT_MIN}, or 0 for the model's"
            raise InvalidValue("workers.max_model_len_tokens", self.max_model_len_tokens, allowed)
        if self.weights_from == "trainer" and (self.engine == "fake" or (self.count and not on_gpus)):
            allowed = "file, or trainer with workers.engine = vllm on GPUs (workers.device = cuda); on CPUs engines map"
            raise InvalidValue("workers.weights_from", "trainer", f"{allowed} the trainer's own copy in shared memory")
        if self.batch_invariant and (self.engine == "fake" or (self.count and not on_gpus)):
            allowed = "false, or true with workers.engine = vllm on GPUs (workers.device = cuda); on CPUs logits do not"
            raise InvalidValue("workers.batch_invariant", True, f"{allowed} depend on neighbours with one thread")
        for name in ("tensor_parallel", "pipeline_parallel"):
            if self.engine == "fake" and getattr(self, name) > 1:
                raise InvalidValue(f"workers.{name}", getattr(self, name), "1 where workers.engine is fake")
        return self

    @property
    def context_tokens(self) -> int:
        """The limit of prompt and response together; before the model is known, the most possible."""
        return self.max_model_len_tokens or self.kv_tokens or CONTEXT_MAX

    @property
    def numerics(self) -> EngineNumerics:
        """The settings that decide how the engines round."""
        return EngineNumerics(self.quantisation, self.dtype, self.batch_invariant)

    @property
    def ranks(self) -> int:
        """The processes of one engine, each with a device of its own."""
        return self.tensor_parallel * self.pipeline_parallel


class KvConfig(Section):
    """The transport of KV snapshots between workers, and the KV tier that workers share."""

    transports: str = Field(
        "shm,tcp",
        pattern=r"^[a-z]+(,[a-z]+)*$",
        description="of shm, tcp, gloo, nccl, nixl, in order of preference, with commas; a faster later one is taken",
    )
    host: str = Field("", description="address at which workers are reached by others; empty: that towards the service")
    bandwidth_mb_per_s: float = Field(0.0, ge=0.0, le=1e6, description="cap on what one worker sends; 0: none")
    memory_mb: int = Field(1024, ge=16, le=1 << 20, description="snapshots in flight at one worker, each way")
    timeout_s: Timeout = Field(10.0, description="a peer that stops for so long has failed")
    tier: Literal["none", "lmcache"] = Field(
        "none", description="lmcache: a server of the service keeps KV that any worker of the version may find again"
    )
    tier_mb: int = Field(1024, ge=16, le=1 << 22, description="size of the tier, in shared memory")
    tier_python: str = Field("", description="Python of an environment that has LMCache; empty: the service's own")
    pool_mb: int = Field(2048, ge=0, le=1 << 24, description="host memory for parked requests; 0: none are parked")
    spill_mb: int = Field(0, ge=0, le=1 << 26, description="and behind it on a disk; 0: none")
    spill_folder: str = Field("", description="the folder on that disk")

    @model_validator(mode="after")
    def _spills_somewhere(self) -> Self:
        if self.spill_mb and not self.spill_folder:
            raise InvalidValue("kv.spill_folder", "", "a folder on a disk, where kv.spill_mb is above 0")
        return self


class ServiceConfig(Section):
    """Addresses, secrets and limits of the service."""

    listen: str = Field("127.0.0.1:7070", pattern=r"^.+:\d{1,5}$", description="host:port")
    metrics: str = Field(
        "",
        pattern=r"^(|.+:\d{1,5})$",
        description="host:port of the metrics for Prometheus, open to all who reach it; empty: none",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="lines of the log: text, or an object each with time, level, step, version, worker, ..."
    )
    traces: str = Field(
        "",
        pattern=r"^(|https?://.+)$",
        description="URL of an OpenTelemetry collector (OTLP over HTTP) that gets traces; empty: none",
    )
    traces_fraction: Share = Field(0.01, description="share of sessions that are traced; steps always are")
    token: str = Field(
        "", repr=False, description="the owner's; the roles' follow from it; empty: made at start and shown"
    )
    token_file: str = Field(
        "",
        description="file (mode 0600) with service.token, read again when it changes; empty: none",
    )
    token_overlap_s: Seconds = Field(
        600.0, description="how long the owner's earlier token, and those of roles, stay valid after it was replaced"
    )
    run_folder: str = Field("", description="shared memory of this service; empty: a new folder on tmpfs")
    state: str = Field("", description="folder for what must outlive a crash: a start carries on from it; empty: none")
    begin_from: str = Field(
        "",
        description="STATE@VERSION: a new run, whose version 0 is this version, or the checkpoint of this name, of the "
        "state folder STATE; empty: model",
    )
    carry_on_from: int = Field(
        -1,
        ge=-1,
        description="the step from which a start carries on although what belongs to the state has changed; -1: refuse",
    )
    keep_events: bool = Field(
        False, description="the log in service.state keeps all that the core decided on, for dora replay, and grows"
    )
    max_message_bytes: int = Field(64 << 20, ge=1 << 20, le=1 << 31, description="largest gRPC message")
    trainer_stall_timeout_s: Seconds = Field(
        1800.0,
        description="a trainer that is connected and, with a full step, commits nothing for 20 of its longest turns, "
        "and at least this, may be replaced without take_over; it is not ended; 0: never",
    )
    prompts_queued_max: int = Field(4096, ge=1, description="a full queue refuses prompts")
    drain_timeout_s: Seconds = Field(30.0, description="at the end a trainer has so long to commit what was admitted")
    weight_versions: int = Field(
        0,
        ge=0,
        description="versions that a host's weight store may hold; 0: window.size + 1, evaluation_versions, and the "
        "reference version",
    )
    evaluation_versions: int = Field(
        1,
        ge=0,
        le=8,
        description="versions that evaluations may keep, with their weights, after they have left the window; 0: an "
        "evaluation ends with its version",
    )
    tick_s: float = Field(0.5, gt=0.0, le=60.0, description="time between two looks at clocks and timeouts")

    @model_validator(mode="before")
    @classmethod
    def _event_log_is_gone(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and tree.get("event_log"):
            allowed = "left out: service.state names a folder, and with service.keep_events its log is for dora replay"
            raise InvalidValue("service.event_log", tree["event_log"], allowed, why="is no setting any more")
        return tree


class TlsConfig(Section):
    """TLS of every port of the service, its workers and its hosts: none of the files named, none."""

    folder: str = Field(
        "", description="folder with cert.pem, key.pem and ca.pem, read again when they change; empty: none"
    )
    cert: str = Field("", description="PEM file of this machine's certificate; empty: cert.pem in tls.folder")
    key: str = Field("", description="PEM file of its key; empty: key.pem in tls.folder")
    ca: str = Field("", description="PEM file of the authorities whose certificates count; empty: ca.pem in tls.folder")
    clients: Literal["certificate", "token"] = Field(
        "certificate",
        description="certificate: only clients with a certificate connect (mutual TLS); token: a token is enough",
    )
    domain: str = Field(
        "",
        description="SPIFFE trust domain, or DNS suffix, of certificates whose roles count; empty: any of tls.ca",
    )


class SessionsConfig(Section):
    """Time limits of sessions: responses of several turns, between which their tools run."""

    idle_timeout_s: Seconds = Field(600.0, description="longest wait for the next turn; 0: no limit")
    total_timeout_s: Seconds = Field(7200.0, description="longest time from a session's first turn on; 0: no limit")
    on_timeout: Literal["replace", "end"] = Field(
        "replace",
        description="replace: a new session of the same group begins; end: it ends with what it has, and no reward",
    )
    replacements: int = Field(
        2,
        ge=0,
        le=100,
        description="times that a session may be replaced; then it ends with what it has, and no reward",
    )
    forks: int = Field(64, ge=0, le=4096, description="times that a session may fork: each adds a branch at most")
    open_max: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="sessions that clients may have opened in groups that no step has trained on yet",
    )


class EnvironmentConfig(Section):
    """An environment that drives the sessions of all prompts of the source, in a process of its own."""

    spec: str = Field(
        "",
        pattern=r"^$|^[A-Za-z_][\w.-]*:[^\s:][^\s]*$",
        description="module:Class, gymnasium:ID, openenv:URL or verifiers:NAME; empty: none. Prompts that name one "
        "themselves keep it",
    )
    python: str = Field("", description="of verifiers:NAME: the interpreter of an environment that has verifiers")
    timeout_s: Timeout = Field(
        600.0,
        description="time that the code of one session may take in all, its start-up included; turns do not count",
    )
    turns: int = Field(
        0, ge=0, le=1 << 16, description="of a session, which then ends with the rewards of its turns; 0: no limit"
    )
    at_once: int = Field(256, ge=1, le=1 << 16, description="sessions of one process at a time; others wait")
    starting: int = Field(16, ge=1, le=1 << 16, description="sessions of one process that may start up at a time")
    warm: int = Field(
        0,
        ge=0,
        le=1 << 12,
        description="environments of one process that are prepared before a session needs them",
    )
    verdicts: int = Field(
        4096,
        ge=0,
        le=1 << 20,
        description="ends of conversations that one process keeps, of a class that says that it is deterministic",
    )
    memory_mb: int = Field(4096, ge=256, le=1 << 24, description="of one process, which is started again beyond it")
    open_files: int = Field(4096, ge=64, le=1 << 20, description="of one process")
    processes: int = Field(256, ge=1, le=1 << 16, description="that the environments of one process may have started")


class SelectionConfig(Section):
    """Groups that are started and not trained on: off by default, each recorded with its reason."""

    filter: str = Field(
        "",
        pattern=r"^(|equal_rewards|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="equal_rewards (scored groups that teach nothing are let go), module:function, or empty: none",
    )
    redundant_fraction: Share = Field(
        0.0, description="a step's slowest groups that finished later ones may replace; they are cancelled"
    )


class ColumnsConfig(Section):
    """The columns of a file with the fields of a prompt; empty: the field's own name."""

    prompt: str = Field("", description="a text (own names: `prompt`, `text`)")
    messages: str = Field("", description="a chat: a list of {role, content}")
    prompt_token_ids: str = Field("", description="token ids (own names: `prompt_token_ids`, `token_ids`)")
    prompt_id: str = Field("", description="a name that no other prompt has")
    task_id: str = Field("", description="the name of its kind, for the trainer")
    answer: str = Field("", description='what the reward function gets as verifier["answer"]')
    verifier: str = Field("", description="an object that the reward function gets")
    group_size: str = Field("", description="responses to it")
    group_size_min: str = Field("", description="responses that start at once, the rest once two rewards differ")
    sampling: str = Field("", description="an object of sampling parameters")
    priority: str = Field("", description="of prompts that wait, the highest goes first")
    environment: str = Field("", description="the environment that drives its responses, as sessions of several turns")


class PromptsConfig(Section):
    """The source of prompts. A text in place of the section is its ``source``."""

    source: str = Field(
        "reasoning-gym:chain_sum",
        min_length=1,
        description="reasoning-gym:TASK,..., counting, tiny, tiny-tail, tasks, a .jsonl or .parquet file, a dataset's "
        "folder, or none",
    )
    split: str = Field("", description="of a dataset with several, such as train; empty: it has one")
    columns: ColumnsConfig = ColumnsConfig()
    other_columns: Literal["refuse", "ignore", "verifier"] = Field(
        "refuse", description="columns that are no field of a prompt; verifier: the reward function gets them"
    )
    verifier_kb: int = Field(
        1024, ge=1, le=8192, description="largest `verifier` of a prompt, with its `answer`, as JSON, in KiB"
    )
    epochs: int = Field(1, ge=0, le=1 << 20, description="how often a file or dataset is gone through; 0: without end")
    shuffle: bool = Field(False, description="each epoch in an order of its own, which follows from shuffle_seed")
    shuffle_seed: int = Field(0, ge=0, lt=1 << 63, description="same seed, same orders")
    then: Literal["end", "wait"] = Field(
        "end", description="after the source's last prompt: the last step ends, or prompts over gRPC are waited for"
    )


class RewardConfig(Section):
    """The verifier: a plug-in ``module:function``, run in separate processes."""

    function: str = Field(
        "", pattern=r"^$|^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function; empty: the prompt source's own"
    )
    timeout_s: Timeout = Field(10.0, description="a verdict that takes longer counts as failed")
    workers: int = Field(1, ge=1, le=256, description="processes that score")
    queued_max: int = Field(8192, ge=1, description="responses that may wait for a verdict")
    environment: tuple[VariableName, ...] = Field(
        (), description="variables of the surroundings that functions get too, such as OPENAI_API_KEY"
    )
    memory_mb: int = Field(
        4096, ge=256, le=1 << 24, description="of a function's process, which is replaced if a call leaves 75% used"
    )
    open_files: int = Field(
        1024, ge=64, le=1 << 20, description="of a function's process, which is replaced if a call leaves 75% open"
    )
    processes: int = Field(256, ge=1, le=1 << 16, description="that a function may have started and left behind")
    calls_max: int = Field(0, ge=0, description="calls after which a function's process is replaced; 0: no limit")


class EvaluationConfig(Section):
    """Evaluations by the service itself: every N-th version on the same prompts, beside training."""

    prompts: str = Field(
        "", description="a .jsonl or .parquet file, or a dataset's folder, with the columns of `prompts`; empty: none"
    )
    split: str = Field("", description="of a dataset with several, such as test; empty: it has one")
    every: int = Field(0, ge=0, description="steps from one evaluated version to the next; 0: no evaluations")
    share: float = Field(
        0.0, ge=0.0, le=0.5, description="of the version's workers, kept for the evaluation; 0: only idle slots"
    )
    keep_best: bool = Field(
        False, description="the version of the highest mean reward is kept as checkpoint `best` in service.state"
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """Prompts and their period belong together, and nothing has an effect without them."""
        if self.prompts and not self.every:
            raise InvalidValue("evaluation.every", 0, "at least 1, because evaluation.prompts is set")
        for name in ("every", "split", "share", "keep_best") if not self.prompts else ():
            if value := getattr(self, name):
                raise InvalidValue(f"evaluation.{name}", value, "left out, or with evaluation.prompts")
        return self


class Config(Section):
    """Everything that ``dora serve`` needs."""

    model: str = Field("smollm2", min_length=1, description="smollm2, tiny, tiny-moe, or a Hugging Face folder")
    record: str = Field("", description="folder for delivered trajectories and published versions; empty: none")
    record_weights: str = Field(
        "all",
        pattern=r"^(all|none|every [1-9]\d{0,8})$",
        description="versions whose weights the record keeps: all, none, or every N; version 0 and the last two are "
        "always kept",
    )
    cache: str = Field("", description="folder for prepared models; empty: the user's cache folder")
    prompts: PromptsConfig = PromptsConfig()
    window: WindowConfig = WindowConfig()
    rollout: RolloutConfig = RolloutConfig()
    balance: BalanceConfig = BalanceConfig()
    workers: WorkersConfig = WorkersConfig()
    kv: KvConfig = KvConfig()
    service: ServiceConfig = ServiceConfig()
    tls: TlsConfig = TlsConfig()
    reward: RewardConfig = RewardConfig()
    sessions: SessionsConfig = SessionsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    selection: SelectionConfig = SelectionConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def evaluation_versions(self) -> int:
        """The number of versions that evaluations may keep beyond the window, within the bound of the weight stores."""
        most, kept = self.service.evaluation_versions, int(self.rollout.reference_version > 0)
        if not self.service.weight_versions:
            return most
        return max(0, min(most, self.service.weight_versions - self.window.most - 1 - kept))

    def live_versions(self, kept: int = 0) -> int:
        """The number of versions that a host may have to hold: the window's, the next one, and those of evaluations.

        ``kept``: versions of an earlier incarnation, whose window may have been wider.
        """
        return max(self.window.most, kept) + 1 + self.evaluation_versions

    @model_validator(mode="before")
    @classmethod
    def _source_alone(cls, tree: Any) -> Any:
        """Accepts ``prompts = "tiny"``, which older event logs have."""
        if isinstance(tree, Mapping) and isinstance(tree.get("prompts"), str):
            return {**tree, "prompts": {"source": tree["prompts"]}}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Otherwise no prompt of the source could be admitted."""
        longest = self.workers.context_tokens
        if self.rollout.max_tokens >= longest:
            name = "max_model_len_tokens" if self.workers.max_model_len_tokens else "kv_tokens"
            allowed = f"below workers.{name} {longest}, which holds the prompt too"
            raise InvalidValue("rollout.max_tokens", self.rollout.max_tokens, allowed)
        self.check_groups_per_step(self.window.groups_per_step, "window.groups_per_step")
        return self

    def check_groups_per_step(self, groups: int, field: str) -> None:
        """Raises InvalidValue for steps so large that the window would hold more requests than a service can."""
        size, group_size = self.window.most, self.rollout.group_size
        most = WINDOW_REQUESTS_MAX // (size * group_size)
        if groups > most:
            name = "window.max" if self.window.is_adaptive else "window.size"
            why = f"{WINDOW_REQUESTS_MAX:,} requests in {size} versions ({name}) of groups of {group_size}"
            raise InvalidValue(field, groups, f"at most {most}: {why} (rollout.group_size)")


def given(settings: Mapping[str, Setting | None]) -> list[Override]:
    """Returns settings by dotted names as overrides; None means not given and overrides nothing."""
    return [(key, value) for key, value in settings.items() if value is not None]


def load_config(file: Path | None = None, overrides: Iterable[Override] = ()) -> Config:
    """Reads ``file`` (TOML), applies ``overrides`` in order, validates. An override is a text or a pair from ``given``.

    Values in a text are TOML; text that is not TOML is a string. The dotted name of a list's element has its index,
    from 0.
    """
    tree = settings_tree(file, ())
    if isinstance(tree.get("prompts"), str):
        tree["prompts"] = {"source": tree["prompts"]}  # so that overrides find the section
    for override in overrides:
        key, value = _parsed(override) if isinstance(override, str) else override
        _apply(tree, "prompts.source" if key == "prompts" and isinstance(value, str) else key, value)
    return validated(tree)


def settings_tree(file: Path | None, overrides: Iterable[Override], option: str = "--config") -> dict[str, Any]:
    """Returns ``file`` (TOML) with the overrides applied, as one nested mapping, not yet validated.

    ``option`` is the command-line option that named the file; an unreadable file is an InvalidValue of it.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidValue(option, str(file), f"a readable TOML file ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise InvalidValue(option, str(file), f"TOML, which is UTF-8 text ({error})") from error
        except ValueError as error:  # also a whole number of more digits than Python reads
            raise InvalidValue(option, str(file), f"valid TOML ({error})") from error
    for override in overrides:
        _apply(tree, *(_parsed(override) if isinstance(override, str) else override))
    return tree


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` overridden by ``over``; sections present in both are merged field by field."""
    tree = dict(base)
    for key, value in over.items():
        below = tree.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        tree[key] = value
    return tree


def upgraded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration of an older DORA with the present names of settings and values."""
    new = dict(tree)
    for field, names in VALUES_RENAMED.items():
        value = value_at(new, field)
        if isinstance(value, str) and value in names:
            new = merged(new, tree_of(field, names[value]))
    for old, field in RENAMED.items():
        value = value_at(new, old)
        if value is not None:
            section, name = old.split(".")
            kept = {key: each for key, each in new[section].items() if key != name}
            new = merged({**new, section: kept}, tree_of(field, value))
    for old in REMOVED:
        section, name = old.split(".")
        if isinstance(new.get(section), Mapping):
            new[section] = {key: each for key, each in new[section].items() if key != name}
    return new


def value_at(tree: Mapping[str, Any], field: str) -> Any:
    """Returns the value of a dotted field; None if absent."""
    value: Any = tree
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def tree_of(field: str, value: Any) -> dict[str, Any]:
    """Returns ``{"a": {"b": value}}`` for ``"a.b"``."""
    for name in reversed(field.split(".")):
        value = {name: value}
    return value


def validated(tree: Mapping[str, Any]) -> Config:
    """Returns the Config of a nested mapping; raises InvalidValue for the first wrong field."""
    return validated_as(Config, tree)


def _parsed(override: str) -> tuple[str, Any]:
    """Splits ``section.field=value`` into the dotted name and the value."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise InvalidValue("--set", override, "section.field=value")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # also a whole number of more digits than Python reads
        return key.strip(), text


def _apply(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    node: Any = tree
    for section in sections:
        node = node[_index(node, section, key)] if isinstance(node, list) else node.setdefault(section, {})
        if not isinstance(node, dict | list):
            raise InvalidValue("--set", key, f"section.field=value; {section} is a field")
    node[_index(node, name, key) if isinstance(node, list) else name] = value


def _index(elements: Sequence[Any], name: str, key: str) -> int:
    """Returns the index that ``name`` gives, from 0."""
    if name not in map(str, range(len(elements))):
        raise InvalidValue("--set", key, f"the number of an element, below {len(elements)}, not {name}")
    return int(name)
