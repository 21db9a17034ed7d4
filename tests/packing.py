"""A prompt group of records as the packed group that a service sends."""

from dataclasses import replace
from typing import Final

import numpy as np

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.rpc import convert, packed
from dora.rpc import dora_pb2 as pb

_ALIKE: Final = (  # of all responses in a packed group
    *("prompt_id", "task_id", "group_size", "behaviour_version", "reference_version", "trained_step", "staleness"),
    "window_versions",
)


def pack(group: TrajectoryGroup) -> packed.PackedGroup | None:
    """The same group in columns; None where they would not say all of it."""
    first = group.trajectories[0] if group.trajectories else None
    if first is None or not all(_is_packable(each, first) for each in group.trajectories):
        return None
    contents = []
    for each in group.trajectories:
        tokens = np.empty(each.length_tokens, packed.TOKEN)
        tokens["token_id"], tokens["logprob"] = each.response_token_ids, each.logprobs
        contents.append(tokens.tobytes())
    members = group.trajectories
    message = pb.PackedGroup(
        group_id=group.group_id,
        prompt_id=first.prompt_id,
        task_id=first.task_id,
        group_size=first.group_size,
        behaviour_version=first.behaviour_version,
        reference_version=first.reference_version,
        trained_step=first.trained_step,
        window_versions=first.window_versions,
        prompt_token_ids=first.prompt_token_ids.astype("<i4").tobytes(),
        sampling=convert.sampling_to_wire(first.sampling),
        seeds=[each.sampling.seed for each in members],
        trajectory_ids=[each.trajectory_id for each in members],
        sample_indexes=[each.sample_index for each in members],
        length_tokens=[each.length_tokens for each in members],
        rewards=[each.reward for each in members],
        rewards_valid=[each.reward_valid for each in members],
        reward_components=packed.components_to_wire([each.reward_components for each in members]),
        verifier_logs=packed.texts_to_wire([each.verifier_log for each in members]),
        finish_reasons=[each.finish_reason for each in members],
        stop_reasons=packed.stop_reasons_to_wire([each.stop_reason for each in members]),
        started_at=[each.started_at for each in members],
        finished_at=[each.finished_at for each in members],
        segments=[len(each.worker_history) for each in members],
        worker_history=[convert.segment_to_wire(segment) for each in members for segment in each.worker_history],
    )
    return packed.PackedGroup(message, contents)


def _is_packable(each: Trajectory, first: Trajectory) -> bool:
    return (
        each.routed_experts is None
        and not each.events
        and bool((each.loss_mask == 1).all())
        and all(getattr(each, name) == getattr(first, name) for name in _ALIKE)
        and each.staleness == each.trained_step - each.behaviour_version
        and np.array_equal(each.prompt_token_ids, first.prompt_token_ids)
        and replace(each.sampling, seed=0) == replace(first.sampling, seed=0)
    )
