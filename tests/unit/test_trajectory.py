"""The trajectory record: exact through JSON, and refused where it is misshapen."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.errors import InvalidValue
from dora.trajectory import EnvironmentEvent, Trajectory, TrajectoryGroup
from tests.contract.trainer_service import make_group, make_trajectory

ISSUE_KEYS = {
    *("trajectory_id", "group_id", "prompt_id", "task_id", "sample_index", "group_size"),
    *("behaviour_version", "reference_version", "trained_step", "staleness"),
    *("prompt_token_ids", "response_token_ids", "logprobs", "loss_mask", "sampling"),
    *("reward", "reward_components", "verifier_log", "finish_reason"),
    *("started_at", "finished_at", "worker_history", "length_tokens"),
}


def through_json(trajectory: Trajectory) -> Trajectory:
    return Trajectory.from_json_dict(json.loads(json.dumps(trajectory.to_json_dict(), allow_nan=False)))


@given(st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=20))
def test_logprobs_survive_json_bit_by_bit(logprobs: list[float]) -> None:
    tokens = len(logprobs)
    trajectory = make_trajectory(
        0,
        0,
        0,
        response_token_ids=list(range(tokens)),
        logprobs=np.array(logprobs, np.float32),
        loss_mask=[1] * tokens,
        length_tokens=tokens,
    )
    assert through_json(trajectory).logprobs.tobytes() == trajectory.logprobs.tobytes()


def test_every_field_survives_json_and_the_keys_are_the_documented_ones() -> None:
    event = EnvironmentEvent(2, "tool_call", "search", '{"q": 1}', 1.5)
    trajectory = make_trajectory(3, 1, 1, events=(event,), behaviour_version=2, staleness=1)
    record = trajectory.to_json_dict()
    assert set(record) == ISSUE_KEYS | {"reward_valid", "events"}
    assert record["worker_history"][0].keys() == {"worker", "first_token", "last_token", "arrival", "version"}
    again = through_json(trajectory)
    assert again.to_json_dict() == record
    assert again.sampling == trajectory.sampling and again.events == (event,)
    assert again.worker_history == trajectory.worker_history
    assert again.response_token_ids.dtype == np.int32 and again.loss_mask.dtype == np.uint8


def test_a_reward_that_is_no_number_is_null_in_json() -> None:
    trajectory = make_trajectory(0, 0, 0, reward=math.nan, reward_valid=False, reward_components={"a": math.inf})
    record = trajectory.to_json_dict()
    assert record["reward"] is None and record["reward_components"] == {"a": None}
    assert math.isnan(through_json(trajectory).reward)


def test_arrays_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        make_trajectory(0, 0, 0).logprobs[0] = 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [0.0]}, r"len\(logprobs\) = 1 .*that is 3"),
        ({"loss_mask": [1] * 4}, r"len\(loss_mask\) = 4"),
        ({"length_tokens": 9}, "length_tokens = 9"),
        ({"finish_reason": "tired"}, "finish_reason = 'tired'"),
        ({"response_token_ids": [0.5, 1.5, 2.5]}, "response_token_ids"),
        ({"response_token_ids": [[1, 2, 3]]}, "response_token_ids: dimensions = 2"),
        ({"response_token_ids": [1, 2, 1 << 40]}, "response_token_ids"),
    ],
)
def test_misshapen_values_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        make_trajectory(0, 0, 0, **changes)


def test_records_with_missing_or_unknown_keys_are_refused() -> None:
    record = make_trajectory(0, 0, 0).to_json_dict()
    with pytest.raises(InvalidValue, match="reward is missing: it must be in every record"):
        Trajectory.from_json_dict({key: value for key, value in record.items() if key != "reward"})
    with pytest.raises(InvalidValue, match="surplus"):
        Trajectory.from_json_dict({**record, "surplus": 1})
    with pytest.raises(InvalidValue, match="trajectory record"):
        Trajectory.from_json_dict({**record, "sampling": {"heat": 1}})


def test_group_arrays() -> None:
    group = make_group(0, 0, group_size=3)  # responses of 3, 4 and 5 tokens
    assert group.lengths.tolist() == [3, 4, 5]
    assert group.rewards.tolist() == [0.0, 1.0, 2.0] and group.rewards_valid.tolist() == [True] * 3
    assert group.versions.tolist() == group.staleness.tolist() == [0, 0, 0]
    assert group.tokens(pad=-1).tolist() == [[10, 11, 12, -1, -1], [10, 11, 12, 13, -1], [10, 11, 12, 13, 14]]
    assert group.loss_mask().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5]
    assert group.logprobs()[0].tolist() == [*group.trajectories[0].logprobs.tolist(), 0.0, 0.0]
    with pytest.raises(InvalidValue, match="group_id"):
        TrajectoryGroup("another", group.trajectories)


def test_a_reward_that_is_not_finite_is_never_valid() -> None:
    first, second = make_group(0, 0).trajectories
    group = TrajectoryGroup(first.group_id, (replace(first, reward=math.nan), replace(second, reward_valid=False)))
    assert group.rewards_valid.tolist() == [False, False]
