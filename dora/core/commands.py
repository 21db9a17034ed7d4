"""What the core wants done. The shell runs each command; its outcome, where it has one, is exactly one event.

Commands to a worker carry that worker's epoch and a ``command_id`` that their ``CommandDone`` repeats. An end of a
handoff may be a pool: it gets the same commands, with its id and epoch.
"""

from dataclasses import dataclass

from dora.data.types import Arrival


@dataclass(frozen=True, slots=True)
class DrawPrompts:
    """Ask the prompt source for at most ``count`` prompts. Outcome: PromptsOffered."""

    count: int


@dataclass(frozen=True, slots=True)
class AdmitGroup:
    """A prompt became a group of ``version``; make its trajectories."""

    group_id: str
    prompt_id: str
    version: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropPrompt:
    """A prompt on offer was taken back: forget it."""

    prompt_id: str


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Run the verifier on a finished response. Outcome: RequestScored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """A group was cancelled: forget its trajectories, record the reason."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeliverGroup:
    """Send a finished group to the trainer; ``again``: it was sent to an earlier stream of this step."""

    group_id: str
    step: int
    trainer_epoch: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class CloseStep:
    """The step has all its groups: end its stream. ``exhausted``: it ends short because prompts ran out."""

    step: int
    trainer_epoch: int
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class ForgetGroup:
    """A group was trained on and committed: its record may go."""

    group_id: str


@dataclass(frozen=True, slots=True)
class BeginEvaluationGroup:
    """A prompt of an evaluation is sampled under the evaluation's version; make its trajectories."""

    evaluation_id: str
    group_id: str
    prompt_id: str
    version: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScoreEvaluated:
    """The same for a response of an evaluation, whose group no filter sees."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EndEvaluationGroup:
    """All responses of the group are scored: give it to who asked. ``reason``: why it was let go instead."""

    evaluation_id: str
    group_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EndEvaluation:
    """Nothing more comes of it; forget what was begun. ``reason``: why it ends before it is done; empty: it is done."""

    evaluation_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RetireVersion:
    """No open or later group can be of this version: its weights may go."""

    version: int


@dataclass(frozen=True, slots=True)
class ResizeWindow:
    """From here on groups are admitted for ``size`` versions. Those admitted before keep their deadlines."""

    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class RejectVersion:
    """No worker has loaded this version well and these have refused its weights: its trainer must publish it anew.
    Without workers: its weights are gone.

    The trainer's stream ends with that. ``canary_difference``: the largest of a logprob; 0 where none was compared.
    Outcome: VersionRepublished.
    """

    version: int
    worker_ids: tuple[str, ...]
    reason: str
    canary_difference: float


@dataclass(frozen=True, slots=True)
class ReleaseSnapshot:
    """A handoff is over: nobody has a use for its KV snapshot any more.

    The target was told to take it in or to drop it, so a service has nothing left to do. The simulator deletes its own
    copy, and finds what was released twice or never.
    """

    locator: str


@dataclass(frozen=True, slots=True)
class EvictWorker:
    """The worker cannot be trusted any more (wrong version, failed or endless loads): end it. Outcome: WorkerLost."""

    worker_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """A drained worker is empty: let it leave. Outcome: WorkerLost."""

    worker_id: str
    epoch: int


# ------------------------------------------------------------------------------ to a worker; outcome: one CommandDone


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    worker_id: str  # or a pool's id
    epoch: int
    command_id: int


@dataclass(frozen=True, slots=True)
class LoadVersion(WorkerCommand):
    version: int


@dataclass(frozen=True, slots=True)
class StartRequest(WorkerCommand):
    """Begin a response, or resume it after its delivered tokens by re-prefilling them."""

    request_id: str
    version: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class RemoveRequest(WorkerCommand):
    request_id: str


@dataclass(frozen=True, slots=True)
class ReserveSlot(WorkerCommand):
    """Handoff: does the target take this request? If so, it keeps a slot for it."""

    request_id: str
    version: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class CancelReservation(WorkerCommand):
    """Handoff undone: drop the reservation, and the request if it was already copied in."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CopyOut(WorkerCommand):
    """Handoff: copy the request to the target, full blocks while it decodes and the rest once it is frozen.

    The source keeps everything until told.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class Park(CopyOut):
    """CopyOut to a pool, which then keeps the request until a worker has a slot for it."""


@dataclass(frozen=True, slots=True)
class Resume(CopyOut):
    """CopyOut from a pool, to the worker that is to go on with the request."""


@dataclass(frozen=True, slots=True)
class CopyIn(WorkerCommand):
    """Handoff: check the snapshot and go on with the request; a pool keeps it."""

    request_id: str
    version: int
    locator: str


@dataclass(frozen=True, slots=True)
class Thaw(WorkerCommand):
    """Handoff undone: the source goes on as if nothing had happened."""

    request_id: str


Command = (
    DrawPrompts
    | AdmitGroup
    | DropPrompt
    | ScoreRequest
    | DropGroup
    | DeliverGroup
    | CloseStep
    | ForgetGroup
    | BeginEvaluationGroup
    | ScoreEvaluated
    | EndEvaluationGroup
    | EndEvaluation
    | RetireVersion
    | ResizeWindow
    | RejectVersion
    | ReleaseSnapshot
    | EvictWorker
    | StopWorker
    | LoadVersion
    | StartRequest
    | RemoveRequest
    | ReserveSlot
    | CancelReservation
    | CopyOut
    | Park
    | Resume
    | CopyIn
    | Thaw
)
