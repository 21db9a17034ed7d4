"""The commands of the core. The shell runs each; its outcome, if it has one, is exactly one event.

A command to a worker carries the worker's epoch and a ``command_id`` that its ``CommandDone`` repeats. An end of a
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
class GrowGroup:
    """The rewards of a group differ; these members, dormant so far, start."""

    group_id: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropPrompt:
    """Forget an offered prompt that was cancelled."""

    prompt_id: str


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Run the verifier on a finished response. Outcome: RequestScored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class BreakOffSession:
    """End a session that its environment has not ended. It has no valid reward. Outcome: RequestScored."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceRequest:
    """Forget the trajectory of a failed session; another one of the same group begins in its place."""

    request_id: str
    replacement_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Forget the trajectories of a cancelled group; record the reason."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeliverGroup:
    """Send a finished group to the trainer. If ``again``, an earlier stream of this step has delivered it."""

    group_id: str
    step: int
    trainer_epoch: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class CloseStep:
    """End the stream of a full step. If ``exhausted``, the step ends short because prompts ran out."""

    step: int
    trainer_epoch: int
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class ForgetGroup:
    """Forget a group that was trained on and committed."""

    group_id: str


@dataclass(frozen=True, slots=True)
class BeginEvaluationGroup:
    """Sample a prompt under its evaluation's version; make its trajectories."""

    evaluation_id: str
    group_id: str
    prompt_id: str
    version: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScoreEvaluated:
    """Score a response of an evaluation; no filter sees its group. Outcome: RequestScored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EndEvaluationGroup:
    """Give a fully scored group to the evaluation's caller, or the ``reason`` of its drop."""

    evaluation_id: str
    group_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EndEvaluation:
    """Forget an evaluation. ``reason`` says why it ends early, and is empty if it is done."""

    evaluation_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RetireVersion:
    """Delete a version's weights: no open or later group can be of it."""

    version: int


@dataclass(frozen=True, slots=True)
class PinVersion:
    """Keep the weights of a version that has left the window until its RetireVersion: an evaluation runs under it."""

    version: int


@dataclass(frozen=True, slots=True)
class ResizeWindow:
    """Admit groups for ``size`` versions from now on. Earlier groups keep their deadlines."""

    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class LapseLease:
    """Report that this trainer makes no progress: another one may attach unasked, until this one commits."""

    trainer_epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class RejectVersion:
    """Ask the trainer to publish a version again: these workers have refused its weights, and none has loaded it well.
    If it names no workers, no host has the version's weights.

    The trainer's stream ends with that. ``canary_difference`` is the largest of a logprob, or 0 if none was compared.
    Outcome: VersionRepublished.
    """

    version: int
    worker_ids: tuple[str, ...]
    reason: str
    canary_difference: float


@dataclass(frozen=True, slots=True)
class ReleaseSnapshot:
    """Release the KV snapshot of an ended handoff.

    The target was told to import or drop it, so a service has nothing to do. The simulator deletes its own copy, and
    detects snapshots that are released twice or never.
    """

    locator: str


@dataclass(frozen=True, slots=True)
class EvictWorker:
    """End a faulty worker (wrong version, failed or endless loads). Outcome: WorkerLost."""

    worker_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Let an empty, drained worker leave. Outcome: WorkerLost."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """Start the engine of an empty worker again, in full or in the configured precision. Outcome: WorkerLost."""

    worker_id: str
    epoch: int
    full_precision: bool


@dataclass(frozen=True, slots=True)
class FallBack:
    """Sample ``version`` and later ones in full precision: the mismatch that ``step`` has shown is too large."""

    version: int
    step: int
    mismatch: float  # nats a token


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
    """Begin a response, or resume it by re-prefilling its delivered tokens."""

    request_id: str
    version: int
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class ExtendRequest(WorkerCommand):
    """Continue a kept request with the environment tokens that its worker lacks. If the turn forks, it is cut first."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RemoveRequest(WorkerCommand):
    request_id: str


@dataclass(frozen=True, slots=True)
class ReserveSlot(WorkerCommand):
    """Handoff: ask the target to accept this request, and to keep a slot for it."""

    request_id: str
    version: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class CancelReservation(WorkerCommand):
    """Handoff undone: drop the reservation, and the request if it was already copied in."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CopyOut(WorkerCommand):
    """Handoff: copy the request to the target: full blocks while it decodes, the rest once it is frozen.

    The source keeps everything until Thaw or RemoveRequest.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class Park(CopyOut):
    """CopyOut to a pool, which then keeps the request until a worker has a slot for it."""


@dataclass(frozen=True, slots=True)
class Resume(CopyOut):
    """CopyOut from a pool to the worker that continues the request, or to another pool."""


@dataclass(frozen=True, slots=True)
class CopyIn(WorkerCommand):
    """Handoff: check the snapshot and continue the request; a pool stores it."""

    request_id: str
    version: int
    locator: str


@dataclass(frozen=True, slots=True)
class Thaw(WorkerCommand):
    """Handoff undone: the source continues the request."""

    request_id: str


Command = (
    DrawPrompts
    | AdmitGroup
    | GrowGroup
    | DropPrompt
    | ScoreRequest
    | BreakOffSession
    | ReplaceRequest
    | DropGroup
    | DeliverGroup
    | CloseStep
    | ForgetGroup
    | BeginEvaluationGroup
    | ScoreEvaluated
    | EndEvaluationGroup
    | EndEvaluation
    | RetireVersion
    | PinVersion
    | ResizeWindow
    | LapseLease
    | RejectVersion
    | ReleaseSnapshot
    | EvictWorker
    | StopWorker
    | RestartWorker
    | FallBack
    | LoadVersion
    | StartRequest
    | ExtendRequest
    | RemoveRequest
    | ReserveSlot
    | CancelReservation
    | CopyOut
    | Park
    | Resume
    | CopyIn
    | Thaw
)
