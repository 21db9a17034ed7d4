"""Experience replay: which groups a step may train on once more, whatever arrives and whenever the trainer restarts."""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.client.replay import Candidate, ReplayBuffer, ReplayBy, ReplayPlanner, priority_of
from dora.data.trajectory import TrajectoryGroup
from dora.errors import Conflict, InvalidValue
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused
from tests.snippets import snippet
from tests.sweeps import examples

GROUPS = 4
SHARES = st.sampled_from([0.1, 0.25, 0.3, 0.5])
BY = st.sampled_from(["age", "priority"])
RUN = {"share": SHARES, "by": BY, "window": st.integers(2, 5), "seed": st.integers(0, 999)}


def group_of(name: str, step: int, version: int, rewards: list[float], window: int = 0) -> TrajectoryGroup:
    members = (
        make_trajectory(
            step, 0, sample, len(rewards), trajectory_id=f"{name}-{sample}", group_id=name, behaviour_version=version,
            staleness=step - version, reward=reward, window_versions=window,
        )
        for sample, reward in enumerate(rewards)
    )  # fmt: skip
    return TrajectoryGroup(name, tuple(members))


def stream(step: int, window: int, seed: int) -> list[TrajectoryGroup]:
    """A step's groups, in an order of their own. Some teach nothing."""
    draw = random.Random(f"{seed} {step}")
    versions = [max(0, step - draw.randrange(window)) for _ in range(GROUPS)]
    rewards = [[0.0, draw.choice([0.0, 0.5, 1.0])] for _ in range(GROUPS)]
    return [
        group_of(f"g{step}.{index}", step, version, rewards[index], window) for index, version in enumerate(versions)
    ]


def run(buffer: ReplayBuffer, steps: range, window: int, seed: int) -> list[list[TrajectoryGroup]]:
    """The replays of each step."""
    found = []
    for step in steps:
        found.append(list(buffer.begin(step, GROUPS, window)))
        for group in stream(step, window, seed):
            buffer.add(group)
    return found


@given(**RUN)
@settings(max_examples=examples(60), deadline=None)
def test_replays_are_of_earlier_steps_in_their_bound_and_once(
    share: float, by: ReplayBy, window: int, seed: int
) -> None:
    fresh = {group.group_id: group for step in range(12) for group in stream(step, window, seed)}
    of_steps = run(ReplayBuffer(share, by), range(12), window, seed)
    for step, replays in enumerate(of_steps):
        for group in replays:
            delivered = fresh[group.group_id]
            assert set(group.versions) == set(delivered.versions), "the version that sampled it stays"
            assert delivered.trajectories[0].trained_step < step == group.trajectories[0].trained_step
            assert group.staleness.tolist() == [step - group.versions[0]] * 2
            assert group.staleness.max() <= window - 1
            assert priority_of(group) > 0.0
    assert max(Counter(group.group_id for replays in of_steps for group in replays).values(), default=1) == 1


@given(**RUN)
@settings(max_examples=examples(60), deadline=None)
def test_the_share_is_never_exceeded_over_the_steps_so_far(share: float, by: ReplayBy, window: int, seed: int) -> None:
    replayed = 0
    for step, replays in enumerate(run(ReplayBuffer(share, by), range(12), window, seed)):
        replayed += len(replays)
        fresh = (step + 1) * GROUPS
        assert Fraction(replayed, fresh + replayed) <= Fraction(str(share))


@given(share=SHARES, groups=st.integers(1, 64), steps=st.integers(1, 50))
def test_over_many_steps_the_planned_replays_are_the_share_but_for_one_group(
    share: float, groups: int, steps: int
) -> None:
    part = Fraction(str(share))
    planned = sum(ReplayPlanner(share).count(step, groups) for step in range(steps))
    assert 0 <= steps * groups * part / (1 - part) - planned < 1
    assert all(ReplayPlanner(share).count(step, groups) <= groups for step in range(steps))


