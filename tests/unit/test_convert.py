"""Wire messages and types: round trips, little-endian bytes, and what is refused. Errors through a real status too."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from dora.config import validated
from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Canary, EngineCapability, EnvironmentEvent, Prompt, RequestSpec, SamplingParams
from dora.data.verdict import LOG_MAX_BYTES
from dora.errors import CanaryMismatch, Conflict, DoraError, InvalidValue, NotFound, VersionRejected
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.rpc import dora_pb2 as pb
from dora.rpc.channel import open_channel
from dora.rpc.convert import (
    canary_from_wire,
    canary_to_wire,
    capability_from_wire,
    group_from_wire,
    hello_to_wire,
    prompt_to_wire,
    request_from_wire,
    request_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    trajectory_batches,
    trajectory_bytes_most,
    trajectory_from_wire,
    trajectory_to_wire,
)
from dora.rpc.errors import (
    CallFailed,
    LimitExceeded,
    NoAnswer,
    PermissionDenied,
    ServiceUnavailable,
    Unauthenticated,
    abort,
    from_rpc_error,
)
from dora.rpc.proven import Prover
from dora.rpc.roles import ServiceTokens
from tests.contract.trainer_service import make_group, make_trajectory
from tests.refusals import data_words, refused

SAMPLING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=(1 << 63) - 1,
    max_tokens=33,
    min_tokens=2,
    presence_penalty=0.1,
    frequency_penalty=-0.2,
    repetition_penalty=1.3,
    stop_token_ids=(2, 7),
    ignore_eos=True,
    stop=("\n\n", "</answer> é"),
)


def whole_message(group: TrajectoryGroup) -> pb.TrajectoryGroup:
    ((message,),) = (batch.groups for batch in trajectory_batches(0, [group]))
    return message


LOGPROBS = tuple(np.array([-0.1, -2.5, -1e-7], np.float32).tolist())


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def test_sampling_keeps_every_field() -> None:
    assert sampling_from_wire(over_the_wire(sampling_to_wire(SAMPLING))) == SAMPLING


def test_a_trajectory_keeps_every_field() -> None:
    event = EnvironmentEvent(1, "observation", "game", "you lose", 3.0)
    trajectory = make_trajectory(4, 1, 1, sampling=SAMPLING, events=(event,), verifier_log="näh", reward_valid=False)
    again = trajectory_from_wire(over_the_wire(trajectory_to_wire(trajectory)))
    assert again.to_json_dict() == trajectory.to_json_dict()
    assert again.logprobs.tobytes() == trajectory.logprobs.tobytes()
    for reason in (None, 0, 7, "END"):
        trajectory = make_trajectory(4, 1, 1, stop_reason=reason)
        assert trajectory_from_wire(over_the_wire(trajectory_to_wire(trajectory))).stop_reason == reason


def test_arrays_travel_as_little_endian_bytes() -> None:
    message = trajectory_to_wire(make_trajectory(0, 0, 0, prompt_token_ids=[1, 258]))
    assert message.prompt_token_ids == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert len(message.logprobs) == 3 * 4 and len(message.loss_mask) == 3


def test_a_group_keeps_its_order() -> None:
    group = make_group(2, 5, group_size=4)
    again = group_from_wire(over_the_wire(whole_message(group)))
    assert [each.trajectory_id for each in again.trajectories] == [each.trajectory_id for each in group.trajectories]


def test_requests_prompts_canaries_and_capabilities_round_trip() -> None:
    request = RequestSpec("r", 3, (1, 2), SAMPLING, (4, 5, 6), LOGPROBS)
    assert request_from_wire(over_the_wire(request_to_wire(request))) == request
    sampling = {"temperature": 0.5, "ignore_eos": True, "stop": ("a", "b"), "stop_token_ids": (3,)}
    prompt = Prompt("p", "t", (1, 2), "text", 4, sampling, '{"answer": 3}', priority=-7, group_size_min=3)
    assert PromptCheck(validated({})).from_wire(over_the_wire(prompt_to_wire(prompt))) == prompt
    canary = Canary((1, 2, 3, 4), LOGPROBS)
    assert canary_from_wire(over_the_wire(canary_to_wire(canary))) == canary
    assert canary_from_wire(pb.Canary()) is None
    capability = EngineCapability("f", 8, 1024, 32, 512, 64, "float32")
    assert capability_from_wire(over_the_wire(hello_to_wire("w", 1, "host", capability))) == capability


@pytest.mark.parametrize(
    ("message", "from_wire", "complaint"),
    [
        (pb.StartRequest(output_token_ids=b"\0" * 4), request_from_wire, "logprobs = 0"),
        (pb.Canary(token_ids=b"\0" * 8, logprobs=b"\0" * 8), canary_from_wire, "canary.logprobs = 2 .*one fewer"),
        (pb.Trajectory(response_token_ids=b"\0" * 8), trajectory_from_wire, "len.logprobs. = 0"),
    ],
)
def test_malformed_messages_are_refused(message: Any, from_wire: Any, complaint: str) -> None:
    with refused(InvalidValue, names=data_words(complaint)):
        from_wire(message)


def test_an_unknown_arrival_is_refused() -> None:
    message = trajectory_to_wire(make_trajectory(0, 0, 0))
    message.worker_history[0].arrival = "teleported"
    with refused(InvalidValue, field="worker_history: arrival", value="teleported"):
        trajectory_from_wire(message)


def test_batches_hold_whole_groups_and_about_the_asked_size() -> None:
    groups = [make_group(0, index) for index in range(20)]
    one_bytes = whole_message(groups[0]).ByteSize()
    batches = list(trajectory_batches(0, groups, batch_bytes=3 * one_bytes + one_bytes // 2))
    assert [group.group_id for batch in batches for group in batch.groups] == [group.group_id for group in groups]
    assert [len(batch.groups) for batch in batches[:-1]] == [3] * (len(batches) - 1)
    with refused(LimitExceeded, field="group s0-g0: message bytes", value=191):
        list(trajectory_batches(0, groups, max_message_bytes=100))


def test_a_group_too_large_for_a_message_comes_in_parts() -> None:
    groups = [make_group(0, 0), make_group(0, 1, group_size=9), make_group(0, 2)]
    limit = 3 * max(trajectory_to_wire(each).ByteSize() for group in groups for each in group.trajectories)
    batches = list(trajectory_batches(0, groups, max_message_bytes=limit))
    assert all(batch.ByteSize() <= limit for batch in batches)
    whole: list[TrajectoryGroup] = []
    parts: list[pb.TrajectoryGroup] = []
    for message in (message for batch in batches for message in batch.groups):
        parts.append(over_the_wire(message))
        if not message.continues:
            whole.append(group_from_wire(*parts))
            parts.clear()
    assert not parts and [group.group_id for group in whole] == [group.group_id for group in groups]
    assert [[each.trajectory_id for each in group.trajectories] for group in whole] == [
        [each.trajectory_id for each in group.trajectories] for group in groups
    ]


def test_no_trajectory_takes_more_than_what_prompts_are_admitted_by() -> None:
    trajectory = replace(
        make_trajectory(0, 0, 0),
        verifier_log="\N{GREEK SMALL LETTER ALPHA}" * (LOG_MAX_BYTES // 2),
        worker_history=1000 * make_trajectory(0, 0, 0).worker_history,
    )
    most = trajectory_bytes_most(len(trajectory.prompt_token_ids), trajectory.length_tokens)
    assert trajectory_to_wire(trajectory).ByteSize() <= most


class Aborted(Exception):
    """As grpc.aio ends the call."""


class AbortedContext:
    """Keeps what a call was ended with, as grpc.aio's context would send it."""

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("dora-proof", "AAAA"),)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]) -> None:
        self.error = SimpleNamespace(code=lambda: code, details=lambda: details, trailing_metadata=lambda: metadata)
        raise Aborted


