"""Packed groups: the same group as the readable form brings, and what is refused."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from dora.data.trajectory import Trajectory, TrajectoryGroup
from dora.data.types import EnvironmentEvent, SamplingParams, Segment
from dora.errors import InvalidValue
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import group_from_wire, trajectory_batches
from dora.rpc.errors import LimitExceeded
from dora.rpc.packed import PackedGroup, pack, packed_batches, packed_groups, split
from tests.contract.trainer_service import make_group, make_trajectory
from tests.refusals import refused

SAMPLING = SamplingParams(seed=7, stop_token_ids=(2,))


def packed(group: TrajectoryGroup) -> PackedGroup:
    found = pack(group)
    assert found is not None
    return found


def taken(*groups: TrajectoryGroup, **limits: int) -> list[TrajectoryGroup]:
    """The groups as a client gets them from the messages."""
    found: list[TrajectoryGroup] = []
    for message in packed_batches(7, groups, **limits):
        content = message if isinstance(message, bytes) else message.SerializeToString()
        batch, tokens = split(content)
        assert batch.step == 7
        found += packed_groups(batch, tokens)
        found += [group_from_wire(part) for part in batch.groups]
    return found


def values_of(trajectory: Trajectory) -> dict[str, Any]:
    values = {each.name: getattr(trajectory, each.name) for each in fields(Trajectory)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def various_group() -> TrajectoryGroup:
    segments = (Segment("w0", 0, 1, "new", 2), Segment("w1", 2, 2, "migrated", 2))
    common: dict[str, Any] = {"trained_step": 3, "staleness": 1, "behaviour_version": 2, "window_versions": 2}
    changes: list[dict[str, Any]] = [
        {"stop_reason": "</answer>", "worker_history": segments, "verifier_log": "short"},
        {
            "stop_reason": 2,
            "sampling": SamplingParams(seed=(1 << 63) - 1, stop_token_ids=(2,)),
            "reward_components": {},
        },
        {"finish_reason": "length", "reward_valid": False, "started_at": 5.5},
    ]
    members = [make_trajectory(2, 1, sample, 3, **common, **change) for sample, change in enumerate(changes)]
    return TrajectoryGroup("s2-g1", tuple(members))


@pytest.mark.parametrize("group", [make_group(0, 1, 4), various_group()], ids=["alike", "various"])
def test_a_packed_group_is_the_group_that_was_packed(group: TrajectoryGroup) -> None:
    (found,) = taken(packed(group))
    assert isinstance(found, PackedGroup)
    for name in ("group_id", "prompt_id"):
        assert getattr(found, name) == getattr(group, name)
    assert len(found) == len(group)
    for name in ("rewards", "rewards_valid", "versions", "staleness", "lengths", "prompt_token_ids"):
        one, other = getattr(found, name), getattr(group, name)
        assert one.dtype == other.dtype and one.tolist() == other.tolist(), name
    for one, other in ((found.tokens(9), group.tokens(9)), (found.logprobs(), group.logprobs())):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    assert found.loss_mask().tolist() == group.loss_mask().tolist() and found.loss_mask().dtype == np.uint8
    assert found.advantages().tolist() == group.advantages().tolist()
    assert repr(found) == repr(group)
    assert list(map(values_of, found.trajectories)) == list(map(values_of, group.trajectories))


def test_arrays_are_writable_and_new_with_each_access() -> None:
    (found,) = taken(packed(make_group(0, 1)))
    for read in (found.tokens, found.logprobs, found.loss_mask, lambda: found.rewards, lambda: found.prompt_token_ids):
        before = read().copy()
        read()[...] = 0
        assert np.array_equal(read(), before)
    member = found.trajectories[0]
    member.response_token_ids[:] = 0
    assert found.tokens()[0].any() and found.trajectories[0] is member


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda group: pickle.loads(pickle.dumps(group))])  # noqa: S301 - its own bytes
def test_a_copy_is_a_group_of_its_own(copied: Callable[[TrajectoryGroup], TrajectoryGroup]) -> None:
    (found,) = taken(packed(make_group(0, 1)))
    assert list(map(values_of, copied(found).trajectories)) == list(map(values_of, found.trajectories))


@pytest.mark.parametrize(
    "change",
    [
        {"loss_mask": [1, 0, 1]},
        {"events": (EnvironmentEvent(0, "tool_call", "python", "1", 1.0),)},
        {"task_id": "another"},
        {"staleness": 1},
        {"prompt_token_ids": [1, 3]},
        {"sampling": SamplingParams(temperature=0.5)},
        {"routed_experts": np.zeros((4, 2, 2), np.uint8)},
    ],
)
def test_what_columns_do_not_say_is_not_packed(change: dict[str, Any]) -> None:
    group = TrajectoryGroup("s0-g0", (make_trajectory(0, 0, 0, **change), make_trajectory(0, 0, 1)))
    assert pack(group) is None
    (found,) = taken(group)
    assert list(map(values_of, found.trajectories)) == list(map(values_of, group.trajectories))


def test_messages_hold_whole_groups_in_order_and_packed_ones_beside_others() -> None:
    groups = [make_group(7, number) for number in range(9)]
    given = [group if number % 4 == 3 else packed(group) for number, group in enumerate(groups)]
    assert [group.group_id for group in taken(*given)] == [group.group_id for group in groups]
    assert [group.group_id for group in taken(*given, batch_bytes=1)] == [group.group_id for group in groups]
    assert len(list(packed_batches(7, map(packed, groups)))) == 1


def test_a_group_too_large_for_a_message_comes_in_parts_as_before() -> None:
    group = make_group(7, 0, 4)
    limit_bytes = 500  # two of its four responses as messages of their own
    messages = list(packed_batches(7, [packed(group)], max_message_bytes=limit_bytes))
    assert messages == list(trajectory_batches(7, [group], max_message_bytes=limit_bytes)) and len(messages) > 1
    with pytest.raises(LimitExceeded):
        list(packed_batches(7, [packed(group)], max_message_bytes=100))


def test_a_message_is_what_protobuf_makes_of_it_wherever_its_tokens_are() -> None:
    (content,) = packed_batches(7, [packed(make_group(7, 0)), packed(make_group(7, 1))])
    assert isinstance(content, bytes)
    message = pb.TrajectoryBatch.FromString(content)
    assert len(message.tokens) == 8 * sum(sum(each.length_tokens) for each in message.packed)
    rest = pb.TrajectoryBatch.FromString(content)
    rest.ClearField("tokens")
    moved = pb.TrajectoryBatch(tokens=message.tokens).SerializeToString() + rest.SerializeToString()
    batch, tokens = split(moved)
    assert batch == rest and bytes(tokens) == message.tokens


def cut(message: pb.TrajectoryBatch, name: str) -> None:
    del getattr(message.packed[0], name)[-1]


@pytest.mark.parametrize(
    "name",
    [
        *("seeds", "sample_indexes", "rewards", "rewards_valid", "finish_reasons", "started_at", "finished_at"),
        *("segments", "worker_history", "length_tokens", "reward_components", "trajectory_ids"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(name: str) -> None:
    (content,) = packed_batches(7, [packed(make_group(7, 0))])
    message = pb.TrajectoryBatch.FromString(content if isinstance(content, bytes) else b"")
    cut(message, name)
    with pytest.raises(InvalidValue):
        packed_groups(*split(message.SerializeToString()))


def test_tokens_that_are_too_many_or_too_few_are_refused() -> None:
    (content,) = packed_batches(7, [packed(make_group(7, 0))])
    message = pb.TrajectoryBatch.FromString(content if isinstance(content, bytes) else b"")
    for tokens, field in (
        (message.tokens[:-1], "group s7-g0: tokens"),
        (message.tokens + b"12345678", "tokens: bytes"),
        (b"", "group s7-g0: tokens"),
    ):
        message.tokens = tokens
        with refused(InvalidValue, field=field):
            packed_groups(*split(message.SerializeToString()))


def test_no_bytes_whatever_do_more_than_raise() -> None:
    (content,) = packed_batches(7, [packed(various_group())])
    assert isinstance(content, bytes)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        damaged = bytearray(content[: rng.integers(len(content) + 1)])
        for place in rng.integers(0, max(1, len(damaged)), 3).tolist():
            damaged[place : place + 1] = bytes([int(rng.integers(256))])
        try:
            for group in packed_groups(*split(bytes(damaged))):
                assert len(group.tokens()) == len(group)
        except (DecodeError, InvalidValue):
            continue
