"""The last hours of a service, for the page: bounded, filled from statuses. Pure: times are arguments."""

from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

from dora.data.step_parts import PARTS
from dora.ops.page.head import head_of
from dora.rpc.dora_pb2 import Move, PoolStatus, Status, StepMetrics, WorkerStatus

RECENT: Final = 900  # samples
OLDER: Final = 1440  # samples, each the last of OLDER_EVERY
OLDER_EVERY: Final = 10
STEPS: Final = 2048
MOVES: Final = 4096
LANES: Final = 4096  # workers with a lane; further ones are counted
SEGMENTS: Final = 131072  # of all lanes together
VERSIONS: Final = 32  # in one sample, the newest
STATES: Final = ("starting", "joining", "loading", "ready", "vacating", "draining", "drained", "lost", "gone")
READY, DRAINING, GONE = (STATES.index(name) for name in ("ready", "draining", "gone"))
_CODES: Final[Mapping[str, int]] = {name: code for code, name in enumerate(STATES)}


@dataclass(slots=True)
class Lane:
    """One worker's states. Each segment is [start time, version, state]."""

    worker_id: str
    host: str
    is_pool: bool = False
    segments: list[list[float]] = field(default_factory=list)

    def extend(self, at: float, version: int, code: int) -> int:
        """Returns the number of segments that were added."""
        if self.segments and self.segments[-1][1:] == [version, code]:
            return 0
        self.segments.append([at, version, code])
        return 1

    def coarsen(self) -> None:
        """Joins the segments of each version in the older half. A lost worker's stay."""
        half = len(self.segments) // 2
        joined: list[list[float]] = []
        for segment in self.segments[:half]:
            if joined and joined[-1][1] == segment[1] and joined[-1][2] <= DRAINING >= segment[2]:
                joined[-1][2] = READY
            else:
                joined.append(segment)
        self.segments[:half] = joined


