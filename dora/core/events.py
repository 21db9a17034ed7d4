"""The events of the core. Every event is plain data; ``Machine.handle`` takes one at a time.

``worker_epoch`` and ``trainer_epoch`` fence the past: an event of an ended epoch is acknowledged and ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from dora.core.commands import RejectVersion
from dora.data.types import FINISH_REASONS, FinishReason

Int32Column = NDArray[np.int32]
Uint8Column = NDArray[np.uint8]
Fault = Literal["session", "another", "prompt"]  # what a session fails for

NEWEST: Final = -1  # instead of a version: the newest that workers may load

# ------------------------------------------------------------------------------------------------- prompts and groups


@dataclass(frozen=True, slots=True)
class OfferedPrompt:
    """A prompt in the core's form.

    ``key`` names it over epochs (empty if it has no history), ``features`` describe its difficulty, and
    ``known_tokens`` are the lengths of its responses if known: from a simulator, or the user's own estimates. Prompts
    of the highest ``priority`` are admitted first.
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
    sessions: bool = False  # its responses are sessions: each may have several turns, and its environment ends it
    group_size_min: int = 0  # members that start at once; 0: all

    @property
    def at_once(self) -> int:
        """The number of members that start at the admission."""
        return self.group_size_min or self.group_size

    @property
    def begins_idle(self) -> bool:
        """Returns whether the first turn of each session waits for its environment, which gives the prompt."""
        return self.sessions and not self.prompt_tokens


@dataclass(frozen=True, slots=True)
class PromptsOffered:
    """The outcome of DrawPrompts: at most as many prompts as requested. If ``exhausted``, there will be no more."""

    prompts: tuple[OfferedPrompt, ...]
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class GroupRequested:
    """A caller asks for a group of this version: it is admitted at once, or refused."""

    prompt: OfferedPrompt
    version: int


@dataclass(frozen=True, slots=True)
class PromptCancelled:
    """A user cancels an offered prompt that is not admitted: nothing was promised of it."""

    prompt_id: str


@dataclass(frozen=True, slots=True)
class AdmissionEnded:
    """The service drains: nothing is admitted, and the last step may be short."""


@dataclass(frozen=True, slots=True)
class RequestScored:
    """The verifier has scored a finished request. ``reward`` counts if ``valid``."""

    request_id: str
    reward: float = 0.0
    valid: bool = False


NO_FORK: Final = -1  # TurnRequested.after_tokens


@dataclass(frozen=True, slots=True)
class TurnRequested:
    """An environment continues an idle session with ``tokens`` environment tokens.

    If the turn forks, ``after_tokens`` is their place within the response of some branch (otherwise -1), or they are
    the prompt of a branch of their own (``is_prompt``), which an idle session without a prompt needs first. If
    ``is_on_branch``, the place is on the session's present branch, so the turn can begin with that branch's KV.
    """

    request_id: str
    tokens: int
    after_tokens: int = NO_FORK
    is_prompt: bool = False
    is_on_branch: bool = False


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """An environment ends a session with what it has."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """The environment of a session has failed. The session is replaced, or ends if it was replaced too often.

    ``fault`` says whose it is. A replacement for the fault of ``another`` session does not count. If it is the
    ``prompt``, which no session survives, its group is cancelled.
    """

    request_id: str
    reason: str
    fault: Fault = "session"


@dataclass(frozen=True, slots=True)
class GroupCancelled:
    """A user, a filter or an impossible prompt ends an open group. Recorded with its reason."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EvaluationRequested:
    """Sample these prompts under ``version`` (with NEWEST the newest that workers may load), beside training.

    ``share`` of the slots and KV of each worker of that version is allotted to them. With 0 they use idle slots.
    """

    evaluation_id: str
    prompts: tuple[OfferedPrompt, ...]
    version: int = NEWEST
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluationCancelled:
    """The caller of an evaluation has cancelled it."""

    evaluation_id: str
    reason: str


