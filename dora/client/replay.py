"""Experience replay: trains on groups of earlier steps once more, within their staleness bound.

    trainer = dora.Trainer(address, replay=dora.ReplayBuffer(share=0.25, by="priority"))
    async for step in trainer.steps():
        for group in step.replays(): ...    # beside the step's own groups

The service delivers each group once and takes no part: the buffer holds what this trainer has received. The replays of
a step are a function of the buffer and the step's number, not of the order or time in which groups arrive. So a trainer
that resumes with the buffer of its checkpoint replays the same groups.

Sources: *Laminar: A Scalable Asynchronous RL Post-Training Framework*, section 10 (experience sampling); Schaul and
others: *Prioritized Experience Replay*. The largest priorities are taken, not sampled.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, Literal, get_args

import numpy as np
from google.protobuf.message import DecodeError

from dora.data.trajectory import Decoder, TrajectoryGroup
from dora.errors import Conflict, InvalidValue
from dora.rpc import dora_pb2 as pb
from dora.rpc.convert import group_from_wire, trajectory_to_wire

ReplayBy = Literal["age", "priority"]

SHARE_MAX: Final = 0.5  # a group is replayed at most once, so there are at most as many replays as fresh groups
GROUPS_MAX: Final = 4096  # of a buffer, by default
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    group_id: str
    version: int  # that sampled it
    trained_step: int  # the step that it was delivered to
    deadline: int  # the last step that may train on it (C3)
    priority: float

    @classmethod
    def of(cls, group: TrajectoryGroup, window_versions: int) -> "Candidate":
        """Describes a group. ``window_versions`` is its window if the group does not name one."""
        first = group.trajectories[0]
        window = first.window_versions or window_versions
        version = first.behaviour_version
        return cls(group.group_id, version, first.trained_step, version + window - 1, priority_of(group))


def priority_of(group: TrajectoryGroup) -> float:
    """The mean absolute advantage |r_i - mean(r)|, over valid rewards; 0 for a group that teaches nothing."""
    valid = max(int(group.rewards_valid.sum()), 1)
    return float(np.abs(group.advantages(normalize=False)).sum() / valid)


@dataclass(frozen=True, slots=True)
class ReplayPlanner:
    """Chooses the replays of a step. Pure: equal arguments give equal answers."""

    share: float  # of the groups that a step trains on, over many steps
    by: ReplayBy = "age"  # "age": the newest version first; "priority": the largest priority first

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= SHARE_MAX:
            allowed = f"above 0 and at most {SHARE_MAX:g}: a group is replayed at most once"
            raise InvalidValue("replay.share", self.share, allowed)
        if self.by not in get_args(ReplayBy):
            raise InvalidValue("replay.by", self.by, " or ".join(get_args(ReplayBy)))

    def count(self, step: int, groups_per_step: int) -> int:
        """Returns the number of replays of ``step`` beside its ``groups_per_step`` fresh groups.

        Steps 0 to n together never have more than the share, and less than one group fewer.
        """
        share = Fraction(str(self.share))
        replays = groups_per_step * share / (1 - share)
        return math.floor((step + 1) * replays) - math.floor(step * replays)

    def choose(self, step: int, groups_per_step: int, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Returns the replays of ``step``, best first. Only candidates of earlier steps within their bound count."""
        allowed = [each for each in candidates if each.trained_step < step <= each.deadline]
        allowed.sort(key=self._order)
        return allowed[: self.count(step, groups_per_step)]

    def _order(self, each: Candidate) -> tuple[float, int, str]:
        return (-each.priority if self.by == "priority" else 0.0, -each.version, each.group_id)


