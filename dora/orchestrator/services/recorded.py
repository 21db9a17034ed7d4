"""Committed trajectories, read from the run record for operators: a list of the latest, and one with its tokens."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from dora.core.state import State
from dora.data.conversation import find_session
from dora.data.record_content import TRAJECTORIES_FILE
from dora.data.trajectory import Trajectory
from dora.errors import InvalidValue, NotFound
from dora.orchestrator.services import shown
from dora.rpc import dora_pb2 as pb

COMMITTED: Final = "committed"
LISTED_BYTES: Final = 32 << 20  # of the end of the file, which the list covers
_SAME: Final = ("task_id", "sample_index", "started_at", "finished_at", "finish_reason", "reward_components")


@dataclass(eq=False, repr=False)
class RecordedTrajectories:
    """Reads one file at a time, in a thread. ``record`` is the record's folder, or empty without a record."""

    _state: State
    _record: str

    def __post_init__(self) -> None:
        self._reading = asyncio.Lock()

    async def list(self, request: pb.TrajectoriesRequest) -> pb.TrajectoriesReply:
        """Returns all workers' trajectories, the latest first. Raises InvalidValue without a record."""
        if not self._record:
            raise InvalidValue("state", COMMITTED, "another one: this service keeps no record (start it with --record)")
        async with self._reading:
            return await asyncio.to_thread(_listed, Path(self._record), self._state.window.newest, request)

    async def show(self, request: pb.ShowTrajectoryRequest) -> pb.ShownTrajectory:
        """Returns one trajectory. Raises NotFound if it is not in the record."""
        name = request.trajectory_id
        async with self._reading:
            with suppress(NotFound):
                branches = await asyncio.to_thread(find_session, Path(self._record), name) if self._record else []
                for found in (each for each in branches if each.trajectory_id == name):
                    return _shown(found, request)
        raise NotFound("trajectory_id", name, "one that is admitted, or that the service's record has")


def _listed(record: Path, newest: int, request: pb.TrajectoriesRequest) -> pb.TrajectoriesReply:
    with (record / TRAJECTORIES_FILE).open("rb") as stream:
        begin = max(0, stream.seek(0, 2) - LISTED_BYTES)
        stream.seek(begin)
        lines = stream.read().split(b"\n")[bool(begin) : -1]  # whole ones
    last = request.offset + (request.limit or shown.LISTED_DEFAULT)
    recorded = (Trajectory.from_json_dict(json.loads(line)) for line in reversed(lines))
    committed = (each for each in recorded if each.trained_step < newest)
    found = list(islice(committed, last + 1))  # one more says that there are more
    return pb.TrajectoriesReply(trajectories=map(_status, found[request.offset : last]), total=len(found))


def _status(trajectory: Trajectory) -> pb.TrajectoryStatus:
    return pb.TrajectoryStatus(
        state=COMMITTED,
        version=trajectory.behaviour_version,
        deadline_step=trajectory.behaviour_version + trajectory.window_versions - 1,
        worker=trajectory.worker_history[-1].worker_id,
        tokens=trajectory.length_tokens,
        max_tokens=0 if trajectory.events else trajectory.sampling.max_tokens,
        age_s=time.time() - trajectory.started_at,
        moves=len(trajectory.worker_history) - 1,
        **{name: getattr(trajectory, name) for name in ("trajectory_id", "group_id", "prompt_id")},
    )


def _shown(of: Trajectory, request: pb.ShowTrajectoryRequest) -> pb.ShownTrajectory:
    """Returns the trajectory without turns and times of moves, which the record does not have."""
    return pb.ShownTrajectory(
        status=_status(of),
        reward=of.reward if of.reward_valid else None,
        verifier_log=of.verifier_log[: shown.LOG_MAX],
        worker_history=shown.segments(of.worker_history),
        **{name: getattr(of, name) for name in _SAME},
        **shown.tokens_of(of.prompt_token_ids.tolist(), of.response_token_ids, of.logprobs, of.loss_mask, request),
    )
