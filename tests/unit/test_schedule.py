"""The number of workers of a version at each age, and the choice of versions that are taken up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.policies.laxity.schedule import Schedule, leading, lifetime_of, stride_of
from dora.core.policies.laxity.tuning import TUNING

STEP_S = 100.0


def schedule_of(workers: int, window: int, stride: int = 1, passed_over: int = 0) -> Schedule:
    """The newest version is 9; so many were passed over since one was taken up."""
    return Schedule(workers, window, 9, 9 - passed_over, stride, 1000.0, next_s=1000.0 + STEP_S, step_s=STEP_S)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    workers, window = draw(st.integers(2, 200)), draw(st.integers(1, 7))
    stride = stride_of(workers, window)
    return schedule_of(workers, lifetime_of(workers, window), stride, draw(st.integers(0, stride - 1)))


@given(schedule=schedules(), part=st.floats(0.0, 2.999))
def test_live_versions_share_all_workers(schedule: Schedule, part: float) -> None:
    """At every moment, but for the margin in which the due version of a step yet to come is to have ended."""
    window, at_s, publishes = schedule.window, 1000.0 + part * STEP_S, int(part)
    live = range(9 + publishes - window + 1, 9 + publishes + 1)
    hosted = [version for version in live if schedule.taken_up(version)]
    shares = {version: float(schedule.share(version, at_s)) for version in live}
    ended = at_s >= schedule.end_s(live[0]) and schedule.taken_up(live[0])
    assert sum(shares.values()) <= schedule.workers + 1e-6
    if not ended or (publishes == 0 and window > 1):
        assert sum(shares.values()) == pytest.approx(schedule.workers)
    if not ended:
        assert min(shares[version] for version in hosted) >= 1.0  # none is without a worker
    assert not any(shares[version] for version in live if version not in hosted)
    assert not any(float(schedule.share(live[0] - gone, at_s)) for gone in (1, 2))


@given(workers=st.integers(6, 200), window=st.integers(2, 6))
def test_a_version_grows_while_it_is_newest_and_shrinks_while_it_is_due(workers: int, window: int) -> None:
    share = schedule_of(workers, window).share
    newest = share(9, 1000.0 + STEP_S * np.linspace(0.0, 0.99, 50))
    due = share(9, 1000.0 + STEP_S * (window - 1 + np.linspace(0.0, 0.9, 50)))
    assert (np.diff(newest) >= 0).all()
    assert (np.diff(due) <= 0).all()
    assert newest[-1] > newest[0] or workers // (window - 1) <= 2


def test_the_examples_of_the_docstring() -> None:
    at_s = np.array([1010.0, 1090.0])
    each, second = schedule_of(10, 3), schedule_of(6, 3, stride=2)
    assert [each.share(version, at_s).tolist() for version in (9, 8, 7, 6)] == [[2, 3], [5, 5], [3, 2], [0, 0]]
    assert [second.share(version, at_s).tolist() for version in (9, 8, 7, 6)] == [[2, 4], [0, 0], [4, 2], [0, 0]]
    six = schedule_of(6, 3)
    assert [six.share(version, at_s).tolist() for version in (9, 8, 7, 6)] == [[1, 2], [3, 3], [2, 1], [0, 0]]
    passed = schedule_of(6, 3, stride=2, passed_over=1)
    assert [passed.share(version, at_s).tolist() for version in (9, 8, 7, 6)] == [[0, 0], [6, 6], [0, 0], [0, 0]]


@given(workers=st.integers(1, 500), window=st.integers(1, 9))
def test_every_second_version_is_taken_up_where_workers_are_few_and_the_window_allows(
    workers: int, window: int
) -> None:
    stride, lifetime = stride_of(workers, window), lifetime_of(workers, window)
    assert (lifetime - 1) % stride == 0  # as one comes another one is due
    assert 1 + (lifetime - 1) // stride <= workers  # each has a worker
    assert lifetime <= window
    assert stride == (2 if 1 < workers < TUNING.least_workers * (window - 1) and window in (3, 5, 7, 9) else 1)


def test_a_version_leads_until_the_next_stride_or_until_it_may_begin_nothing_more() -> None:
    assert leading(0, [-1, -1], 3, lambda version: False) == 0  # no worker has a version yet
    assert [leading(newest, [3, 4, 4, -1], 3, lambda version: True) for newest in (4, 5, 6, 7)] == [4, 4, 6, 7]
    assert leading(5, [4, 4], 3, lambda version: version == 5) == 5
    assert leading(5, [4, 4], 2, lambda version: True) == 5  # every version is taken up,
    assert leading(5, [4], 3, lambda version: True) == 5  # and by a worker alone


def test_what_the_due_version_held_to_its_end_is_the_newests_until_the_publish() -> None:
    schedule = schedule_of(6, 3)
    at_s = np.array([1091.0, 1093.0, 1101.0])  # it is to end at 1092
    assert [schedule.share(version, at_s).tolist() for version in (9, 8, 7)] == [[2, 3, 3], [3, 3, 2], [1, 0, 0]]


def test_with_fewer_workers_than_versions_those_end_earlier() -> None:
    schedule = schedule_of(2, lifetime_of(2, 4))
    assert [float(schedule.share(version, 1050.0)) for version in (9, 8, 7, 6)] == [1, 1, 0, 0]
    assert schedule.due(8)
    assert schedule.end_s(8) < 1000.0 + STEP_S


def test_a_late_publish_moves_deadlines() -> None:
    early, late = schedule_of(6, 3), Schedule(6, 3, 9, 9, 1, 1000.0, 1000.0 + 2 * STEP_S, STEP_S)
    assert late.end_s(9) == pytest.approx(early.end_s(9) + STEP_S)
    assert late.share(8, 1150.0) == early.share(8, 1075.0)  # versions between publishes age by what they wait for
