"""A trajectory on its workers' lanes, over time: its turns, the environment's work in between, its moves. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dora.rpc.dora_pb2 import ShownTrajectory

FOREVER: Final = float("inf")


class Stretch(NamedTuple):
    """A part of a trajectory's time. Times are of the wall clock.

    ``kind`` is sampled; tools if the environment worked; queue if it waited for a worker, or for its first token.
    """

    kind: str
    lane: int
    begin: float
    end: float
    turn: int


class Hop(NamedTuple):
    """A move. ``left_at`` is the time of its last token on the earlier worker, ``at`` of its first on the next."""

    source: int
    target: int
    left_at: float
    at: float
    arrival: str


@dataclass(frozen=True, slots=True)
class Track:
    """One trajectory's way. ``lanes`` names the workers in order of arrival. ``is_whole`` says that every time is
    known. Times before a restart of the service are not.
    """

    trajectory_id: str
    lanes: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    hops: tuple[Hop, ...]
    begin: float
    end: float
    is_whole: bool

    def to_json_list(self) -> list[Any]:
        return [self.trajectory_id, self.lanes, self.stretches, self.hops, self.begin, self.end, self.is_whole]


def track_of(shown: ShownTrajectory, now: float) -> Track:
    """Returns the track. Whatever still goes on ends at ``now``."""
    lanes = tuple(dict.fromkeys(segment.worker for segment in shown.worker_history))
    stays = _stays(shown, lanes)
    end = shown.finished_at or now
    stretches = tuple(_stretches(shown, stays, end)) if stays else ()
    known = (turn.ended_at or turn.turn == shown.turns[-1].turn for turn in shown.turns)
    is_whole = all(known) and len(stays) == len(shown.worker_history)
    return Track(
        shown.status.trajectory_id, lanes, stretches, tuple(_hops(shown, lanes)), shown.started_at, end, is_whole
    )


def _stays(shown: ShownTrajectory, lanes: Sequence[str]) -> list[tuple[int, float, float]]:
    both = list(zip(shown.worker_history, shown.arrivals, strict=False))
    leaves = [*(arrival.left_at or arrival.at for _, arrival in both[1:]), FOREVER]
    return [
        (lanes.index(segment.worker), arrival.at, left)
        for (segment, arrival), left in zip(both, leaves, strict=False)
        if arrival.at
    ]


def _stretches(shown: ShownTrajectory, stays: Sequence[tuple[int, float, float]], end: float) -> Iterator[Stretch]:
    turns = [(turn.turn, turn.at, turn.begun_at, turn.ended_at) for turn in shown.turns]
    if not turns:
        turns = [(0, shown.started_at, shown.arrivals[0].at, shown.finished_at)]
    for place, (turn, requested_s, begun, ended) in enumerate(turns):
        follows = turns[place + 1][1] if place + 1 < len(turns) else end
        first, last = begun or requested_s, ended or follows
        if begun > requested_s:
            yield Stretch("queue", _lane_at(stays, begun), requested_s, begun, turn)
        for lane, came, left in stays:
            if min(last, left) > max(first, came):
                yield Stretch("sampled", lane, max(first, came), min(last, left), turn)
        if ended and follows > ended:
            yield Stretch("tools", _lane_at(stays, ended), ended, follows, turn)


def _lane_at(stays: Sequence[tuple[int, float, float]], at: float) -> int:
    return next((lane for lane, came, _ in reversed(stays) if came <= at), stays[0][0])


def _hops(shown: ShownTrajectory, lanes: Sequence[str]) -> Iterator[Hop]:
    before = -1
    for segment, arrival in zip(shown.worker_history, shown.arrivals, strict=False):
        lane = lanes.index(segment.worker)
        if before >= 0 and arrival.at:
            yield Hop(before, lane, arrival.left_at or arrival.at, arrival.at, segment.arrival)
        before = lane
