"""What the service tells a trainer when it attaches."""

import os
from dataclasses import dataclass
from pathlib import Path

from dora.rpc import dora_pb2 as pb
from dora.weights.reference import TensorHeader


@dataclass(frozen=True, slots=True)
class Attachment:
    """One trainer's lease on the service, until another attaches or the connection breaks."""

    epoch: int
    next_step: int  # the first step that is not committed; also the newest version
    groups_per_step: int
    window_versions: int  # staleness is at most window_versions - 1
    model: str  # the model folder on the service's host
    reference_version: int
    max_message_bytes: int  # 0: the service named no limit
    tensors: tuple[TensorHeader, ...]  # what published weights must hold
    store_folder: Path | None  # where weights may be written directly; None where the host is not shared


def attachment_of(reply: pb.AttachReply) -> Attachment:
    """Also finds out whether the service's host is shared, by reading its proof file: it blocks."""
    tensors = tuple(
        TensorHeader(tensor.name, tensor.dtype, tuple(tensor.shape), tensor.optional) for tensor in reply.tensors
    )
    return Attachment(
        epoch=reply.trainer_epoch,
        next_step=reply.next_step,
        groups_per_step=reply.groups_per_step,
        window_versions=reply.window_versions,
        model=reply.model,
        reference_version=reply.reference_version,
        max_message_bytes=reply.max_message_bytes,
        tensors=tensors,
        store_folder=Path(reply.store_folder) if _shares_host(reply) else None,
    )


def _shares_host(reply: pb.AttachReply) -> bool:
    if not (reply.store_folder and reply.store_proof and reply.store_proof_bytes):
        return False
    try:
        with Path(reply.store_proof).open("rb") as proof:
            same = proof.read(len(reply.store_proof_bytes) + 1) == reply.store_proof_bytes
    except OSError:  # another host, or another user's folder
        return False
    return same and os.access(Path(reply.store_folder) / "incoming", os.W_OK)
