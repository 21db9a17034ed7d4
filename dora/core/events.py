"""What happens to the core. Every event is plain data; ``Machine.handle`` takes one at a time.

``worker_epoch`` and ``trainer_epoch`` fence the past: an event of an epoch that is over is acknowledged and ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dora.core.commands import RejectVersion
from dora.data.types import FINISH_REASONS, FinishReason

Int32Column = NDArray[np.int32]
Uint8Column = NDArray[np.uint8]

NEWEST: Final = -1  # in place of a version: the newest that workers may load

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


@dataclass(frozen=True, slots=True)
class EvaluationAsked:
    """These prompts are to be sampled under ``version`` (NEWEST: the newest that workers may load), beside training.

    ``share`` of the slots and KV of each worker of that version is lent to them; 0: they take what is idle.
    """

    evaluation_id: str
    prompts: tuple[OfferedPrompt, ...]
    version: int = NEWEST
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluationCancelled:
    """Who asked wants nothing more of it."""

    evaluation_id: str
    reason: str


# ------------------------------------------------------------------------------------------------------------ workers


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker comes, or comes back: one that has outlived the service hosts a version and runs requests already.

    Of ``requests`` the core takes over those that wait and are of that version; the worker is told to remove the rest.
    """

    worker_id: str
    epoch: int
    slots: int
    kv_tokens: int
    host: str = ""  # its name; empty: not known
    version: int = -1  # in its memory, as it is published now; -1: none
    requests: dict[str, int] = field(default_factory=dict)  # request id -> response tokens that the worker has of it


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class TokensReported:
    """A worker's report, by the rows of requests in the core: who moved on and how far, and who finished.

    Each row comes once. ``Machine.owned`` says of which of them tokens are taken over.
    """

    worker_id: str
    epoch: int
    version: int  # the weights that sampled these tokens
    rows: Int32Column  # (n,)
    tokens: Int32Column  # (n,), response tokens delivered in all
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
        """The same by the ids of requests, those rows left out that none has."""
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
    """``TokensReported`` by the ids of requests: as people read it, simulated workers say it, older logs have it."""

    worker_id: str
    epoch: int
    version: int  # the weights that sampled these tokens
    tokens: dict[str, int] = field(default_factory=dict)  # request id -> response tokens delivered in all
    finished: dict[str, FinishReason] = field(default_factory=dict)
    waiting: int = 0
    kv_used_tokens: int = 0

    def in_rows(self, request_row: Mapping[str, int]) -> TokensReported:
        """The same by rows: who goes on, then who finished, in that order. Ids that have no row are left out."""
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
class HostJoined:
    """A host that does not share the service's own store: its workers load what has arrived there, and nothing else.

    ``versions`` are there already. It comes before its workers do, and a host of this name is not there; or is one that
    ``Restored`` has named, and of which it is known only now what it holds.
    """

    host: str
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostLost:
    """It is gone, with its workers and its pool, whose losses are events of their own."""

    host: str


@dataclass(frozen=True, slots=True)
class VersionArrived:
    """The host holds the version now, whole and checked."""

    host: str  # empty: the service's own store, in which it was missing
    version: int


@dataclass(frozen=True, slots=True)
class VersionUnavailable:
    """No host has the weights of this version any more: nobody can load it until it is published anew."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class PoolJoined:
    """A pool of host memory, with what it may spill to disk: it holds parked requests of ``kv_tokens`` in all."""

    pool_id: str  # that no worker has
    epoch: int
    kv_tokens: int
    host: str = ""  # as of a worker: a request is parked on its own host, where there is room
    requests: dict[str, int] = field(default_factory=dict)  # parked there before, as of a worker


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
    """The trainer trained on ``step``; the weights of version ``step + 1`` lie in the store.

    What follows is what it says of the step, for an adaptive window; below 0: it does not say.
    """

    trainer_epoch: int
    step: int
    waited_s: float = -1.0  # it stood waiting for groups
    clip_fraction: float = -1.0  # of the trained tokens
    effective_sample: float = -1.0  # 0 to 1


@dataclass(frozen=True, slots=True)
class VersionRepublished:
    """Weights of a version that is rejected, or gone, lie in the store, in the place of those that nobody can load."""

    trainer_epoch: int
    version: int


# ------------------------------------------------------------------------------------------------------------ restart


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """An admitted group that was neither trained on nor cancelled."""

    group_id: str
    prompt: OfferedPrompt
    version: int
    deadline: int  # the last step that may train on it, by the window in force at its admission
    age_s: float = 0.0  # since that


@dataclass(frozen=True, slots=True, eq=False)
class RestoredRequests:
    """The requests of all groups, group by group, each in the order of its samples: one a response, columns (n,)."""

    rows: Int32Column  # by which reports name them, each another one
    tokens: Int32Column  # response tokens that the service has
    stages: Uint8Column  # 0: unfinished. 1: finished, and its verdict is due. 2: scored

    def __eq__(self, other: object) -> bool:
        mine, theirs = (each._values() if isinstance(each, RestoredRequests) else None for each in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(column.tolist()) for column in (self.rows, self.tokens, self.stages))


@dataclass(frozen=True, slots=True)
class Restored:
    """What a service that starts again has kept of its earlier life, and who has outlived it: a core's first event.

    ``newest`` is the newest version, ``step`` the one being filled, which takes ``left`` more groups.
    """

    newest: int
    step: int
    left: int
    groups_per_step: int  # 0: no trainer has said
    window_versions: int  # the size in force
    retired: int  # versions below were let go
    trainer_epoch: int
    groups_named: int  # the number in the next group's id
    commands_sent: int  # no command before has had a higher id
    groups: tuple[RestoredGroup, ...]  # as they were admitted
    requests: RestoredRequests
    leased: tuple[str, ...] = ()  # groups of the step that is not committed, as they were delivered
    finished: tuple[str, ...] = ()  # groups that wait for a step, as they were finished
    left_behind: int = 0  # versions below had left the window when its size changed last
    short_step: int = -1  # the step that ended short, as prompts had run out
    rejected: tuple[RejectVersion, ...] = ()  # versions that are to be published anew
    learnt: str = ""  # ``restoring.learnt``, as of the last commit or later; empty: nothing
    counters: dict[str, int] = field(default_factory=dict)  # of state.Counters, those that are kept
    hosts: tuple[HostJoined, ...] = ()  # with stores of their own, whose agents have yet to come back
    workers: tuple[WorkerJoined, ...] = ()
    pools: tuple[PoolJoined, ...] = ()


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
    | EvaluationAsked
    | EvaluationCancelled
    | WorkerJoined
    | WorkerLost
    | TokensReported
    | Progress
    | CommandDone
    | CopyBegan
    | HostJoined
    | HostLost
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
    | MigrateAsked
    | DrainAsked
    | RebalanceAsked
)
