"""Turns finished responses into a trainer's messages. Tokens stay in the response buffer's own memory."""

from collections.abc import Sequence
from itertools import chain

from dora.data.trajectory import TrajectoryGroup
from dora.orchestrator.rollout.responses.branches import trajectories
from dora.orchestrator.rollout.responses.state import ResponseState, readers
from dora.rpc.packed import PackedGroup
from dora.rpc.packed_columns import packed_message


def delivered(responses: Sequence[ResponseState], step: int, reference_version: int) -> TrajectoryGroup:
    """Returns the finished responses of one prompt as the trainer of ``step`` gets them."""
    first, size = responses[0], len(responses)
    if (
        first.routing is not None or first.is_session
    ):  # rows of experts and environment tokens are not packed in columns
        each = (trajectories(response, step, reference_version, size) for response in responses)
        return TrajectoryGroup(first.group_id, tuple(chain.from_iterable(each)))
    read = readers(step, reference_version, size).__getitem__
    return PackedGroup(packed_message(responses, read), [response.delivered for response in responses])