class History:
    """Keeps statuses, counted by ``seq``. ``roster`` changes with the set of lanes, whose order the updates follow."""

    def __init__(self, segments: int = SEGMENTS) -> None:
        self._segments_most = segments
        self.seq = 0
        self.roster = 0
        self.status = Status()
        self.recent: deque[list[Any]] = deque(maxlen=RECENT)
        self.older: deque[list[Any]] = deque(maxlen=OLDER)
        self.steps: deque[list[Any]] = deque(maxlen=STEPS)
        self.moves: deque[list[Any]] = deque(maxlen=MOVES)
        self.lanes: dict[str, Lane] = {}
        self._segments = 0
        self._moved_at = 0.0

    def add(self, status: Status, at: float) -> dict[str, Any]:
        """Enters a status that came at ``at``, wall-clock time. Returns the update for browsers."""
        self.seq += 1
        if self.steps and status.newest_version <= self.steps[-1][0]:  # another run at this address
            self.steps.clear()
        sample = sample_of(status, at)
        if len(self.recent) == RECENT and self.seq % OLDER_EVERY == 0:
            self.older.append(self.recent[0])
        self.recent.append(sample)
        steps, moves = self._new_steps(status.steps), self._new_moves(status.moves)
        workers = self._enter_workers(status, at)
        known = status.steps or self.status.steps  # a stream tells each step once
        self.status = Status()
        self.status.CopyFrom(status)
        if not status.steps:
            self.status.steps.extend(known[-1:])
        return {
            "seq": self.seq,
            "roster": self.roster,
            "now": at,
            "sample": sample,
            "steps": steps,
            "moves": moves,
            "workers": workers,
            "head": head_of(self.status),
            "versions": versions_of(self.status),
        }

    def whole(self) -> dict[str, Any]:
        """Returns everything that is kept, for a browser that begins."""
        return {
            "seq": self.seq,
            "roster": self.roster,
            "states": STATES,
            "parts": [[name, words] for name, words in PARTS.items()],
            "samples": [*self.older, *self.recent],
            "steps": list(self.steps),
            "moves": list(self.moves),
            "lanes": [[lane.worker_id, lane.host, lane.is_pool, lane.segments] for lane in self.lanes.values()],
            "head": head_of(self.status),
            "versions": versions_of(self.status),
        }

    def _new_steps(self, steps: Iterable[StepMetrics]) -> list[list[Any]]:
        last = self.steps[-1][0] if self.steps else -1
        found = [step_of(step) for step in steps if step.step > last]
        self.steps.extend(found)
        return found

    def _new_moves(self, moves: Iterable[Move]) -> list[list[Any]]:
        found = [move_of(move) for move in moves if move.at > self._moved_at]
        self._moved_at = max([self._moved_at, *(move[0] for move in found)])
        self.moves.extend(found)
        return found

    def _enter_workers(self, status: Status, at: float) -> list[list[int]]:
        """Returns version, state, running, waiting, KV use in percent and tokens/s, each for all lanes."""
        there = {worker.worker_id: worker for worker in (*status.workers, *map(_as_worker, status.pools))}
        there = {name: worker for name, worker in there.items() if worker.state != "drained"}
        self._change_roster(there, {pool.pool_id for pool in status.pools})
        columns: list[list[int]] = [[] for _ in range(6)]
        for lane in self.lanes.values():
            worker = there.get(lane.worker_id)
            version, code = (-1, GONE) if worker is None else (worker.version, _CODES.get(worker.state, GONE))
            self._segments += lane.extend(round(at, 1), version, code)
            shown = WorkerStatus() if worker is None else worker
            values = (version, code, shown.running, shown.waiting, shown.kv_use * 100, shown.tokens_per_s)
            for column, value in zip(columns, values, strict=True):
                column.append(round(value))
        self._forget_segments()
        return columns

    def _change_roster(self, there: Mapping[str, WorkerStatus], pools: Set[str]) -> None:
        oldest = (self.older or self.recent)[0][0]
        over = [
            name
            for name, lane in self.lanes.items()
            if name not in there and lane.segments and lane.segments[-1][2] == GONE and lane.segments[-1][0] < oldest
        ]
        for name in over:
            self._segments -= len(self.lanes.pop(name).segments)
        new = [worker for name, worker in there.items() if name not in self.lanes][: LANES - len(self.lanes)]
        for worker in new:
            self.lanes[worker.worker_id] = Lane(worker.worker_id, worker.host, worker.worker_id in pools)
        self.roster += bool(over or new)

    def _forget_segments(self) -> None:
        if self._segments <= self._segments_most:
            return
        for lane in self.lanes.values():
            lane.coarsen()
        self._segments = sum(len(lane.segments) for lane in self.lanes.values())
        while self._segments > self._segments_most * 3 // 4:
            most = max(len(lane.segments) for lane in self.lanes.values())
            for lane in self.lanes.values():
                if len(lane.segments) > most // 2:
                    del lane.segments[: -(most // 2)]
            self._segments = sum(len(lane.segments) for lane in self.lanes.values())


def _as_worker(pool: PoolStatus) -> WorkerStatus:
    use = pool.memory_bytes / pool.memory_most_bytes if pool.memory_most_bytes else 0.0
    return WorkerStatus(
        worker_id=pool.pool_id, host=pool.host, state=pool.state, version=-1, waiting=pool.parked, kv_use=use
    )


def sample_of(status: Status, at: float) -> list[Any]:
    """Returns the sample of a status. It has time, tokens/s, running, waiting, queued prompts, mean and largest KV use,
    the pools' fill (-1 without a pool), and for each live version its finished groups, its other open groups and its
    running requests.
    """
    there = [worker for worker in status.workers if worker.slots]
    uses = [worker.kv_use for worker in there]
    pools = [pool for pool in status.pools if pool.state == "ready" and pool.memory_most_bytes]
    room = sum(pool.memory_most_bytes for pool in pools)
    return [
        round(at, 1),
        round(sum(worker.tokens_per_s for worker in there)),
        sum(worker.running for worker in there),
        sum(version.requests_waiting for version in status.versions),
        status.prompts_queued,
        round(sum(uses) / len(uses), 3) if uses else 0,
        round(max(uses, default=0.0), 3),
        round(sum(pool.memory_bytes for pool in pools) / room, 3) if room else -1,
        [
            [row.version, row.groups_finished, row.groups_open - row.groups_finished, row.requests_running]
            for row in status.versions[-VERSIONS:]
        ],
    ]


def step_of(step: StepMetrics) -> list[Any]:
    """Returns the sample of a step. It has step, time of its commit, time it took, the part that the trainer waited (-1
    if unknown), mean reward, mean and largest staleness, tokens, and the seconds of each of PARTS (empty if unknown).
    """
    took = round(step.took_s, 3) if step.HasField("took_s") else -1
    waited = round(step.waited_s, 3) if step.HasField("waited_s") else -1
    reward = round(step.mean_reward, 5) if isfinite(step.mean_reward) else None
    staleness = round(step.staleness_mean, 3)
    parts = [round(step.parts_s.get(name, 0.0), 3) for name in PARTS] if step.parts_s else []
    at = round(step.committed_at, 1)
    return [step.step, at, took, waited, reward, staleness, step.staleness_max, step.tokens, parts]


def move_of(move: Move) -> list[Any]:
    return [move.at, move.trajectory_id, move.source, move.target, move.kind, move.reason, move.result]


def versions_of(status: Status) -> list[list[Any]]:
    return [
        [
            row.version, row.state, row.deadline_step, row.workers, row.groups_open, row.groups_finished,
            row.requests_running, row.requests_waiting, row.sessions_idle,
        ]
        for row in sorted(status.versions, key=lambda row: -row.version)[:VERSIONS]
    ]  # fmt: skip
