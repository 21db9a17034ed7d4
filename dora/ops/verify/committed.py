"""Checks that a run record contains every step that it lists as committed. Every violation is one sentence."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any, Final

from dora.data.run_record import (
    ALL_WEIGHTS,
    CANCELLED_FILE,
    REPUBLISHED,
    STEPS_FILE,
    VERSIONS_FOLDER,
    WITHDRAWN,
    CommittedStep,
    keeps_weights,
)
from dora.data.trajectory import Trajectory
from dora.errors import InvalidValue
from dora.ops.verify import replays
from dora.system import line_file

SHOWN_MAX: Final = 5  # groups named in one sentence

Steps = dict[int, CommittedStep]
Members = Mapping[str, list[Trajectory]]  # by group id


def missing(
    folder: Path, trajectories: Sequence[Trajectory], window_versions: int | None = None
) -> tuple[int, Iterator[str]]:
    """Returns the number of committed steps in the record of ``folder``, and sentences on what they lack.

    ``window_versions`` also limits the staleness of replayed groups, besides the windows in the record. Raises
    InvalidValue for an invalid line.
    """
    if not (folder / STEPS_FILE).is_file():
        published = [name for name in _versions_in(folder) if name]
        lacks = f"{STEPS_FILE} is missing: the record does not say which steps published versions {published}."
        return 0, iter([lacks] if published else [])
    steps, withdrawn = read_steps(folder / STEPS_FILE)
    return len(steps), chain(
        _twice(folder / STEPS_FILE),
        violations(folder, trajectories, steps, withdrawn),
        _replays(steps, trajectories, window_versions),
    )


def without_weights(folder: Path) -> set[int]:
    """The versions whose weights are not there, and that the service was not asked to keep."""
    file = folder / STEPS_FILE
    return _left_out(read_steps(file)[0]) - set(_versions_in(folder)) if file.is_file() else set()


def groups_replayed(folder: Path) -> int:
    """The number of groups that trainers say they trained on once more."""
    file = folder / STEPS_FILE
    return sum(len(step.replayed) for step in read_steps(file)[0].values()) if file.is_file() else 0


def read_steps(file: Path) -> tuple[Steps, set[int]]:
    """The committed steps, and the versions withdrawn at the end. A step that was written again has its last line.
    Raises InvalidValue for an invalid line.
    """
    steps: Steps = {}
    withdrawn: set[int] = set()
    for number, line in enumerate(whole_lines(file), start=1):
        try:
            record = json.loads(line)
            if WITHDRAWN in record:
                withdrawn.add(int(record[WITHDRAWN]))
                continue
            if REPUBLISHED in record:
                withdrawn.discard(int(record[REPUBLISHED]))
                continue
            groups = {str(group): int(count) for group, count in record["groups"].items()}
            step = CommittedStep(
                int(record["step"]),
                int(record["version"]),
                groups,
                float(record["committed_at"]),
                weights=str(record.get("weights", ALL_WEIGHTS)),
                replayed=tuple(map(str, record.get("replayed", ()))),
            )
            keeps_weights(step.weights, step.version)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidValue(f"{file.name} line {number}", line[:80], "a committed step") from error
        steps[step.step] = step
        withdrawn.discard(step.version)
    return steps, withdrawn


def whole_lines(file: Path) -> Iterator[bytes]:
    """The lines of a file of the record. A last line torn by a crash was never acknowledged, and is omitted.

    Raises InvalidValue if the file cannot be read.
    """
    try:
        yield from line_file.whole_lines(file)
    except OSError as error:
        raise InvalidValue("record", str(file), f"a readable file ({error.strerror})") from error


def violations(folder: Path, trajectories: Sequence[Trajectory], steps: Steps, withdrawn: Set[int]) -> Iterator[str]:
    """Compares the record with its committed steps: missing content, and content beyond them."""
    members: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        members[trajectory.group_id].append(trajectory)
    last = max(steps, default=-1)
    for number in sorted(set(range(last)) - steps.keys()):
        yield f"step {number} is missing in {STEPS_FILE}, though step {last} was committed."
    committed_in: dict[str, int] = {}
    for step in steps.values():
        yield from _of_step(step, members)
        for group_id in step.groups:
            if group_id in committed_in:
                yield f"group {group_id} was committed in step {committed_in[group_id]} and in step {step.step}."
            committed_in[group_id] = step.step
    yield from _beside(folder, members, committed_in, last)
    yield from _versions(folder, steps, {each.trained_step for each in trajectories}, withdrawn)


def _twice(file: Path) -> Iterator[str]:
    """Finds repeated commits with different groups, which are of different runs. Two equal lines are one commit."""
    groups: dict[int, Any] = {}
    for line in whole_lines(file):
        record = json.loads(line)
        if "step" in record and groups.setdefault(int(record["step"]), record["groups"]) != record["groups"]:
            yield f"step {record['step']} stands in {STEPS_FILE} twice, with different groups."


def _of_step(step: CommittedStep, members: Members) -> Iterator[str]:
    if step.version != step.step + 1:
        yield f"step {step.step} is said to have published version {step.version}."
    lacking = [group_id for group_id, count in step.groups.items() if len(members.get(group_id, ())) != count]
    if lacking:
        found = ", ".join(
            f"{group_id} ({len(members.get(group_id, ()))} of {step.groups[group_id]} trajectories)"
            for group_id in lacking[:SHOWN_MAX]
        )
        more = f" and {len(lacking) - SHOWN_MAX} others" if len(lacking) > SHOWN_MAX else ""
        yield f"step {step.step} was committed, and the record lacks groups of it: {found}{more}."
    for group_id in step.groups:
        others = sorted({each.trained_step for each in members.get(group_id, ())} - {step.step})
        if others:
            yield f"group {group_id} was committed in step {step.step}, and is recorded of step {others[0]}."


def _replays(steps: Steps, trajectories: Sequence[Trajectory], window_versions: int | None) -> Iterator[str]:
    trained = {group_id: step.step for step in steps.values() for group_id in step.groups}
    last_steps = {}
    for each in trajectories:
        windows = [window for window in (each.window_versions, window_versions) if window]
        if windows:
            last_steps[each.group_id] = each.behaviour_version + min(windows) - 1
    replayed = {step.step: step.replayed for step in steps.values() if step.replayed}
    yield from replays.violations(replayed, trained, last_steps)


def _beside(folder: Path, members: Members, committed_in: Mapping[str, int], last: int) -> Iterator[str]:
    file = folder / CANCELLED_FILE
    cancelled = {_group_of(line) for line in whole_lines(file)} if file.is_file() else set()
    for group_id in sorted(members.keys() - committed_in.keys() - cancelled):
        step = members[group_id][0].trained_step
        if step <= last:
            yield f"group {group_id} is recorded of step {step}, which was committed without it."
        elif step > last + 1:
            yield f"group {group_id} is recorded of step {step}, though step {step - 1} was not committed."


def _group_of(line: bytes) -> Any:
    try:
        return json.loads(line)["group_id"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValue(CANCELLED_FILE, line[:80], "a cancelled group") from error


def _versions(folder: Path, steps: Steps, trained: Set[int], withdrawn: Set[int]) -> Iterator[str]:
    kept, left_out = set(_versions_in(folder)), _left_out(steps)
    for step in sorted(steps):
        if step + 1 not in kept | withdrawn | left_out:
            yield f"version {step + 1}, which step {step} published, is not in the record."
    following = max(steps, default=-1) + 1
    for version in sorted(kept - {0} - withdrawn):
        broken_off = version - 1 == following and following in trained
        if version - 1 not in steps and not broken_off:
            yield f"version {version} is in the record, and step {version - 1}, which published it, is not."


def _left_out(steps: Steps) -> set[int]:
    last = max(steps, default=-1)
    return {step + 1 for step, each in steps.items() if step != last and not keeps_weights(each.weights, step + 1)}


def _versions_in(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in (folder / VERSIONS_FOLDER).glob("*") if entry.name.isdigit())