@pytest.mark.parametrize(
    "error",
    [
        InvalidValue("field", 3, "4 or more"),
        Conflict("version", 7, "8"),
        NotFound("worker", "w ü%\n", "one of w0, w1"),
        Unauthenticated("token", "(none)", "the token"),
        PermissionDenied("token", "the operator's", "the trainer's"),
        LimitExceeded("prompts", 5000, "at most 4096 queued"),
    ],
)
async def test_errors_keep_their_kind_and_their_three_parts(error: InvalidValue) -> None:
    context: Any = AbortedContext()
    with pytest.raises(Aborted):
        await abort(context, error)
    assert all(value.isascii() and value.isprintable() for _, value in context.error.trailing_metadata())
    assert context.error.trailing_metadata()[:1] == context.trailing_metadata()
    found = from_rpc_error(context.error)
    assert type(found) is type(error) and isinstance(found, InvalidValue)
    assert str(found) == str(error)
    assert (found.field, found.value, found.allowed) == (error.field, str(error.value), error.allowed)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ServiceUnavailable),
        (grpc.StatusCode.CANCELLED, ServiceUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, NoAnswer),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceeded),
        (grpc.StatusCode.UNKNOWN, CallFailed),
        (grpc.StatusCode.UNIMPLEMENTED, CallFailed),
    ],
)
def test_statuses_that_grpc_itself_gives(code: grpc.StatusCode, kind: type[DoraError]) -> None:
    error: Any = SimpleNamespace(code=lambda: code, details=lambda: "why", trailing_metadata=lambda: None)
    assert type(from_rpc_error(error)) is kind
    assert "why" in str(from_rpc_error(error))


@pytest.mark.parametrize("difference", [0.0, 0.25, math.inf])
async def test_a_rejected_version_travels_with_all_that_is_known_of_it(difference: float) -> None:
    context: Any = AbortedContext()
    error = VersionRejected(3, "logprobs differ, by 100% or so", ("w0", "w-1.b"), difference)
    with pytest.raises(Aborted):
        await abort(context, error)
    assert context.error.code() is grpc.StatusCode.FAILED_PRECONDITION
    found = from_rpc_error(context.error)
    assert isinstance(found, VersionRejected) and (str(found), vars(found)) == (str(error), vars(error))
    with pytest.raises(Aborted):
        await abort(context, VersionRejected(3, "\u00fc" * 5000, ("w0",), 0.0))
    assert sum(len(key) + len(value) for key, value in context.error.trailing_metadata()) < 6000


async def test_an_error_without_a_field_is_internal_and_long_ones_are_shortened() -> None:
    context: Any = AbortedContext()
    with pytest.raises(Aborted):
        await abort(context, CanaryMismatch("off by one " * 1000, 1.0))
    assert context.error.code() is grpc.StatusCode.INTERNAL and len(context.error.details()) <= 512


def test_tokens_and_addresses_that_cannot_work_are_refused() -> None:
    with refused(InvalidValue, field="token", value="(not shown)"):
        Prover("127.0.0.1:1", "new\nline")
    with refused(InvalidValue, field="token", value="(not shown)"):
        ServiceTokens("new\nline")
    for address in ("nowhere", "host:", ":7070", "host:99999", "host:http"):
        with refused(InvalidValue, field="address"):
            open_channel(address)