# ------------------------------------------------------------------------------------------------------------ workers


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker joins. One of an earlier incarnation hosts a version and runs requests already.

    The core gives it those of ``requests`` that wait and are of that version; the worker is told to remove the rest.
    """

    worker_id: str
    epoch: int
    slots: int
    kv_tokens: int
    host: str = ""  # its name; empty: not known
    version: int = -1  # in its memory, as published now; -1: none
    requests: dict[str, int] = field(default_factory=dict)  # request id -> its response tokens
    full_precision: bool = False  # of its engine, although the configuration names a lower precision


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class TokensReported:
    """A worker's report by the core's rows: the lengths of responses, and those that ended.

    Each row comes once. ``Machine.owned`` marks the rows whose tokens count.
    """

    worker_id: str
    epoch: int
    version: int  # the weights that sampled these tokens
    rows: Int32Column  # (n,)
    tokens: Int32Column  # (n,), delivered response tokens in total
    ends: Uint8Column  # (n,), indexes of FINISH_REASONS: 0 while running
    waiting: int = 0
    kv_used_tokens: int = 0

    def __eq__(self, other: object) -> bool:
        mine, theirs = (each._values() if isinstance(each, TokensReported) else None for each in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[str | int | tuple[int, ...], ...]:
        columns = (tuple(column.tolist()) for column in (self.rows, self.tokens, self.ends))
        return self.worker_id, self.epoch, self.version, *columns, self.waiting, self.kv_used_tokens

    def by_name(self, request_id: Mapping[int, str]) -> "Progress":
        """The same by request ids; rows without a request are left out."""
        named = [(request_id[row], place) for place, row in enumerate(self.rows.tolist()) if row in request_id]
        reasons = ((name, FINISH_REASONS[int(self.ends[place])]) for name, place in named)
        return Progress(
            self.worker_id,
            self.epoch,
            self.version,
            {name: int(self.tokens[place]) for name, place in named},
            {name: reason for name, reason in reasons if reason is not None},
            self.waiting,
            self.kv_used_tokens,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """``TokensReported`` by request ids, for people and simulated workers."""

    worker_id: str
    epoch: int
    version: int  # the weights that sampled these tokens
    tokens: dict[str, int] = field(default_factory=dict)  # request id -> delivered response tokens in total
    finished: dict[str, FinishReason] = field(default_factory=dict)
    waiting: int = 0
    kv_used_tokens: int = 0

    def in_rows(self, request_row: Mapping[str, int]) -> TokensReported:
        """The same by rows: running requests, then finished ones. Ids without a row are left out."""
        names = [name for name in self.tokens if name not in self.finished and name in request_row]
        ended = [name for name in self.finished if name in request_row]
        ends = [FINISH_REASONS.index(self.finished[name]) for name in ended]
        names += ended
        return TokensReported(
            self.worker_id,
            self.epoch,
            self.version,
            np.array([request_row[name] for name in names], np.int32),
            np.array([self.tokens[name] for name in names], np.int32),
            np.array([0] * (len(names) - len(ended)) + ends, np.uint8),
            self.waiting,
            self.kv_used_tokens,
        )


@dataclass(frozen=True, slots=True)
class CommandDone:
    """The one outcome of a command to a worker, or to a pool."""

    worker_id: str  # or the pool's id
    epoch: int
    command_id: int
    ok: bool = True
    error: str = ""
    error_kind: str = ""  # refused | not_movable | unknown_request | invalid | weights | missing
    locator: str = ""  # CopyOut, Park, Resume: key of the snapshot
    tokens: int = 0  # of these: response tokens in the snapshot
    canary_difference: float = 0.0  # LoadVersion: largest of a logprob, if the canary was not reproduced


@dataclass(frozen=True, slots=True)
class CopyBegan:
    """The source of a handoff copies full blocks while the request decodes; the outcome of its CopyOut follows."""

    worker_id: str
    epoch: int
    command_id: int  # of the CopyOut, Park or Resume


# ---------------------------------------------------------------------------------------------------------- host tier


@dataclass(frozen=True, slots=True)
class HostJoined:
    """A host with a store of its own: its workers load only versions that have arrived there.

    ``versions`` are there already. This event precedes those of its workers. The host is new, or ``Restored`` has named
    it and its versions become known now.
    """

    host: str
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostDescribed:
    """Describes a host's machine: how fast its workers are is measured by kind, and KV that leaves its zone is slow.

    It may come before or after the host's workers, and again with other values. Undescribed hosts are of one kind, in
    the service's zone.
    """

    host: str
    kind: str = ""  # of machine, for example its GPU; hosts with the same one are equally fast
    zone: str = ""  # hosts of one zone reach each other well; empty: the service's
    kv_token_s: float = 0.0  # seconds to copy one token's KV into or out of the zone; 0: as within it
    latency_s: float = 0.0  # of such a copy, in addition


@dataclass(frozen=True, slots=True)
class HostLost:
    """The host is lost, with its workers and its pool; their losses are separate events."""

    host: str


@dataclass(frozen=True, slots=True)
class HostNoticed:
    """The host leaves ``within_s`` from now: its scheduler or an operator said so. Its workers and its pool drain.

    If they still hold something then, the host is lost at once. ``cause`` is for operators.
    """

    host: str
    within_s: float
    cause: str


@dataclass(frozen=True, slots=True)
class VersionArrived:
    """The host has the whole version, checked."""

    host: str  # empty: the service's own store, which lacked it
    version: int


@dataclass(frozen=True, slots=True)
class VersionUnavailable:
    """No host has the weights of this version: nobody can load it until it is published again."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class PoolJoined:
    """A pool of host memory, with its disk space: it holds parked requests of ``kv_tokens`` in total."""

    pool_id: str  # different from all worker ids
    epoch: int
    kv_tokens: int
    host: str = ""  # a request is parked on its own host if there is room
    requests: dict[str, int] = field(default_factory=dict)  # parked there before


