"""Settings of processes: workers, KV transport and pools, the service and its certificates."""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from dora.config.section import Section, VariableName
from dora.data.engine_args import check_owned
from dora.data.limits import (
    Latency,
    PositiveBytes,
    PositiveShare,
    Seconds,
    Share,
    Timeout,
)
from dora.data.types import EngineNumerics
from dora.errors import InvalidValue

CONTEXT_MIN: Final = 16
CONTEXT_MAX: Final = 1 << 22  # while neither the model's nor the KV-cache's is known
KV_TOKENS_MIN: Final = 64
KV_MB, KV_MB_MIN = 1024, 16
HISTORY_MB_MIN, HISTORY_MB_MAX = 1, 4096


class ClusterConfig(Section):
    """Hosts that join and leave by the service's advice (``dora cluster follow``)."""

    autoscale: Literal["off", "advise", "act"] = Field(
        "off",
        description="advise: the status says how many hosts make steps cost least; act: `dora cluster follow` asks the "
        "scheduler for them, and gives back those whose leaving costs least",
    )
    hosts_min: int = Field(0, ge=0, le=4096, description="beside the service's own host")
    hosts_max: int = Field(64, ge=0, le=4096, description="beside the service's own host")
    cooldown_s: Seconds = Field(300.0, description="from a change of the number of workers to the next advice")
    price: float = Field(
        0.05, ge=0.0, le=1000.0, description="of a host in a unit of time, where all but the joined hosts costs 1"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hosts_min > self.hosts_max:
            raise InvalidValue("cluster.hosts_min", self.hosts_min, f"at most cluster.hosts_max, {self.hosts_max}")
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
    slots: int = Field(
        16,
        ge=0,
        le=4096,
        description="requests decoded at once; 0, the default on GPUs: by GPU, model and rollout.max_tokens, 16 to 256",
    )
    kv_tokens: int = Field(
        32768, ge=0, description="KV-cache of one worker, at least 64; 0, the default on GPUs: as many as fit"
    )
    state_mb: int = Field(
        1024,
        ge=0,
        le=1 << 20,
        description="host memory of one worker for states to which sessions may return, where layers keep a state; the "
        "oldest goes first",
    )
    block_tokens: int = Field(
        32, ge=0, description="KV block; a multiple of 32 on CPU; 0, the default on GPUs: the attention backend's own"
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
    quantisation: Literal["", "int8", "fp8"] = Field(
        "",
        description="projections in int8, or in fp8 on GPUs, quantised as each version is loaded; logprobs are the "
        "quantised model's own",
    )
    kv_dtype: str = Field(
        "",
        pattern=r"^[a-z0-9_]*$",
        description="of KV, one of vLLM's (kv_cache_dtype), such as fp8; empty: workers.dtype",
    )
    mismatch_max: float = Field(
        0.1,
        ge=0.0,
        description="with workers.quantisation or workers.kv_dtype: if the trainer finds a larger KL divergence of a "
        "version's engines from its own policy, nats a token, later versions are sampled in full precision; 0: never",
    )
    speculation: str = Field(
        "off",
        pattern=r"^(off|history|ngram|model:.+)$",
        description="off, history (what the fleet sampled for the prompt, its group and its sessions' task), ngram "
        "(the request's own tokens) or model:DIR (a folder with a draft model): where drafts come from, which engines "
        "verify without changing a sample",
    )
    history_mb: int = Field(
        64,
        ge=HISTORY_MB_MIN,
        le=HISTORY_MB_MAX,
        description="history of one worker, with its index, in host memory, or KV of its draft model, on the device; "
        "the service's history too",
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
        description="time between two reports of a worker; of more than 12 workers longer, up to 4 s",
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
    engine_args: dict[str, Any] = Field(
        {},
        description="a table of vLLM's own arguments for its engines, such as enforce_eager or "
        "max_num_batched_tokens; those that DORA sets are refused by name",
    )
    environment: tuple[VariableName, ...] = Field(
        (), description="variables of the surroundings that workers and pools get too; * stands for any text"
    )
    restarts: int = Field(
        16, ge=0, description="deaths of one worker within ten minutes after which it is not started again"
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_device(cls, values: Any) -> Any:
        on_gpus = isinstance(values, Mapping) and str(values.get("device", "")).startswith("cuda")
        if not on_gpus:
            return values
        chosen = {} if values.get("engine") == "fake" else {"slots": 0, "kv_tokens": 0, "block_tokens": 0}
        return {"dtype": "bfloat16", **chosen, **values}

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        on_gpus = self.device.startswith("cuda")
        if self.kv_tokens < KV_TOKENS_MIN and (self.kv_tokens or not on_gpus):
            allowed = f"at least {KV_TOKENS_MIN}, or 0 with workers.device = cuda"
            raise InvalidValue("workers.kv_tokens", self.kv_tokens, allowed)
        check_owned(self.engine_args)
        if not self.slots and not on_gpus:
            raise InvalidValue("workers.slots", 0, "at least 1, or 0 with workers.device = cuda")
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
        if self.speculation != "off" and (self.engine == "fake" or self.pipeline_parallel > 1):
            allowed = "off, or another with workers.engine = vllm and workers.pipeline_parallel = 1"
            raise InvalidValue("workers.speculation", self.speculation, allowed)
        if self.quantisation == "fp8" and self.engine == "vllm" and self.count and not on_gpus:
            allowed = "empty or int8; fp8 needs GPUs of compute capability 8.9 or above (workers.device = cuda)"
            raise InvalidValue("workers.quantisation", "fp8", allowed)
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
        return EngineNumerics(self.quantisation, self.dtype, self.batch_invariant, self.kv_dtype)

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
    memory_mb: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="snapshots in flight at one worker, each way, at least 16; 0: 1024; on GPUs what a request of "
        "the longest context has, up to 8192",
    )
    timeout_s: Timeout = Field(10.0, description="a peer that stops for so long has failed")
    tier: Literal["none", "lmcache"] = Field(
        "none", description="lmcache: a server of the service keeps KV that any worker of the version may find again"
    )
    tier_mb: int = Field(1024, ge=16, le=1 << 22, description="size of the tier, in shared memory")
    tier_python: str = Field("", description="Python of an environment that has LMCache; empty: the service's own")
    pool_mb: int = Field(2048, ge=0, le=1 << 24, description="host memory for parked requests; 0: none are parked")
    spill_mb: int = Field(0, ge=0, le=1 << 26, description="and behind it on a disk; 0: none")
    spill_folder: str = Field("", description="the folder on that disk")

    @property
    def memory_bytes(self) -> int:
        """Memory for snapshots in flight at one worker, each way."""
        return (self.memory_mb or KV_MB) * 10**6

    @model_validator(mode="after")
    def _spills_somewhere(self) -> Self:
        if 0 < self.memory_mb < KV_MB_MIN:
            raise InvalidValue("kv.memory_mb", self.memory_mb, f"at least {KV_MB_MIN}, or 0")
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


class HostConfig(Section):
    """Machines that join (`dora host`)."""

    lease_s: Timeout = Field(
        4.0,
        description="a host is lost if it is silent for so long: agent, workers and pool; a silent agent alone counts "
        "by workers.silence_timeout_s",
    )
    notice_s: Timeout = Field(
        60.0,
        description="seconds from TERM, USR1 or Ctrl-C at a host until it ends: its requests leave meanwhile, with "
        "their KV; below the grace period of its scheduler",
    )
    zone_link_bytes_per_s: PositiveBytes = Field(
        125e6,
        description="bandwidth between zones (`dora host --zone`): KV crosses only if that is faster than its prefill; "
        "versions cross as deltas below 300 MB/s",
    )
    zone_link_latency_s: Latency = Field(0.05, description="time that a copy of KV between zones takes in addition")


class TlsConfig(Section):
    """TLS of every port of the service, its workers and its hosts. Without files there is none."""

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
