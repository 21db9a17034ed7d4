"""Groups that end one after the other, as far as there is room."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dora.orchestrator.core.policies.turns import SOONEST, groups_after, left_in_turn

LEFT_S = 100.0


def test_the_group_with_the_longest_response_to_come_ends_last() -> None:
    groups = np.array([7, 3, 7, 5, 3])
    remaining = np.array([10.0, 400.0, 900.0, 50.0, 20.0])
    assert groups_after(groups, remaining).tolist() == [0.0, 1.0, 0.0, 2.0, 1.0]


def test_of_equal_groups_each_has_a_turn_of_its_own() -> None:
    assert sorted(groups_after(np.arange(5), np.full(5, 100.0)).tolist()) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert groups_after(np.array([], dtype=np.int64), np.array([])).tolist() == []


def test_each_group_ends_a_turn_before_the_one_after_it() -> None:
    left_s = left_in_turn(LEFT_S, np.array([0.0, 1.0, 2.0, 50.0]), 4.0, lambda left_s: True)
    assert left_s.tolist() == [100.0, 96.0, 92.0, SOONEST * LEFT_S]


def test_turns_are_as_long_as_there_is_room_for() -> None:
    left_s = left_in_turn(LEFT_S, np.array([0.0, 1.0, 2.0]), 8.0, lambda left_s: bool(left_s[2] >= 90.0))
    assert left_s[0] == 100.0
    assert 90.0 <= left_s[2] <= 90.0 + 2 * 8.0 / 2**7


def test_without_room_for_any_all_end_at_once() -> None:
    assert left_in_turn(LEFT_S, np.array([0.0, 1.0]), 8.0, lambda left_s: False).tolist() == [100.0, 100.0]


@given(
    after=st.lists(st.integers(0, 200), min_size=1, max_size=50),
    turn_s=st.floats(0.0, 20.0),
    least_s=st.floats(0.0, 2 * LEFT_S),
)
def test_nobody_is_asked_for_more_than_fits_nor_left_more_than_there_is(
    after: list[int], turn_s: float, least_s: float
) -> None:
    column = np.array(after, dtype=np.float64)
    left_s = left_in_turn(LEFT_S, column, turn_s, lambda left_s: bool(left_s.min() >= least_s))
    assert (left_s <= LEFT_S).all() and (left_s >= SOONEST * LEFT_S).all()
    assert left_s.min() >= least_s or left_s.tolist() == [LEFT_S] * len(after)
    assert (np.diff(left_s[np.argsort(column)]) <= 0).all()
    assert (left_s[column == 0] == LEFT_S).all()
