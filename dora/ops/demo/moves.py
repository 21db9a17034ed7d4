"""The moves of requests between workers, as two consecutive looks at the open trajectories show them."""

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from dora.rpc.dora_pb2 import TrajectoryStatus

UNFINISHED: Final = ("waiting", "running", "moving")  # states in which a worker may hold a request


@dataclass(frozen=True, slots=True)
class MoveArc:
    """Requests that left ``source`` and came to ``target`` at the same times: an arc of the timeline.

    A request that was parked in between may come back to the worker that it left.
    """

    left_s: float  # last sample in which ``source`` held them
    came_s: float  # first sample in which ``target`` held them
    source: str
    target: str
    version: int
    requests: int


@dataclass(frozen=True, slots=True)
class _Seen:
    worker: str
    at_s: float
    is_away: bool = False  # it has been seen off its worker since


class MoveWatch:
    """Finds moves in successive lists of open trajectories."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}  # of open trajectories only

    def seen(self, rows: Iterable[TrajectoryStatus], workers: Container[str], now_s: float) -> tuple[MoveArc, ...]:
        """Returns the moves that ended since the previous list, in a fixed order.

        ``rows`` are all open trajectories, ``workers`` names; other holders are pools. A request that both began and
        moved, or moved and ended, between two lists is not found.
        """
        present: dict[str, _Seen] = {}
        moves: Counter[tuple[float, str, str, int]] = Counter()
        for row in rows:
            last = self._seen.get(row.trajectory_id)
            if row.state not in UNFINISHED or row.worker not in workers:
                if last is not None:
                    present[row.trajectory_id] = _Seen(last.worker, last.at_s, is_away=True)
                continue
            if last is not None and (last.is_away or last.worker != row.worker):
                moves[last.at_s, last.worker, row.worker, row.version] += 1
            present[row.trajectory_id] = _Seen(row.worker, now_s)
        self._seen = present
        return tuple(
            MoveArc(round(left_s, 3), round(now_s, 3), source, target, version, requests)
            for (left_s, source, target, version), requests in sorted(moves.items())
        )
