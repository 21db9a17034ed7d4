"""The window's arithmetic under random histories (Hypothesis): feasible always, deadlines kept, nothing stuck."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.errors import IllegalTransition
from dora.orchestrator.core.window import Window

SIZES = st.integers(1, 5)
GROUPS = st.integers(1, 6)
WISHES = ["admit", "take", "cancel", "publish", "admit", "take", "cancel", "publish", "withhold", "reject", "release"]
CHOICES = st.lists(st.tuples(st.sampled_from(WISHES), st.integers(0, 4)), max_size=200)


def apply(window: Window, open_versions: list[int], what: str, pick: int) -> int | None:
    """One random wish; illegal ones must raise and change nothing. Returns the staleness of a group taken."""
    before = (window.step, window.left, window.newest, window.slack())
    version = window.oldest_live + pick % window.size
    try:
        if what == "admit":
            window.admit(version)
            open_versions.append(version)
        elif what == "publish":
            rejected = bool(window.rejected)
            window.publish()
            assert not rejected, "published past a rejected version"
        elif what in ("withhold", "reject", "release"):
            counts = dict(window.open_by_deadline)
            getattr(window, what)(version)
            assert before == (window.step, window.left, window.newest, window.slack()) and counts == dict(
                window.open_by_deadline
            ), "who may go on changes, and no count"
        elif open_versions:
            version = open_versions[pick % len(open_versions)]
            step = window.step
            if what == "cancel":
                window.give_back(version)
            else:
                rejected = bool(window.rejected)
                window.take(version)
                assert not rejected, "taken past a rejected version"
            open_versions.remove(version)
            return step - version if what == "take" else None
    except IllegalTransition:
        assert before == (window.step, window.left, window.newest, window.slack())
    return None


def slack_by_definition(window: Window, open_versions: list[int]) -> list[int]:
    """left + B * k - open(s + k), counted group by group."""
    deadlines = [version + window.size - 1 for version in open_versions]
    return [
        window.left + window.groups_per_step * k - sum(deadline <= window.step + k for deadline in deadlines)
        for k in range(window.size)
    ]


@given(SIZES, GROUPS, CHOICES)
@settings(max_examples=400)
def test_always_feasible_and_never_stale(size: int, groups: int, choices: list[tuple[str, int]]) -> None:
    window, open_versions = Window(size, groups), []
    for what, pick in choices:
        staleness = apply(window, open_versions, what, pick)
        assert window.slack() == slack_by_definition(window, open_versions)
        assert min(window.slack()) >= 0
        for version in range(window.oldest_live, window.newest + 1):
            most = min(window.slack()[window.deadline(version) - window.step :])
            assert window.admissible(version) == (0 if version in window.withheld else most)
        assert staleness is None or 0 <= staleness <= size - 1
        assert window.open_groups == len(open_versions)
        assert all(window.deadline(version) >= window.step for version in open_versions)
        assert window.newest in (window.step - 1, window.step)
        assert window.rejected <= window.withheld <= set(range(1, window.newest + 1))
        assert all(version >= window.oldest_kept for version in window.rejected)
        assert window.newest_sound == max(set(range(window.newest + 1)) - window.withheld)


@given(SIZES, GROUPS, CHOICES)
@settings(max_examples=200)
def test_never_stuck(size: int, groups: int, choices: list[tuple[str, int]]) -> None:
    """From any reachable state, taking the earliest deadline and admitting the newest version fills step after step.

    What is withheld or rejected has to be released first: a version proves good, or is published anew.
    """
    window, open_versions = Window(size, groups), []
    for what, pick in choices:
        apply(window, open_versions, what, pick)
    for version in list(window.withheld):
        window.release(version)
    goal = window.step + 3
    for _ in range(20 * groups * (size + 3)):
        if window.step >= goal:
            return
        if window.newest < window.step:
            window.publish()
        elif open_versions and window.takeable(min(open_versions)):
            window.take(min(open_versions))
            open_versions.remove(min(open_versions))
        else:
            window.admit(window.newest)
            open_versions.append(window.newest)
    raise AssertionError(f"stuck at step {window.step}: slack {window.slack()}")


@given(SIZES, GROUPS)
def test_admissible_is_exact(size: int, groups: int) -> None:
    window = Window(size, groups)
    for _ in range(window.admissible(0)):
        window.admit(0)
    with pytest.raises(IllegalTransition):
        window.admit(0)
    assert window.open_groups == groups * size  # version 0 may fill the steps 0 .. W-1


def test_one_version_is_synchronous() -> None:
    window = Window(1, 2)
    window.admit(0)
    window.admit(0)
    window.take(0)
    assert window.take(0)
    assert window.admissible(0) == 0  # version 0 is over, version 1 not yet published
    assert window.publish() == 1
    assert window.admissible(1) == 2


def test_a_later_deadline_waits_for_an_earlier_one() -> None:
    window = Window(2, 2)
    for _ in range(4):
        window.admit(0)
    window.take(0)
    window.take(0)
    window.publish()
    window.admit(1)
    window.admit(1)
    assert not window.takeable(1)  # two groups of version 0 are due at step 1, which takes two
    with pytest.raises(IllegalTransition):
        window.take(1)


def test_short_step_needs_an_empty_window() -> None:
    window = Window(2, 3)
    with pytest.raises(IllegalTransition):
        window.close_short()
    window.admit(0)
    window.take(0)
    window.close_short()
    assert (window.step, window.left) == (1, 3)


def test_groups_per_step_is_set_once() -> None:
    window = Window(2, 0)
    assert window.admissible(0) == 0
    window.set_groups_per_step(4)
    assert window.admissible(0) == 8
    with pytest.raises(IllegalTransition):
        window.set_groups_per_step(5)


@given(SIZES, GROUPS, CHOICES, st.integers(1, 4))
@settings(max_examples=200)
def test_a_rejection_is_as_if_it_had_not_been(
    size: int, groups: int, choices: list[tuple[str, int]], again: int
) -> None:
    """Once it is published anew the window is as before: the same counts, the same things allowed."""
    window, open_versions = Window(size, groups), []
    for what, pick in choices:
        apply(window, open_versions, what, pick)
    for version in list(window.withheld):
        window.release(version)
    version = window.newest
    if not version:
        return
    state = vars(window).copy()
    allowed = {v: (window.admissible(v), window.takeable(v)) for v in range(version + 1)}
    for _ in range(again):
        window.reject(version)
        assert not any(window.takeable(v) for v in range(version + 1)) and not window.admissible(version)
        assert {v: window.admissible(v) for v in range(version)} == {v: allowed[v][0] for v in range(version)}
        window.release(version)
    assert vars(window) == state
    assert {v: (window.admissible(v), window.takeable(v)) for v in range(version + 1)} == allowed


def test_only_what_a_trainer_published_is_withheld() -> None:
    window = Window(2, 1)
    for version in (0, 1):
        with pytest.raises(IllegalTransition, match="cannot be withheld"):
            window.reject(version)