@dataclass(frozen=True, slots=True)
class PoolLost:
    """A pool is lost: its parked requests are re-prefilled."""

    pool_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class PoolDropped:
    """A pool has dropped these requests' KV (memory and disk full, a damaged snapshot): they are re-prefilled."""

    pool_id: str
    epoch: int
    request_ids: tuple[str, ...]
    reason: str = ""


# ------------------------------------------------------------------------------------------------------------ trainer


@dataclass(frozen=True, slots=True)
class TrainerAttached:
    """A trainer became the active one. If ``groups_per_step`` is 0, the configured one applies."""

    trainer_epoch: int
    groups_per_step: int


@dataclass(frozen=True, slots=True)
class StepRequested:
    """The trainer opened the stream of ``step``."""

    trainer_epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The trainer has trained on ``step``; the weights of version ``step + 1`` are in the store.

    The other fields are its figures, below 0 if not given: for an adaptive window, and the engines' mismatch.
    """

    trainer_epoch: int
    step: int
    waited_s: float = -1.0  # its wait for groups
    clip_fraction: float = -1.0  # of the trained tokens
    effective_sample: float = -1.0  # 0 to 1
    movement: float = -1.0  # of the policy in the step, nats a token
    mismatch: float = -1.0  # of the engines, a lower bound (dora.data.mismatch.least_kl), nats a token


@dataclass(frozen=True, slots=True)
class VersionRepublished:
    """New weights of a rejected or unavailable version are in the store."""

    trainer_epoch: int
    version: int


# ------------------------------------------------------------------------------------------------------------ restart


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """An admitted group that is neither trained nor cancelled."""

    group_id: str
    prompt: OfferedPrompt
    version: int
    deadline: int  # the last step that may train on it, by the window at its admission
    age_s: float = 0.0  # since its admission
    rewards: tuple[float, ...] = ()  # State.undecided of a group with dormant members


@dataclass(frozen=True, slots=True, eq=False)
class RestoredRequests:
    """The requests of all groups, group by group, each in the order of its samples, as columns (n,) by response."""

    rows: Int32Column  # names in reports, all different
    tokens: Int32Column  # response tokens that the service has
    stages: Uint8Column  # 0: unfinished. 1: finished, verdict pending. 2: scored. 3: idle. 4: dormant. 5: skipped
    attempts: Uint8Column = field(default_factory=lambda: np.zeros(0, np.uint8))  # replacements before it; (0,): none
    given: Int32Column = field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # State.requests["input_tokens"]; (0,): none
    # of prompts that environments have given; 0: it has that of its group. (0,): all have
    own_prompts: Int32Column = field(default_factory=lambda: np.zeros(0, np.int32))

    def __eq__(self, other: object) -> bool:
        mine, theirs = (each._values() if isinstance(each, RestoredRequests) else None for each in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[tuple[int, ...], ...]:
        optional = (column if column.any() else column[:0] for column in (self.attempts, self.given, self.own_prompts))
        return tuple(tuple(column.tolist()) for column in (self.rows, self.tokens, self.stages, *optional))


@dataclass(frozen=True, slots=True)
class Restored:
    """The durable state of an earlier incarnation, and the reattached workers: a core's first event.

    ``newest`` is the newest version, ``step`` the one being filled, which takes ``left`` more groups.
    """

    newest: int
    step: int
    left: int
    groups_per_step: int  # 0: not set by a trainer
    window_versions: int  # the size in force
    retired: int  # lower versions were retired
    trainer_epoch: int
    groups_named: int  # the number in the next group's id
    commands_sent: int  # highest command id so far
    groups: tuple[RestoredGroup, ...]  # in the order of admission
    requests: RestoredRequests
    leased: tuple[str, ...] = ()  # groups of the uncommitted step, in the order of delivery
    finished: tuple[str, ...] = ()  # groups that wait for a step, in the order of finishing
    left_behind: int = 0  # lower versions had left the window when its size changed last
    short_step: int = -1  # the step that ended short because prompts ran out
    rejected: tuple[RejectVersion, ...] = ()  # versions that must be published again
    learnt: str = ""  # ``learning.learnt``, as of the last commit or later; empty: nothing
    counters: dict[str, int] = field(default_factory=dict)  # the durable ones of state.Counters
    hosts: tuple[HostJoined, ...] = ()  # with stores of their own, whose agents have not yet returned
    workers: tuple[WorkerJoined, ...] = ()
    pools: tuple[PoolJoined, ...] = ()


# --------------------------------------------------------------------------------------------------- time and operator


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: triggers and time limits are checked."""


@dataclass(frozen=True, slots=True)
class StorageChanged:
    """The writable storage has changed. ``fault`` lists the places that cannot be written, with reasons.

    Nothing is admitted during a fault. Admitted groups continue.
    """

    fault: str


@dataclass(frozen=True, slots=True)
class MigrationRequested:
    request_id: str
    target_worker: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Drain the worker and let it leave."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class RebalanceRequested:
    pass


Event = (
    PromptsOffered
    | GroupRequested
    | PromptCancelled
    | AdmissionEnded
    | RequestScored
    | TurnRequested
    | SessionEnded
    | SessionFailed
    | GroupCancelled
    | EvaluationRequested
    | EvaluationCancelled
    | WorkerJoined
    | WorkerLost
    | TokensReported
    | Progress
    | CommandDone
    | CopyBegan
    | HostJoined
    | HostDescribed
    | HostLost
    | HostNoticed
    | VersionArrived
    | VersionUnavailable
    | PoolJoined
    | PoolLost
    | PoolDropped
    | TrainerAttached
    | StepRequested
    | StepCommitted
    | VersionRepublished
    | Restored
    | Tick
    | StorageChanged
    | MigrationRequested
    | DrainRequested
    | RebalanceRequested
)
