"""Recomputes the three guarantees from the delivered and the trained groups, without asking the service.

The run record (one row per delivered trajectory) and the trainer's list of group ids are independent of the service's
counters. :mod:`dora.ops.demo.report` compares them with the counters.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dora.errors import InvalidValue

Row = Mapping[str, Any]  # a delivered trajectory, with the keys of the run record
Trained = Mapping[int, Sequence[str]]  # trained group ids by committed step


@dataclass(frozen=True, slots=True)
class AuditFindings:
    """The findings from run record and trainer. Ids are sorted."""

    groups_trained: int
    groups_lost: tuple[str, ...]  # trained but not fully recorded, or delivered for a committed step but not trained
    groups_duplicated: tuple[str, ...]
    c1_violations: tuple[str, ...]  # ids of trajectories that do not have one version alone
    staleness_max: int  # over committed steps
    staleness_misstated: tuple[str, ...]  # ids of trajectories whose staleness is not trained step - behaviour version
    trained_early: tuple[str, ...] = ()  # ids of trajectories trained before their version was published


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One committed step, from its recorded trajectories. ``mean_reward`` is None if no reward was valid."""

    step: int
    mean_reward: float | None
    staleness_mean: float
    staleness_max: int
    trajectories: int
    tokens: int
    answer: str  # the verifier's log for the response of median reward; may be empty
    median_id: str = ""  # this response's id; empty: no reward was valid


def read_record(path: Path) -> list[Row]:
    """Reads the rows of a ``trajectories.jsonl``. Raises InvalidValue for a missing file or an incomplete line."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise InvalidValue("record", str(path), f"a readable file ({error.strerror})") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{path.name} line {number}", line[:80], "one JSON object per line") from error
    return rows


def audit(rows: Sequence[Row], trained: Trained) -> AuditFindings:
    """Checks C1 to C3 over ``rows``.

    A group is lost if the trainer trained it and the run record lacks one of its samples, if the record contains only a
    part of it, or if it was delivered for a step that was committed without it. It is duplicated if it was trained
    twice or one of its trajectories was delivered twice.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["group_id"]].append(row)
    times_trained = Counter(group_id for ids in trained.values() for group_id in ids)
    lost = {group_id for group_id in times_trained if group_id not in groups}
    lost |= {group_id for group_id, members in groups.items() if not _whole(members)}
    lost |= {
        group_id
        for group_id, members in groups.items()
        if group_id not in times_trained and any(row["trained_step"] in trained for row in members)
    }
    duplicated = {group_id for group_id, times in times_trained.items() if times > 1}
    duplicated |= {group_id for group_id, members in groups.items() if _repeats(members)}
    return AuditFindings(
        groups_trained=len(times_trained),
        groups_lost=tuple(sorted(lost)),
        groups_duplicated=tuple(sorted(duplicated)),
        c1_violations=tuple(sorted(row["trajectory_id"] for row in rows if _mixed(row))),
        staleness_max=max((_staleness(row) for row in rows if row["trained_step"] in trained), default=0),
        staleness_misstated=tuple(
            sorted(row["trajectory_id"] for row in rows if row["staleness"] != _staleness(row)),
        ),
        trained_early=tuple(sorted(row["trajectory_id"] for row in rows if _staleness(row) < 0)),
    )


def step_summaries(rows: Iterable[Row], trained: Trained) -> list[StepSummary]:
    """Summarizes each committed step, in order. Steps without a recorded trajectory are omitted."""
    members: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row["trained_step"] in trained:
            members[row["trained_step"]].append(row)
    return [_summary(step, members[step]) for step in sorted(members)]


def quarters(steps: Sequence[StepSummary]) -> tuple[Sequence[StepSummary], Sequence[StepSummary]]:
    """The first and the last quarter of a run's steps, at least one step each."""
    length = max(1, len(steps) // 4)
    return steps[:length], steps[-length:]


def mean_reward(steps: Sequence[StepSummary]) -> float | None:
    """The mean over the steps with a reward; None if there are none."""
    rewards = [step.mean_reward for step in steps if step.mean_reward is not None]
    return fmean(rewards) if rewards else None


def _summary(step: int, rows: Sequence[Row]) -> StepSummary:
    scored = sorted((row for row in rows if _valid(row)), key=lambda row: float(row["reward"]))
    rewards = [row["reward"] for row in scored]
    staleness = [_staleness(row) for row in rows]
    return StepSummary(
        step=step,
        mean_reward=fmean(rewards) if rewards else None,
        staleness_mean=fmean(staleness),
        staleness_max=max(staleness),
        trajectories=len(rows),
        tokens=sum(row["length_tokens"] for row in rows),
        answer=scored[len(scored) // 2].get("verifier_log", "") if scored else "",
        median_id=scored[len(scored) // 2]["trajectory_id"] if scored else "",
    )


def _valid(row: Row) -> bool:
    reward = row["reward"]
    return reward is not None and math.isfinite(reward) and row.get("reward_valid", True)


def _staleness(row: Row) -> int:
    return int(row["trained_step"]) - int(row["behaviour_version"])


def _mixed(row: Row) -> bool:
    return {segment["version"] for segment in row["worker_history"]} != {row["behaviour_version"]}


def _whole(members: Sequence[Row]) -> bool:
    return {row["sample_index"] for row in members} == set(range(members[0]["group_size"]))


def _repeats(members: Sequence[Row]) -> bool:
    return len({row["trajectory_id"] for row in members}) < len(members)
