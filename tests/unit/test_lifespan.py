"""How many DP groups a version has at each age, and which versions are taken up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.orchestrator.core.policies.lifespan import Lifespan
from dora.orchestrator.core.policies.stride import LEAST_GROUPS, leading, life_of, stride_of

STEP_S = 100.0


def lifespan_of(groups: int, window: int, stride: int = 1, passed_over: int = 0) -> Lifespan:
    """The newest version is 9; so many were passed over since one was taken up."""
    return Lifespan(groups, window, 9, 9 - passed_over, stride, 1000.0, next_s=1000.0 + STEP_S, step_s=STEP_S)


@st.composite
def lifespans(draw: st.DrawFn) -> Lifespan:
    groups, window = draw(st.integers(2, 200)), draw(st.integers(1, 7))
    stride = stride_of(groups, window)
    return lifespan_of(groups, life_of(groups, window), stride, draw(st.integers(0, stride - 1)))


@given(lifespan=lifespans(), part=st.floats(0.0, 2.999))
def test_live_versions_share_all_dp_groups(lifespan: Lifespan, part: float) -> None:
    """At every moment, but for the margin in which the due version of a step yet to come is to have ended."""
    window, at_s, publishes = lifespan.window, 1000.0 + part * STEP_S, int(part)
    live = range(9 + publishes - window + 1, 9 + publishes + 1)
    hosted = [version for version in live if lifespan.taken_up(version)]
    shares = {version: float(lifespan.hosts(version, at_s)) for version in live}
    ended = at_s >= lifespan.end_s(live[0]) and lifespan.taken_up(live[0])
    assert sum(shares.values()) <= lifespan.groups + 1e-6
    if not ended or (publishes == 0 and window > 1):
        assert sum(shares.values()) == pytest.approx(lifespan.groups)
    if not ended:
        assert min(shares[version] for version in hosted) >= 1.0  # none is without a DP group
    assert not any(shares[version] for version in live if version not in hosted)
    assert not any(float(lifespan.hosts(live[0] - gone, at_s)) for gone in (1, 2))


@given(groups=st.integers(6, 200), window=st.integers(2, 6))
def test_a_version_grows_while_it_is_newest_and_shrinks_while_it_is_due(groups: int, window: int) -> None:
    hosts = lifespan_of(groups, window).hosts
    newest = hosts(9, 1000.0 + STEP_S * np.linspace(0.0, 0.99, 50))
    due = hosts(9, 1000.0 + STEP_S * (window - 1 + np.linspace(0.0, 0.9, 50)))
    assert (np.diff(newest) >= 0).all()
    assert (np.diff(due) <= 0).all()
    assert newest[-1] > newest[0] or groups // (window - 1) <= 2


def test_the_examples_of_the_docstring() -> None:
    at_s = np.array([1010.0, 1090.0])
    each, second = lifespan_of(10, 3), lifespan_of(6, 3, stride=2)
    assert [each.hosts(version, at_s).tolist() for version in (9, 8, 7, 6)] == [[2, 3], [5, 5], [3, 2], [0, 0]]
    assert [second.hosts(version, at_s).tolist() for version in (9, 8, 7, 6)] == [[2, 4], [0, 0], [4, 2], [0, 0]]
    six = lifespan_of(6, 3)
    assert [six.hosts(version, at_s).tolist() for version in (9, 8, 7, 6)] == [[1, 2], [3, 3], [2, 1], [0, 0]]
    passed = lifespan_of(6, 3, stride=2, passed_over=1)
    assert [passed.hosts(version, at_s).tolist() for version in (9, 8, 7, 6)] == [[0, 0], [6, 6], [0, 0], [0, 0]]


@given(groups=st.integers(1, 500), window=st.integers(1, 9))
def test_every_second_version_is_taken_up_where_dp_groups_are_few_and_the_window_allows(
    groups: int, window: int
) -> None:
    stride, life = stride_of(groups, window), life_of(groups, window)
    assert (life - 1) % stride == 0  # as one comes another one is due
    assert 1 + (life - 1) // stride <= groups  # each has a DP group
    assert life <= window
    assert stride == (2 if 1 < groups < LEAST_GROUPS * (window - 1) and window in (3, 5, 7, 9) else 1)


def test_a_version_leads_until_the_next_stride_or_until_it_may_begin_nothing_more() -> None:
    assert leading(0, [-1, -1], 3, lambda version: False) == 0  # no DP group has a version yet
    assert [leading(newest, [3, 4, 4, -1], 3, lambda version: True) for newest in (4, 5, 6, 7)] == [4, 4, 6, 7]
    assert leading(5, [4, 4], 3, lambda version: version == 5) == 5
    assert leading(5, [4, 4], 2, lambda version: True) == 5  # every version is taken up,
    assert leading(5, [4], 3, lambda version: True) == 5  # and by a DP group alone


def test_what_the_due_version_held_to_its_end_is_the_newests_until_the_publish() -> None:
    lifespan = lifespan_of(6, 3)
    at_s = np.array([1091.0, 1093.0, 1101.0])  # it is to end at 1092
    assert [lifespan.hosts(version, at_s).tolist() for version in (9, 8, 7)] == [[2, 3, 3], [3, 3, 2], [1, 0, 0]]


def test_with_fewer_dp_groups_than_versions_those_end_earlier() -> None:
    lifespan = lifespan_of(2, life_of(2, 4))
    assert [float(lifespan.hosts(version, 1050.0)) for version in (9, 8, 7, 6)] == [1, 1, 0, 0]
    assert lifespan.due(8)
    assert lifespan.end_s(8) < 1000.0 + STEP_S


def test_a_late_publish_moves_deadlines() -> None:
    early, late = lifespan_of(6, 3), Lifespan(6, 3, 9, 9, 1, 1000.0, 1000.0 + 2 * STEP_S, STEP_S)
    assert late.end_s(9) == pytest.approx(early.end_s(9) + STEP_S)
    assert late.hosts(8, 1150.0) == early.hosts(8, 1075.0)  # versions between publishes age by what they wait for
