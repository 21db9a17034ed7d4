"""What happens to the core. Every event is plain data; ``Machine.handle`` takes one at a time.

``worker_epoch`` and ``trainer_epoch`` fence the past: an event of an epoch that is over is acknowledged and ignored.
"""

from dataclasses import dataclass, field

from dora.types import FinishReason

# ------------------------------------------------------------------------------------------------- prompts and groups


@dataclass(frozen=True, slots=True)
class OfferedPrompt:
    """A prompt as the core needs to know it.

    ``key`` names it over epochs (empty: it has no history), ``features`` is what it shows of its difficulty, and
    ``known_tokens`` the lengths of its responses where somebody knows them: a simulator, or the user's own estimates.
    Of the prompts on offer those of the highest ``priority`` are admitted first.
    """

    prompt_id: str
    task_id: str
    prompt_tokens: int
    group_size: int
    max_tokens: int
    key: str = ""
    features: tuple[float, ...] = ()
    known_tokens: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PromptsOffered:
    """The answer to DrawPrompts: at most as many prompts as were asked for; ``exhausted``: there will be no more."""

    prompts: tuple[OfferedPrompt, ...]
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class PromptCancelled:
    """A user takes a prompt back that was offered and not admitted: nothing was promised of it."""

    prompt_id: str


@dataclass(frozen=True, slots=True)
class AdmissionEnded:
    """The service drains: nothing more is admitted, and the last step may be short."""


@dataclass(frozen=True, slots=True)
class RequestScored:
    """The verifier has judged a finished request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class GroupCancelled:
    """A user, a filter or an impossible prompt ends an open group. Recorded with its reason; never silent."""

    group_id: str
    reason: str


# ------------------------------------------------------------------------------------------------------------ workers


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker_id: str
    epoch: int
    slots: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker's report: response tokens delivered so far of each request that moved on, and who finished."""

    worker_id: str
    epoch: int
    version: int  # the weights that sampled these tokens
    tokens: dict[str, int] = field(default_factory=dict)  # request id -> response tokens delivered in all
    finished: dict[str, FinishReason] = field(default_factory=dict)
    waiting: int = 0
    kv_used_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CommandDone:
    """The one outcome of a command to a worker, or to a pool."""

    worker_id: str  # or the pool's id
    epoch: int
    command_id: int
    ok: bool = True
    error: str = ""
    error_kind: str = ""  # refused | not_movable | unknown_request | invalid | weights
    locator: str = ""  # CopyOut, Park, Resume: where the snapshot lies
    tokens: int = 0  # the same: response tokens in the snapshot
    canary_difference: float = 0.0  # LoadVersion: largest of a logprob, where the canary was not reproduced


@dataclass(frozen=True, slots=True)
class CopyBegan:
    """The source of a handoff copies full blocks while the request decodes; the outcome of its CopyOut follows."""

    worker_id: str
    epoch: int
    command_id: int  # of the CopyOut, Park or Resume


# ---------------------------------------------------------------------------------------------------------- host tier


@dataclass(frozen=True, slots=True)
class PoolJoined:
    """A pool of host memory, with what it may spill to disk: it holds parked requests of ``kv_tokens`` in all."""

    pool_id: str  # that no worker has
    epoch: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class PoolLost:
    """A pool is gone with all that it held: what was parked there is re-prefilled."""

    pool_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class PoolDropped:
    """A pool has lost the KV of these requests (memory and disk are full, a snapshot is damaged): re-prefill them."""

    pool_id: str
    epoch: int
    request_ids: tuple[str, ...]
    reason: str = ""


# ------------------------------------------------------------------------------------------------------------ trainer


@dataclass(frozen=True, slots=True)
class TrainerAttached:
    """A trainer became the active one; ``groups_per_step`` 0 takes what is set."""

    trainer_epoch: int
    groups_per_step: int


@dataclass(frozen=True, slots=True)
class StepRequested:
    """The trainer opened the stream of ``step``."""

    trainer_epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The trainer trained on ``step``; the weights of version ``step + 1`` lie in the store."""

    trainer_epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class VersionRepublished:
    """Other weights of a rejected version lie in the store, in the place of those that workers refused."""

    trainer_epoch: int
    version: int


# --------------------------------------------------------------------------------------------------- time and operator


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: triggers and time limits are looked at."""


@dataclass(frozen=True, slots=True)
class StorageChanged:
    """Where the service can write has changed. ``fault`` says where it cannot, and why; empty: it can everywhere.

    While there is a fault nothing is admitted. What was admitted goes on.
    """

    fault: str


@dataclass(frozen=True, slots=True)
class MigrateAsked:
    request_id: str
    target_worker: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Empty the worker and let it leave."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class RebalanceAsked:
    pass


Event = (
    PromptsOffered
    | PromptCancelled
    | AdmissionEnded
    | RequestScored
    | GroupCancelled
    | WorkerJoined
    | WorkerLost
    | Progress
    | CommandDone
    | CopyBegan
    | PoolJoined
    | PoolLost
    | PoolDropped
    | TrainerAttached
    | StepRequested
    | StepCommitted
    | VersionRepublished
    | Tick
    | StorageChanged
    | MigrateAsked
    | DrainAsked
    | RebalanceAsked
)