class ReplayBuffer:
    """Groups of earlier steps that a trainer may train on once more. Not thread-safe.

    A group whose valid rewards are all equal teaches nothing and is not held. A group leaves when it is replayed, when
    its bound has passed, or as the oldest of more than ``groups_max``.
    """

    def __init__(self, share: float, by: ReplayBy = "age", groups_max: int = GROUPS_MAX) -> None:
        """Raises InvalidValue for an option out of its range."""
        if groups_max < 1:
            raise InvalidValue("replay.groups_max", groups_max, "1 or more")
        self.planner = ReplayPlanner(share, by)
        self._groups_max = groups_max
        self._held: dict[str, tuple[TrajectoryGroup, Candidate]] = {}
        self._chosen: dict[str, tuple[TrajectoryGroup, Candidate]] = {}  # replays of the step that began last
        self._step = -1
        self._window_versions = 1

    def __len__(self) -> int:
        return len(self._held)

    def check(self, window_versions: int) -> None:
        """Raises Conflict if no group could be replayed within a window of so many versions."""
        if window_versions < 2:
            allowed = "0 (no replay), or a service with window.size 2 or more"
            why = "finds no group: window.size is 1, so no group may be trained on in a later step"
            raise Conflict("replay.share", self.planner.share, allowed, why)

    def begin(self, step: int, groups_per_step: int, window_versions: int) -> tuple[TrajectoryGroup, ...]:
        """Returns the replays of ``step``, with its number and their staleness in it. Call it once before the step's
        groups.

        A step that begins again has the same replays. ``window_versions`` is for groups that name no window.
        """
        if step <= self._step:
            self._held |= self._chosen
        self._step, self._window_versions, self._chosen = step, window_versions, {}
        self._held = {
            name: entry for name, entry in self._held.items() if entry[1].trained_step < step <= entry[1].deadline
        }
        chosen = self.planner.choose(step, groups_per_step, [candidate for _, candidate in self._held.values()])
        self._chosen = {each.group_id: self._held.pop(each.group_id) for each in chosen}
        return tuple(_at(group, step) for group, _ in self._chosen.values())

    def add(self, group: TrajectoryGroup) -> None:
        """Holds a group of the step that began last, for later steps."""
        candidate = Candidate.of(group, self._window_versions)
        if not candidate.priority or candidate.deadline <= candidate.trained_step:
            return
        self._held[group.group_id] = group, candidate
        if len(self._held) > self._groups_max:
            del self._held[min(self._held, key=lambda name: (self._held[name][1].trained_step, name))]

    def to_bytes(self) -> bytes:
        """Returns the groups that later steps may replay, for a checkpoint."""
        return b"".join(_framed(group) for group, _ in self._held.values())

    def restore(self, content: bytes, window_versions: int, decoder: Decoder | None = None) -> None:
        """Restores :meth:`to_bytes`'s content. ``decoder`` decodes texts. Raises InvalidValue for other bytes."""
        groups = list(_groups(content, decoder))
        self._step, self._chosen = -1, {}
        self._held = {each.group_id: (each, Candidate.of(each, window_versions)) for each in groups}


def _at(group: TrajectoryGroup, step: int) -> TrajectoryGroup:
    members = (replace(each, trained_step=step, staleness=step - each.behaviour_version) for each in group.trajectories)
    return TrajectoryGroup(group.group_id, tuple(members))


def _framed(group: TrajectoryGroup) -> bytes:
    message = pb.TrajectoryGroup(group_id=group.group_id)
    message.trajectories.extend(map(trajectory_to_wire, group.trajectories))
    content = message.SerializeToString()
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


def _groups(content: bytes, decoder: Decoder | None) -> Iterator[TrajectoryGroup]:
    place = 0
    while place < len(content):
        begin = place + _LENGTH_BYTES
        place = begin + int.from_bytes(content[place:begin], "little")
        try:
            if place > len(content):
                raise DecodeError("it ends early")
            yield group_from_wire(pb.TrajectoryGroup.FromString(content[begin:place]), decoder=decoder)
        except (DecodeError, IndexError) as error:
            raise InvalidValue("replay buffer", f"{len(content)} bytes", f"as a checkpoint has it ({error})") from error
