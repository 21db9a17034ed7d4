"""The trajectory record: exact through JSON, and refused where it is misshapen."""

import json
import math
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora.data.trajectory import DECLARED, Trajectory, TrajectoryGroup
from dora.data.types import EnvironmentEvent
from dora.errors import Conflict, InvalidValue
from dora.rpc.convert import trajectory_from_wire, trajectory_to_wire
from tests.contract.trainer_service import make_group, make_trajectory
from tests.refusals import data_words, refused

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
    assert set(record) == set(DECLARED) and set(record) >= ISSUE_KEYS
    assert record["worker_history"][0].keys() == {"worker", "first_token", "last_token", "arrival", "version"}
    again = through_json(trajectory)
    assert again.to_json_dict() == record
    assert again.sampling == trajectory.sampling and again.events == (event,)
    assert again.worker_history == trajectory.worker_history
    assert again.response_token_ids.dtype == np.int32 and again.loss_mask.dtype == np.uint8


def test_what_ended_a_response_survives_json_and_is_unknown_of_earlier_records() -> None:
    for reason in ("END", 7, None):
        record = make_trajectory(0, 0, 0, stop_reason=reason).to_json_dict()
        assert Trajectory.from_json_dict(record).stop_reason == record["stop_reason"] == reason
    del record["stop_reason"], record["sampling"]["stop"]
    earlier = Trajectory.from_json_dict(record)
    assert earlier.stop_reason is None and earlier.sampling.stop == ()


def test_a_reward_that_is_no_number_is_null_in_json() -> None:
    trajectory = make_trajectory(0, 0, 0, reward=math.nan, reward_valid=False, reward_components={"a": math.inf})
    record = trajectory.to_json_dict()
    assert record["reward"] is None and record["reward_components"] == {"a": None}
    assert math.isnan(through_json(trajectory).reward)


