"""Trajectories that are not committed, for operators: a list, and one with its tokens. Changes nothing."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

from dora.core.state import GroupStatus, RequestStatus, State
from dora.core.table import Column
from dora.data.types import Segment
from dora.errors import NotFound
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.rpc import dora_pb2 as pb

LISTED_DEFAULT: Final = 100
TOKENS_DEFAULT: Final = 4096
TOKENS_MAX: Final = 16384
PARTS_MAX: Final = 1024  # turns and segments, the latest
LOG_MAX: Final = 4096  # characters
STATES: Final = ("waiting", "running", "moving", "parked", "idle", "dormant", "skipped", "finished", "leased")


def trajectories(state: State, buffer: ResponseBuffer, request: pb.TrajectoriesRequest) -> pb.TrajectoriesReply:
    """Returns admitted responses that are not committed, the oldest first."""
    limit = request.limit or LISTED_DEFAULT
    responses = (response for _, members in buffer.groups() for response in members)
    if not request.state and not request.worker:
        found = list(islice(responses, request.offset, request.offset + limit))
        total = sum(len(members) for _, members in buffer.groups())
    else:
        matching = [response for response in responses if _matches(state, response, request)]
        found, total = matching[request.offset : request.offset + limit], len(matching)
    now = time.time()
    return pb.TrajectoriesReply(trajectories=[_status(state, response, now) for response in found], total=total)


def trajectory(state: State, buffer: ResponseBuffer, request: pb.ShowTrajectoryRequest) -> pb.ShownTrajectory:
    """Returns one response. Raises NotFound if it is unknown or committed."""
    response = buffer.get(request.trajectory_id)
    if response is None or request.trajectory_id not in state.request_row:
        raise NotFound("trajectory_id", request.trajectory_id, "a trajectory that is admitted and not committed")
    reward = response.reward
    return pb.ShownTrajectory(
        status=_status(state, response, time.time()),
        task_id=response.prompt.task_id,
        sample_index=response.sample_index,
        started_at=response.started_at,
        finished_at=response.finished_at if response.finish_reason else 0.0,
        finish_reason=response.finish_reason or "",
        reward=reward.value if reward is not None and reward.valid else None,
        reward_components=reward.components if reward else {},
        verifier_log=reward.log[:LOG_MAX] if reward else "",
        turn_rewards=reward.turns if reward else {},
        worker_history=segments(response.worker_history()),
        arrivals=[
            pb.ShownArrival(at=start.at, left_at=start.left_at) for start in response.segment_starts[-PARTS_MAX:]
        ],
        turns=list(_turns(response))[-PARTS_MAX:] if response.is_session else [],
        **tokens_of(response.prompt_ids(), response.tokens, response.logprobs, _is_sampled(response), request),
    )


def segments(history: Sequence[Segment]) -> list[pb.Segment]:
    return [
        pb.Segment(worker=worker, first_token=first, last_token=last, arrival=arrival, version=version)
        for worker, first, last, arrival, version in history[-PARTS_MAX:]
    ]


def _is_sampled(response: ResponseState) -> Column:
    is_sampled = np.ones(len(response.tokens), np.uint8)
    for begin, end in response.input_bounds():
        is_sampled[begin:end] = 0
    return is_sampled


def tokens_of(
    prompt: Sequence[int], tokens: Column, logprobs: Column, is_sampled: Column, request: pb.ShowTrajectoryRequest
) -> dict[str, Any]:
    """Returns the fields of a ShownTrajectory that have the tokens that the request asks for."""
    before, first = len(prompt), request.first_token
    chosen = slice(first, first + (request.tokens or TOKENS_DEFAULT))
    return {
        "prompt_tokens": before,
        "total_tokens": before + len(tokens),
        "first_token": first,
        "token_ids": np.concatenate([np.array(prompt, np.int32), tokens])[chosen].astype("<i4").tobytes(),
        "logprobs": np.concatenate([np.zeros(before, np.float32), logprobs])[chosen].astype("<f4").tobytes(),
        "is_sampled": np.concatenate([np.zeros(before, np.uint8), is_sampled])[chosen].tobytes(),
    }


def _turns(response: ResponseState) -> Iterator[pb.ShownTurn]:
    begins, ends = response.turn_begins or {}, response.turn_ends or {}
    if sampled := response.turn_end(0):
        yield pb.ShownTurn(
            at=response.started_at, sampled_tokens=sampled, ended_at=ends.get(0, 0.0), begun_at=begins.get(0, 0.0)
        )
    for turn, run in enumerate(response.inputs, 1):
        yield pb.ShownTurn(
            turn=turn,
            at=run.at,
            given_tokens=run.tokens,
            first_token=run.buffer_end,
            sampled_tokens=max(0, response.turn_end(turn) - run.buffer_end),
            name=run.name,
            after_turn=run.after_turn,
            is_fork=run.is_fork,
            ended_at=ends.get(turn, 0.0),
            begun_at=begins.get(turn, 0.0),
        )


def _matches(state: State, response: ResponseState, request: pb.TrajectoriesRequest) -> bool:
    row = state.request_row[response.request_id]
    if request.state and _request_state(state, row) != request.state:
        return False
    owner = state.owner(row) or state.pool_of(row)
    return not request.worker or (owner is not None and owner.worker_id == request.worker)


def _status(state: State, response: ResponseState, now: float) -> pb.TrajectoryStatus:
    row = state.request_row[response.request_id]
    owner, handoff = state.owner(row) or state.pool_of(row), state.handoffs.get(row)
    return pb.TrajectoryStatus(
        trajectory_id=response.request_id,
        group_id=response.group_id,
        prompt_id=response.prompt.prompt_id,
        state=_request_state(state, row),
        version=response.version,
        deadline_step=int(state.groups["deadline"][state.requests["group"][row]]),
        worker=owner.worker_id if owner else "",
        tokens=len(response),
        max_tokens=0 if response.is_session else response.sampling.max_tokens,
        age_s=now - response.started_at,
        moves=int(state.requests["moves"][row]),
        handoff=handoff.phase.name if handoff else "",
        target=handoff.target if handoff else "",
    )


def _request_state(state: State, row: int) -> str:
    status = RequestStatus(int(state.requests["status"][row]))
    if status in (RequestStatus.WAITING, RequestStatus.RUNNING) and state.requests["moving"][row]:
        return "moving"
    if status is RequestStatus.WAITING:
        return "parked" if state.requests["pool"][row] else "waiting"
    if status is RequestStatus.RUNNING:
        return "running"
    if status in (RequestStatus.IDLE, RequestStatus.DORMANT, RequestStatus.SKIPPED):
        return status.name.lower()
    leased = state.groups["status"][state.requests["group"][row]] == GroupStatus.LEASED
    return "leased" if leased else "finished"
