"""Checks a run's record against the promises, alone and together with the requests and the trainer's account."""

from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora.data.run_record import STEPS_FILE, TRAJECTORIES_FILE
from dora.data.trajectory import Trajectory
from dora.ops.verify.check import read_trajectories
from dora.ops.verify.committed import read_steps

MUST_BE_0: Final = ("lost", "duplicated", "c1_violations", "c3_violations")

Trained = Sequence[tuple[int, Sequence[str]]]  # the group ids of each step, as a trainer said after its commit


@dataclass(frozen=True, slots=True)
class Promises:
    """Counts a record's trajectories that break C1 to C3; those of a session's branches count as one."""

    trajectories: int
    lost: int
    duplicated: int
    c1_violations: int
    c3_violations: int


def promises(
    record: Path, prompts: Set[str], trained: Trained, window: int, group_size: int, alone: Set[str] = frozenset()
) -> Promises:
    """``prompts``: the ids of those that the service was given, each of which one step has to train on once.
    ``alone``: those whose group has one member instead of ``group_size``.

    A trajectory is lost if its prompt is not committed whole, or if the trainer was told that a step was committed with
    a group that the record does not have there. It is duplicated if two steps, or two groups of a prompt, have it, or
    if two lines do.
    """
    lines = read_trajectories(record / TRAJECTORIES_FILE)
    steps, _ = read_steps(record / STEPS_FILE)
    times = Counter(group_id for step in steps.values() for group_id in step.groups)
    members: dict[str, list[Trajectory]] = defaultdict(list)
    for each in lines:
        if each.group_id in times:
            members[each.group_id].append(each)
    of_prompt: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for group_id, group in members.items():
        of_prompt[group[0].prompt_id] |= {(group_id, each.sample_index) for each in group}
    said = [(step, group_id) for step, group_ids in trained for group_id in group_ids]
    unrecorded = [(step, group) for step, group in said if step not in steps or group not in steps[step].groups]
    repeated = sum(count - 1 for count in Counter(each.trajectory_id for each in lines).values())
    sizes = defaultdict(lambda: group_size, dict.fromkeys(alone, 1))
    return Promises(
        trajectories=sum(map(len, of_prompt.values())),
        lost=sum(max(sizes[prompt] - len(of_prompt[prompt]), 0) for prompt in prompts) + group_size * len(unrecorded),
        duplicated=repeated
        + group_size * sum(count - 1 for count in times.values())
        + group_size * sum(count - 1 for count in Counter(said).values())
        + sum(max(len(samples) - sizes[prompt], 0) for prompt, samples in of_prompt.items()),
        c1_violations=sum(map(_is_mixed, lines)),
        c3_violations=sum(not 0 <= each.trained_step - each.behaviour_version < window for each in lines),
    )


def _is_mixed(trajectory: Trajectory) -> bool:
    return {segment.version for segment in trajectory.worker_history} != {trajectory.behaviour_version}
