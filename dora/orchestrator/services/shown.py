"""Trajectories that are not committed, for operators: a list, and one with its tokens. Changes nothing."""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import numpy as np

from dora.core.state import GroupStatus, RequestStatus, State
from dora.errors import InvalidValue, NotFound
from dora.orchestrator.rollout.responses.buffer import ResponseBuffer
from dora.orchestrator.rollout.responses.state import ResponseState
from dora.rpc import dora_pb2 as pb

LISTED_DEFAULT: Final = 100
TOKENS_DEFAULT: Final = 4096
TOKENS_MAX: Final = 16384
PARTS_MAX: Final = 1024  # turns and segments, the latest
LOG_MAX: Final = 4096  # characters
STATES: Final = ("waiting", "running", "moving", "parked", "idle", "dormant", "skipped", "finished", "leased")


def trajectories(state: State, buffer: ResponseBuffer, asked: pb.TrajectoriesRequest) -> pb.TrajectoriesReply:
    """Admitted responses that are not committed, the oldest first."""
    limit = asked.limit or LISTED_DEFAULT
    entries = (entry for _, members in buffer.groups() for entry in members)
    if not asked.state and not asked.worker:
        found = list(islice(entries, asked.offset, asked.offset + limit))
        total = sum(len(members) for _, members in buffer.groups())
    else:
        matching = [entry for entry in entries if _matches(state, entry, asked)]
        found, total = matching[asked.offset : asked.offset + limit], len(matching)
    now = time.time()
    return pb.TrajectoriesReply(trajectories=[_status(state, entry, now) for entry in found], total=total)


def trajectory(state: State, buffer: ResponseBuffer, asked: pb.ShowTrajectoryRequest) -> pb.ShownTrajectory:
    """Raises NotFound for one that is unknown or committed, and InvalidValue for too many tokens."""
    if asked.tokens > TOKENS_MAX:
        raise InvalidValue("tokens", asked.tokens, f"at most {TOKENS_MAX}")
    entry = buffer.get(asked.trajectory_id)
    if entry is None or asked.trajectory_id not in state.request_row:
        raise NotFound("trajectory_id", asked.trajectory_id, "a trajectory that is admitted and not committed")
    reward = entry.reward
    return pb.ShownTrajectory(
        status=_status(state, entry, time.time()),
        task_id=entry.prompt.task_id,
        sample_index=entry.sample_index,
        started_at=entry.started_at,
        finished_at=entry.finished_at if entry.finish_reason else 0.0,
        finish_reason=entry.finish_reason or "",
        reward=reward.value if reward is not None and reward.valid else None,
        reward_components=reward.components if reward else {},
        verifier_log=reward.log[:LOG_MAX] if reward else "",
        turn_rewards=reward.turns if reward else {},
        worker_history=[
            pb.Segment(worker=worker, first_token=first, last_token=last, arrival=arrival, version=version)
            for worker, first, last, arrival, version in entry.worker_history()[-PARTS_MAX:]
        ],
        arrivals=[pb.ShownArrival(at=start.at, left_at=start.left_at) for start in entry.segment_starts[-PARTS_MAX:]],
        turns=list(_turns(entry))[-PARTS_MAX:] if entry.is_session else [],
        **_tokens(entry, asked.first_token, asked.tokens or TOKENS_DEFAULT),
    )


def _tokens(entry: ResponseState, first: int, count: int) -> dict[str, Any]:
    """A range of the prompt and the present path together."""
    prompt, tokens = entry.prompt_ids(), entry.tokens
    chosen = slice(first, first + count)
    is_sampled = np.ones(len(tokens), np.uint8)
    for begin, end in entry.given_bounds():
        is_sampled[begin:end] = 0
    before = len(prompt)
    return {
        "prompt_tokens": before,
        "total_tokens": before + len(tokens),
        "first_token": first,
        "token_ids": np.concatenate([np.array(prompt, np.int32), tokens])[chosen].astype("<i4").tobytes(),
        "logprobs": np.concatenate([np.zeros(before, np.float32), entry.logprobs])[chosen].astype("<f4").tobytes(),
        "is_sampled": np.concatenate([np.zeros(before, np.uint8), is_sampled])[chosen].tobytes(),
    }


def _turns(entry: ResponseState) -> Iterator[pb.ShownTurn]:
    begins, ends = entry.turn_begins or {}, entry.turn_ends or {}
    if sampled := entry.turn_end(0):
        yield pb.ShownTurn(
            at=entry.started_at, sampled_tokens=sampled, ended_at=ends.get(0, 0.0), begun_at=begins.get(0, 0.0)
        )
    for turn, run in enumerate(entry.given, 1):
        yield pb.ShownTurn(
            turn=turn,
            at=run.at,
            given_tokens=run.tokens,
            first_token=run.held_end,
            sampled_tokens=max(0, entry.turn_end(turn) - run.held_end),
            name=run.name,
            after_turn=run.after_turn,
            is_fork=run.is_fork,
            ended_at=ends.get(turn, 0.0),
            begun_at=begins.get(turn, 0.0),
        )


def _matches(state: State, entry: ResponseState, asked: pb.TrajectoriesRequest) -> bool:
    row = state.request_row[entry.request_id]
    if asked.state and _request_state(state, row) != asked.state:
        return False
    owner = state.owner(row) or state.pool_of(row)
    return not asked.worker or (owner is not None and owner.worker_id == asked.worker)


def _status(state: State, entry: ResponseState, now: float) -> pb.TrajectoryStatus:
    row = state.request_row[entry.request_id]
    owner, handoff = state.owner(row) or state.pool_of(row), state.handoffs.get(row)
    return pb.TrajectoryStatus(
        trajectory_id=entry.request_id,
        group_id=entry.group_id,
        prompt_id=entry.prompt.prompt_id,
        state=_request_state(state, row),
        version=entry.version,
        deadline_step=int(state.groups["deadline"][state.requests["group"][row]]),
        worker=owner.worker_id if owner else "",
        tokens=len(entry),
        max_tokens=entry.sampling.max_tokens,
        age_s=now - entry.started_at,
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
