"""Turns finished responses into a trainer's messages. Tokens stay in the response buffer's own memory."""

import math
from collections.abc import Sequence

import numpy as np

from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Reward
from dora.orchestrator.rollout.response_state import ResponseState
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.packed import PackedGroup, components_to_wire, stop_reasons_to_wire, texts_to_wire


def delivered(entries: Sequence[ResponseState], step: int, reference_version: int) -> TrajectoryGroup:
    """Returns the finished responses of one prompt as the trainer of ``step`` gets them."""
    first = entries[0]
    if first.routing is not None:  # rows of experts are not packed in columns
        return TrajectoryGroup(first.group_id, tuple(entry.trajectory(step, reference_version) for entry in entries))
    rewards = [_reward(entry) for entry in entries]
    message = pb.PackedGroup(
        group_id=first.group_id,
        prompt_id=first.prompt.prompt_id,
        task_id=first.prompt.task_id,
        group_size=first.prompt.group_size,
        behaviour_version=first.version,
        reference_version=reference_version,
        trained_step=step,
        window_versions=first.window_versions,
        prompt_token_ids=np.asarray(first.prompt.token_ids, "<i4").tobytes(),
        sampling=convert.sampling_to_wire(first.sampling),
        seeds=[entry.sampling.seed for entry in entries],
        trajectory_ids=[entry.request_id for entry in entries],
        sample_indexes=[entry.sample_index for entry in entries],
        length_tokens=[len(entry) for entry in entries],
        rewards=[reward.value if reward.valid else math.nan for reward in rewards],
        rewards_valid=[reward.valid for reward in rewards],
        reward_components=components_to_wire([reward.components for reward in rewards]),
        verifier_logs=texts_to_wire([reward.log for reward in rewards]),
        finish_reasons=[entry.finish_reason or "" for entry in entries],
        stop_reasons=stop_reasons_to_wire([entry.stop_reason() for entry in entries]),
        started_at=[entry.started_at for entry in entries],
        finished_at=[entry.finished_at for entry in entries],
        segments=[len(entry.segment_starts) for entry in entries],
        worker_history=[segment for entry in entries for segment in _segments(entry)],
    )
    return PackedGroup(message, [entry.delivered for entry in entries])


def _segments(entry: ResponseState) -> list[pb.Segment]:
    """The wire form of ``ResponseState.worker_history``."""
    ends = [*(segment_start.first_token for segment_start in entry.segment_starts[1:]), len(entry)]
    return [
        pb.Segment(
            worker=segment_start.worker_id,
            first_token=segment_start.first_token,
            last_token=end - 1,
            arrival=segment_start.arrival,
            version=entry.version,
        )
        for segment_start, end in zip(entry.segment_starts, ends, strict=True)
    ]


def _reward(entry: ResponseState) -> Reward:
    assert entry.reward is not None and entry.finish_reason is not None, f"{entry.request_id} is not finished"
    return entry.reward
