"""Reports a command's failure in its outcome."""

from dora.errors import (
    CanaryMismatch,
    Conflict,
    DoraError,
    InvalidValue,
    LayoutMisfit,
    NotFound,
    SnapshotRefused,
    TransferFailed,
)
from dora.kvtransfer.copying import NotMovable
from dora.rpc import dora_pb2 as pb


def fail(command: str | None, outcome: pb.WorkerOutcome, error: DoraError) -> None:
    outcome.ok, outcome.error, outcome.error_kind = False, str(error), _error_kind(command, error)
    if isinstance(error, CanaryMismatch):
        outcome.canary_difference = error.difference


def _error_kind(command: str | None, error: DoraError) -> str:
    """Returns the kind of a failure. ``weights`` means that the publication is at fault, not this worker; ``missing``,
    that the store of this host lacks it.
    """
    if command == "load_version" and isinstance(error, NotFound):
        return "missing"
    if command == "load_version" and isinstance(error, (InvalidValue, CanaryMismatch)):
        return "refused" if isinstance(error, Conflict) or _unreadable(error) else "weights"
    if isinstance(error, NotMovable | LayoutMisfit):
        return "not_movable"
    if isinstance(error, NotFound):
        return "unknown_request"
    if isinstance(error, (Conflict, SnapshotRefused, TransferFailed)):
        return "refused"
    return "invalid" if isinstance(error, InvalidValue) else "refused"


def _unreadable(error: DoraError) -> bool:
    return isinstance(error.__cause__, OSError)
