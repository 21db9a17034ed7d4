"""The window's arithmetic under random histories (Hypothesis): feasible always, deadlines kept, nothing stuck."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.core.groups.window import Window
from dora.errors import IllegalTransition
from tests.refusals import refused
from tests.sweeps import examples

SIZES = st.integers(1, 5)
GROUPS = st.integers(1, 6)
OFTEN = ["admit", "take", "cancel", "publish"]
WISHES = [*OFTEN, *OFTEN, "quarantine", "reject", "release", "resize"]
CHOICES = st.lists(st.tuples(st.sampled_from(WISHES), st.integers(0, 4)), max_size=200)
MOST = 5


@dataclass(frozen=True)
class Group:
    """An open group: its version, and the window that was in force when it was admitted."""

    version: int
    size: int

    @property
    def deadline(self) -> int:
        return self.version + self.size - 1


def apply(window: Window, groups: list[Group], what: str, pick: int) -> None:
    """One random wish; illegal ones must raise and change nothing. No group is taken too late."""
    before = (window.step, window.left, window.newest, window.slack())
    version = window.oldest_live + pick % window.size
    try:
        if what == "admit":
            window.admit(version)
            groups.append(Group(version, window.size))
        elif what == "resize":
            window.set_size(1 + pick % MOST)
            assert before[:3] == (window.step, window.left, window.newest)
        elif what == "publish":
            rejected = bool(window.rejected)
            window.publish()
            assert not rejected, "published past a rejected version"
        elif what in ("quarantine", "reject", "release"):
            counts = dict(window.open_by_deadline)
            getattr(window, what)(version)
            assert before == (window.step, window.left, window.newest, window.slack()) and counts == dict(
                window.open_by_deadline
            ), "who may go on changes, and no count"
        elif groups:
            group = groups[pick % len(groups)]
            if what == "cancel":
                window.give_back(group.version, group.deadline)
            else:
                rejected, step = bool(window.rejected), window.step
                window.take(group.version, group.deadline)
                assert not rejected, "taken past a rejected version"
                assert 0 <= step - group.version <= group.size - 1
            groups.remove(group)
    except IllegalTransition:
        assert before == (window.step, window.left, window.newest, window.slack())


def slack_by_definition(window: Window, groups: list[Group]) -> list[int]:
    """left + B * k - open(s + k), counted group by group."""
    horizon = max((window.step + window.size - 1, *(group.deadline for group in groups)))
    return [
        window.left + window.groups_per_step * k - sum(group.deadline <= window.step + k for group in groups)
        for k in range(horizon - window.step + 1)
    ]


@given(SIZES, GROUPS, CHOICES)
@settings(max_examples=examples(400))
def test_always_feasible_and_never_stale(size: int, groups: int, choices: list[tuple[str, int]]) -> None:
    """However the window is resized meanwhile: each group is bound by the one that it was admitted in."""
    window, is_open = Window(size, groups), []
    live = retired = 0
    for what, pick in choices:
        apply(window, is_open, what, pick)
        assert window.slack() == slack_by_definition(window, is_open)
        assert min(window.slack()) >= 0
        for version in range(window.oldest_live, window.newest + 1):
            most = min(window.slack()[max(0, window.deadline(version) - window.step) :])
            admits = version >= window.oldest_admitting and version not in window.quarantined
            assert window.admissible(version) == (most if admits else 0)
        assert window.open_groups == len(is_open)
        assert all(group.deadline >= window.step for group in is_open)
        assert all(group.version >= window.oldest_live for group in is_open)
        assert window.oldest_live >= retired, "a version that was let go is back"
        live, retired = max(live, window.newest - window.oldest_live + 1), window.oldest_kept
        assert window.newest in (window.step - 1, window.step)
        assert window.rejected <= window.quarantined <= set(range(1, window.newest + 1))
        assert all(version >= window.oldest_kept for version in window.rejected)
        assert window.newest_sound == max(set(range(window.newest + 1)) - window.quarantined)
    assert live <= MOST


@given(SIZES, GROUPS, CHOICES)
@settings(max_examples=examples(200))
def test_never_stuck(size: int, groups: int, choices: list[tuple[str, int]]) -> None:
    """From any reachable state, taking the earliest deadline and admitting the newest version fills step after step.

    What is quarantined or rejected has to be released first: a version proves good, or is published anew.
    """
    window, is_open = Window(size, groups), []
    for what, pick in choices:
        apply(window, is_open, what, pick)
    for version in list(window.quarantined):
        window.release(version)
    goal = window.step + 3
    for _ in range(20 * groups * (size + MOST + 3)):
        if window.step >= goal:
            return
        first = min(is_open, key=lambda group: group.deadline, default=None)
        if window.newest < window.step:
            window.publish()
        elif first is not None and window.takeable(first.deadline):
            window.take(first.version, first.deadline)
            is_open.remove(first)
        else:
            window.admit(window.newest)
            is_open.append(Group(window.newest, window.size))
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
    window.take(0, 0)
    assert window.take(0, 0)
    assert window.admissible(0) == 0  # version 0 is over, version 1 not yet published
    assert window.publish() == 1
    assert window.admissible(1) == 2


def test_a_later_deadline_waits_for_an_earlier_one() -> None:
    window = Window(2, 2)
    for _ in range(4):
        window.admit(0)
    window.take(0, 1)
    window.take(0, 1)
    window.publish()
    window.admit(1)
    window.admit(1)
    assert not window.takeable(2)  # two groups of version 0 are due at step 1, which takes two
    with pytest.raises(IllegalTransition):
        window.take(1, 2)


def test_short_step_needs_an_empty_window() -> None:
    window = Window(2, 3)
    with pytest.raises(IllegalTransition):
        window.close_short()
    window.admit(0)
    window.take(0, 1)
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
@settings(max_examples=examples(200))
def test_a_rejection_is_as_if_it_had_not_been(
    size: int, groups: int, choices: list[tuple[str, int]], again: int
) -> None:
    """Once it is published anew the window is as before: the same counts, the same things allowed."""
    window, is_open = Window(size, groups), []
    for what, pick in choices:
        apply(window, is_open, what, pick)
    for version in list(window.quarantined):
        window.release(version)
    version = window.newest
    if not version:
        return
    state = vars(window).copy()
    deadlines = range(window.horizon + 1)
    allowed = {v: window.admissible(v) for v in range(version + 1)}, [window.takeable(d) for d in deadlines]
    for _ in range(again):
        window.reject(version)
        assert not any(window.takeable(deadline) for deadline in deadlines) and not window.admissible(version)
        assert {v: window.admissible(v) for v in range(version)} == {v: allowed[0][v] for v in range(version)}
        window.release(version)
    assert vars(window) == state
    assert ({v: window.admissible(v) for v in range(version + 1)}, [window.takeable(d) for d in deadlines]) == allowed


def test_only_what_a_trainer_published_is_withheld() -> None:
    window = Window(2, 1)
    for version in (0, 1):
        with refused(IllegalTransition, field="version", value=version):
            window.reject(version)


def test_an_admitted_group_keeps_its_deadline_when_the_window_is_resized() -> None:
    window = Window(3, 1)
    window.admit(0)
    window.set_size(1)
    assert (window.oldest_live, window.deadline(0)) == (0, 0) and dict(window.open_by_deadline) == {2: 1}
    window.admit(0)
    assert dict(window.open_by_deadline) == {2: 1, 0: 1}
    assert window.take(0, 0)
    assert window.publish() == 1
    assert window.oldest_live == window.oldest_kept == 0  # the first group is open still
    assert window.admissible(0) == 0  # though version 0 admits no more
    window.set_size(3)
    assert window.admissible(0) == 0 < window.admissible(1)  # nor ever again
