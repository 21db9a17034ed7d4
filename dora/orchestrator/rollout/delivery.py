"""Turns finished responses into a trainer's messages. Tokens stay in the response buffer's own memory."""

from collections.abc import Sequence
from typing import Any

from dora.data.trajectory import TrajectoryGroup
from dora.orchestrator.rollout.response_state import VALUES, Lease, ResponseState
from dora.rpc.packed import PackedGroup, packed_message


def delivered(entries: Sequence[ResponseState], step: int, reference_version: int) -> TrajectoryGroup:
    """The finished responses of one prompt as the trainer gets them for ``step``."""
    first, lease = entries[0], Lease(step, reference_version)
    if first.routing is not None:  # rows of experts come in no columns
        return TrajectoryGroup(first.group_id, tuple(entry.trajectory(step, reference_version) for entry in entries))

    def values_of(name: str) -> list[Any]:
        value = VALUES[name]
        return [value(entry, lease) for entry in entries]

    return PackedGroup(packed_message(values_of), [entry.delivered for entry in entries])
