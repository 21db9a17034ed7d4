"""Committed trajectories, read from the run record for operators: a list of the latest, and one with its tokens."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from dora.core.state import State
from dora.data.conversation import SAMPLED, TurnShown, conversation_of, find_session
from dora.data.record_content import TRAJECTORIES_FILE
from dora.data.trajectory import Trajectory
from dora.errors import InvalidValue, NotFound
from dora.orchestrator.services import shown
from dora.rpc import dora_pb2 as pb

COMMITTED: Final = "committed"
LISTED_BYTES: Final = 32 << 20  # of the end of the file, which the list covers


@dataclass(eq=False, repr=False)
class RecordedTrajectories:
    """Reads one file at a time, in a thread. ``record``: its folder; empty: the service keeps none."""

    _state: State
    _record: str

    def __post_init__(self) -> None:
        self._reading = asyncio.Lock()

    async def list(self, request: pb.TrajectoriesRequest) -> pb.TrajectoriesReply:
        """The latest first. Raises InvalidValue without a record."""
        if not self._record:
            raise InvalidValue("state", COMMITTED, "another one: this service keeps no record (start it with --record)")
        newest = self._state.window.newest
        async with self._reading:
            return await asyncio.to_thread(_listed, Path(self._record), newest, request)

    async def show(self, request: pb.ShowTrajectoryRequest) -> pb.ShownTrajectory:
        """Raises NotFound for a trajectory that is not in the record."""
        name = request.trajectory_id
        unknown = NotFound("trajectory_id", name, "one that is admitted, or that the service's record has")
        if not self._record:
            raise unknown
        async with self._reading:
            try:
                found = await asyncio.to_thread(find_session, Path(self._record), name)
                at = [each.trajectory_id for each in found].index(name)
            except (NotFound, ValueError):
                raise unknown from None
        return _shown(found[at], _turns_of(found, at), request)


def _listed(record: Path, newest: int, request: pb.TrajectoriesRequest) -> pb.TrajectoriesReply:
    now, last = time.time(), request.offset + (request.limit or shown.LISTED_DEFAULT)
    lines = _latest_lines(record / TRAJECTORIES_FILE)
    known = (Trajectory.from_json_dict(json.loads(line)) for line in lines)
    ours = (each for each in known if each.trained_step < newest and _was_on(each, request.worker))
    found = list(islice(ours, last + 1))  # one more says that there are more
    rows = [_status(each, now) for each in found[request.offset : last]]
    return pb.TrajectoriesReply(trajectories=rows, total=len(found))


def _latest_lines(file: Path) -> Iterator[bytes]:
    """Yields the whole lines in the last LISTED_BYTES of a file, the last first."""
    with file.open("rb") as stream:
        size_bytes = stream.seek(0, 2)
        stream.seek(max(0, size_bytes - LISTED_BYTES))
        lines = stream.read().split(b"\n")[:-1]  # without what follows the last end of a line
    yield from reversed(lines[1:] if size_bytes > LISTED_BYTES else lines)


def _was_on(trajectory: Trajectory, worker: str) -> bool:
    return not worker or any(segment.worker_id == worker for segment in trajectory.worker_history)


def _status(trajectory: Trajectory, now: float) -> pb.TrajectoryStatus:
    history = trajectory.worker_history
    return pb.TrajectoryStatus(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        prompt_id=trajectory.prompt_id,
        state=COMMITTED,
        version=trajectory.behaviour_version,
        deadline_step=trajectory.behaviour_version + trajectory.window_versions - 1,
        worker=history[-1].worker_id if history else "",
        tokens=trajectory.length_tokens,
        max_tokens=0 if trajectory.events else trajectory.sampling.max_tokens,
        age_s=now - trajectory.started_at,
        moves=max(0, len(history) - 1),
    )


def _turns_of(branches: list[Trajectory], at: int) -> list[pb.ShownTurn]:
    """The turns of a session's branch; empty for a single response."""
    if not branches[at].events:
        return []
    found: list[pb.ShownTurn] = []
    given: TurnShown | None = None
    for turn in conversation_of(branches, None).branches[at].turns[1:]:  # without the prompt
        if turn.speaker != SAMPLED:
            given = turn
            continue
        began = branches[at].started_at + (given.after_s or 0.0 if given else 0.0)
        of_given = {"given_tokens": len(given.token_ids), "name": given.name} if given else {}
        first, count = turn.first_token, len(turn.token_ids)
        found.append(pb.ShownTurn(turn=turn.turn or 0, at=began, first_token=first, sampled_tokens=count, **of_given))
        given = None
    return found


def _shown(of: Trajectory, turns: list[pb.ShownTurn], request: pb.ShowTrajectoryRequest) -> pb.ShownTrajectory:
    rewards = {turn.turn: of.turn_rewards.get(str(turn.first_token)) for turn in turns}
    count = request.tokens or shown.TOKENS_DEFAULT
    return pb.ShownTrajectory(
        status=_status(of, time.time()),
        task_id=of.task_id,
        sample_index=of.sample_index,
        started_at=of.started_at,
        finished_at=of.finished_at,
        finish_reason=of.finish_reason,
        reward=of.reward if of.reward_valid else None,
        reward_components=of.reward_components,
        verifier_log=of.verifier_log[: shown.LOG_MAX],
        turn_rewards={turn: reward for turn, reward in rewards.items() if reward is not None},
        worker_history=[
            pb.Segment(worker=worker, first_token=first, last_token=last, arrival=arrival, version=version)
            for worker, first, last, arrival, version in of.worker_history[-shown.PARTS_MAX :]
        ],
        arrivals=[pb.ShownArrival()] * min(len(of.worker_history), shown.PARTS_MAX),  # their times are not recorded
        turns=turns[-shown.PARTS_MAX :],
        **shown.tokens_of(
            of.prompt_token_ids, of.response_token_ids, of.logprobs, of.loss_mask, request.first_token, count
        ),
    )