def test_arrays_are_writable_and_nobody_elses() -> None:
    """Also those that came over the wire: torch warns of an array that cannot be written."""
    given = np.linspace(-0.1, -2.0, 3, dtype=np.float32)
    given.flags.writeable = False
    ours = make_trajectory(0, 0, 0, logprobs=given)
    received = trajectory_from_wire(trajectory_to_wire(ours))
    for trajectory in (ours, received):
        for name in ("prompt_token_ids", "response_token_ids", "logprobs", "loss_mask"):
            getattr(trajectory, name)[:] = 1
    assert given[0] == np.float32(-0.1)
    group = TrajectoryGroup(received.group_id, (received,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (received.logprobs, group.tokens(), group.rewards, group.advantages(), group.prompt_token_ids):
            torch.from_numpy(array)
    group.rewards[:] = 7.0
    group.prompt_token_ids[:] = 7
    assert group.rewards.tolist() == [0.0] and group.prompt_token_ids.tolist() == [1, 1]


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
    with refused(InvalidValue, names=data_words(message)):
        make_trajectory(0, 0, 0, **changes)


def test_groups_travel_between_the_ranks_of_a_trainer() -> None:
    """torch.distributed pickles what one rank gives to others; the connection behind a decoder cannot go with it."""
    trajectory = make_trajectory(0, 0, 0, decoder=lambda token_ids, special_tokens: "text")
    group = pickle.loads(pickle.dumps(TrajectoryGroup(trajectory.group_id, (trajectory,))))  # noqa: S301
    assert group.trajectories[0].to_json_dict() == trajectory.to_json_dict()
    assert group.trajectories[0].decoder is None and trajectory.text == "text"


def test_records_with_missing_or_unknown_keys_are_refused() -> None:
    record = make_trajectory(0, 0, 0).to_json_dict()
    with refused(InvalidValue, field="trajectory record: reward"):
        Trajectory.from_json_dict({key: value for key, value in record.items() if key != "reward"})
    with refused(InvalidValue, field="trajectory record: surplus", value=1):
        Trajectory.from_json_dict({**record, "surplus": 1})
    with refused(InvalidValue, field="trajectory record", value="s0-g0-0"):
        Trajectory.from_json_dict({**record, "sampling": {"heat": 1}})


def test_group_arrays() -> None:
    group = make_group(0, 0, group_size=3)  # responses of 3, 4 and 5 tokens
    assert group.lengths.tolist() == [3, 4, 5]
    assert group.rewards.tolist() == [0.0, 1.0, 2.0] and group.rewards_valid.tolist() == [True] * 3
    assert group.versions.tolist() == group.staleness.tolist() == [0, 0, 0]
    assert group.tokens(pad=-1).tolist() == [[10, 11, 12, -1, -1], [10, 11, 12, 13, -1], [10, 11, 12, 13, 14]]
    assert group.loss_mask().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5]
    assert group.logprobs()[0].tolist() == [*group.trajectories[0].logprobs.tolist(), 0.0, 0.0]
    with refused(InvalidValue, field="group another: group_id", value="s0-g0"):
        TrajectoryGroup("another", group.trajectories)


def test_a_reward_that_is_not_finite_is_never_valid() -> None:
    first, second = make_group(0, 0).trajectories
    group = TrajectoryGroup(first.group_id, (replace(first, reward=math.nan), replace(second, reward_valid=False)))
    assert group.rewards_valid.tolist() == [False, False]


def rewarded(*rewards: float | None) -> TrajectoryGroup:
    """A group with these rewards; None: not valid."""
    members = [
        replace(each, reward=9.0 if reward is None else reward, reward_valid=reward is not None)
        for each, reward in zip(make_group(0, 0, len(rewards)).trajectories, rewards, strict=True)
    ]
    return TrajectoryGroup("s0-g0", tuple(members))


@pytest.mark.parametrize(
    ("rewards", "normalized", "plain"),
    [
        # mean 5, deviations 3, 1, -1, -3: variance (9 + 1 + 1 + 9) / 4 = 5
        ((8.0, 6.0, 4.0, 2.0), (3 / 5**0.5, 1 / 5**0.5, -1 / 5**0.5, -3 / 5**0.5), (3.0, 1.0, -1.0, -3.0)),
        # one of four is right: mean 1/4, variance 3/16, so 3/4 and -1/4 over sqrt(3)/4
        ((1.0, 0.0, 0.0, 0.0), (3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)), (0.75, -0.25, -0.25, -0.25)),
        # what is not valid (here 9) counts for nothing, and has no advantage: mean 1/2, deviation 1/2
        ((1.0, None, 0.0), (1.0, 0.0, -1.0), (0.5, 0.0, -0.5)),
        ((math.nan, 1.0, 0.0), (0.0, 1.0, -1.0), (0.0, 0.5, -0.5)),
        ((0.3, 0.3, 0.3), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),  # equal rewards teach nothing
        ((0.3, 0.3, None), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        ((5.0, None), (0.0, 0.0), (0.0, 0.0)),  # one alone has nothing to be better than
        ((None, None), (0.0, 0.0), (0.0, 0.0)),
        ((), (), ()),
    ],
)
def test_advantages_by_hand(
    rewards: tuple[float | None, ...], normalized: tuple[float, ...], plain: tuple[float, ...]
) -> None:
    group = rewarded(*rewards)
    assert group.advantages().tolist() == pytest.approx(list(normalized), abs=1e-6)
    assert group.advantages(normalize=False).tolist() == pytest.approx(list(plain), abs=1e-6)
    assert group.advantages().dtype == np.float32


def test_reprs_are_one_short_line_without_arrays() -> None:
    long = make_trajectory(
        *(0, 0, 0),
        response_token_ids=list(range(5000)), logprobs=[-1.0] * 5000, loss_mask=[1] * 5000, length_tokens=5000,
    )  # fmt: skip
    assert repr(long) == "<Trajectory s0-g0-0: 5000 tokens, stop, reward 0, version 0>"
    assert repr(replace(long, reward_valid=False)).endswith("no valid reward, version 0>")
    group = repr(rewarded(1.0, 0.0, None))
    assert group == "<TrajectoryGroup s0-g0: 3 responses of 3 to 5 tokens, mean reward 0.5 of 2 valid, version 0>"
    assert "no valid reward" in repr(rewarded(None)) and "no responses" in repr(TrajectoryGroup("g", ()))


def test_texts_are_what_the_decoder_makes_of_the_ids() -> None:
    def decoder(token_ids: Sequence[int], special_tokens: bool) -> str:
        return f"{token_ids} {special_tokens}"

    trajectory = make_trajectory(0, 0, 0, decoder=decoder)
    group = TrajectoryGroup(trajectory.group_id, (trajectory,))
    assert trajectory.text == "[10, 11, 12] False" and group.prompt_text == "[1, 2] True"
    assert "decoder" not in trajectory.to_json_dict()
    with refused(Conflict, field="trajectory", value="s0-g0-0"):
        through_json(trajectory).text  # noqa: B018