@given(**RUN, end=st.integers(1, 10), begun=st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_a_trainer_that_resumes_with_its_buffer_replays_the_same_groups(
    share: float, by: ReplayBy, window: int, seed: int, end: int, begun: bool
) -> None:
    straight = run(ReplayBuffer(share, by), range(12), window, seed)
    first, second = ReplayBuffer(share, by), ReplayBuffer(share, by)
    run(first, range(end), window, seed)
    kept = first.to_bytes()
    if begun:  # the step that was begun after the checkpoint is begun again
        first.begin(end, GROUPS, window)
    second.restore(kept, window)
    again = run(second, range(end, 12), window, seed)
    assert [names(each) for each in again] == [names(each) for each in straight[end:]]
    for ours, theirs in zip(again, straight[end:], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert [each.to_json_dict() for each in one.trajectories] == [
                each.to_json_dict() for each in other.trajectories
            ]


def names(groups: list[TrajectoryGroup] | tuple[TrajectoryGroup, ...]) -> list[str]:
    return [group.group_id for group in groups]


@given(**RUN)
@settings(max_examples=examples(30), deadline=None)
def test_the_order_of_arrival_and_a_step_that_begins_again_change_nothing(
    share: float, by: ReplayBy, window: int, seed: int
) -> None:
    one, other = ReplayBuffer(share, by), ReplayBuffer(share, by)
    for step in range(10):
        expected = names(one.begin(step, GROUPS, window))
        for group in stream(step, window, seed):
            one.add(group)
        other.begin(step, GROUPS, window)
        for group in stream(step, window, seed)[:2]:  # then its stream broke, and the trainer starts the step anew
            other.add(group)
        assert names(other.begin(step, GROUPS, window)) == expected
        for group in reversed(stream(step, window, seed)):
            other.add(group)


def test_age_prefers_the_newest_version_and_priority_the_largest_advantage() -> None:
    candidates = [
        Candidate("old", version=2, trained_step=3, deadline=9, priority=0.5),
        Candidate("new", version=3, trained_step=3, deadline=9, priority=0.1),
        Candidate("over", version=1, trained_step=3, deadline=3, priority=0.9),
        Candidate("own", version=4, trained_step=4, deadline=9, priority=0.9),
    ]
    chosen = [[each.group_id for each in ReplayPlanner(0.5, by).choose(4, 1, candidates)] for by in ("age", "priority")]
    assert chosen == [["new"], ["old"]]
    assert [each.group_id for each in ReplayPlanner(0.5).choose(4, 4, candidates)] == ["new", "old"]


def test_the_priority_is_the_mean_absolute_advantage_of_valid_rewards() -> None:
    assert priority_of(group_of("g", 0, 0, [1.0, 0.0, 0.0, 1.0])) == pytest.approx(0.5)
    assert priority_of(group_of("g", 0, 0, [1.0, 0.0])) == pytest.approx(0.5)
    members = group_of("g", 0, 0, [1.0, 0.0, 0.0]).trajectories
    failed = TrajectoryGroup("g", (*members[:2], replace(members[2], reward_valid=False)))
    assert priority_of(failed) == pytest.approx(0.5)
    assert priority_of(group_of("g", 0, 0, [1.0, 1.0])) == 0.0


def test_a_full_buffer_lets_its_oldest_groups_go() -> None:
    buffer = ReplayBuffer(0.5, groups_max=3)
    for step in range(2):
        buffer.begin(step, 1, 9)
        for index in range(3):
            buffer.add(group_of(f"g{step}.{index}", step, step, [0.0, 1.0]))
    assert len(buffer) == 3 and names(buffer.begin(2, 8, 9)) == ["g1.0", "g1.1", "g1.2"]


def test_a_group_without_a_later_step_or_a_lesson_is_not_held() -> None:
    buffer = ReplayBuffer(0.5)
    buffer.begin(3, 1, 2)
    buffer.add(group_of("stale", 3, 2, [0.0, 1.0]))
    buffer.add(group_of("equal", 3, 3, [1.0, 1.0]))
    assert len(buffer) == 0
    buffer.add(group_of("admitted in a wider window", 3, 2, [0.0, 1.0], window=3))
    assert len(buffer) == 1


async def test_a_trainer_takes_a_buffer_as_the_page_says() -> None:
    names: dict[str, Any] = {}
    exec(snippet("docs/training.md", "ReplayBuffer"), names)
    assert names["trainer"].replay is names["buffer"]
    assert names["buffer"].planner == ReplayPlanner(0.25, "priority")


def test_options_and_bytes_out_of_range_are_refused() -> None:
    for share in (0.0, 0.51, -0.1, float("nan")):
        with refused(InvalidValue, field="replay.share"):
            ReplayBuffer(share)
    with refused(InvalidValue, field="replay.by", value="size"):
        ReplayBuffer(0.5, "size")  # type: ignore[arg-type]
    with refused(InvalidValue, field="replay.groups_max", value=0):
        ReplayBuffer(0.5, groups_max=0)
    with refused(Conflict, field="replay.share", value=0.5):
        ReplayBuffer(0.5).check(window_versions=1)
    ReplayBuffer(0.5).check(window_versions=2)
    buffer = ReplayBuffer(0.5)
    buffer.begin(0, 1, 2)
    buffer.add(group_of("g", 0, 0, [0.0, 1.0]))
    for content in (buffer.to_bytes()[:-1], b"\x05" + bytes(7) + b"abcde"):
        with refused(InvalidValue, field="replay buffer"):
            ReplayBuffer(0.5).restore(content, 2)
