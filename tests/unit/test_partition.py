"""Proportional partition and locality (Hypothesis)."""

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from dora.core.fleet.partition import WorkerCandidate, assign, keeping_full, proportional, settled

WORK = st.dictionaries(st.integers(0, 9), st.floats(0, 1e6, allow_nan=False), max_size=6)


@given(WORK, st.integers(1, 40), st.integers(0, 9))
def test_counts_sum_and_nobody_starves(work: dict[int, float], groups: int, newest: int) -> None:
    counts = proportional(work, groups, newest)
    assert sum(counts.values()) == groups
    needy = [version for version in sorted(work) if work[version] > 0]
    for version in needy[:groups]:
        assert counts.get(version, 0) >= 1
    for version in counts:
        assert version in needy or version == newest  # no group for a version without work


@given(WORK, st.integers(8, 40), st.integers(0, 9))
def test_shares_are_proportional(work: dict[int, float], groups: int, newest: int) -> None:
    """Once every version has its one group, more work never gets fewer groups."""
    counts = proportional(work, groups, newest)
    needy = sorted(version for version in work if work[version] > 0)
    for one in needy:
        for other in needy:
            if work[one] > work[other]:
                assert counts[one] >= counts[other] - 1


def test_exact_shares() -> None:
    assert proportional({3: 300.0, 4: 100.0}, 8, 4) == {3: 6, 4: 2}
    assert proportional({3: 1.0, 4: 999.0}, 4, 4) == {3: 1, 4: 3}
    assert proportional({1: 5.0, 2: 5.0, 3: 5.0}, 2, 3) == {1: 1, 2: 1}  # too few: the oldest versions go first
    assert proportional({}, 3, 7) == {7: 3}


@given(st.data())
def test_what_is_full_is_kept_and_the_rest_is_shared(data: st.DataObject) -> None:
    newest = data.draw(st.integers(0, 4))
    present = data.draw(st.dictionaries(st.integers(0, newest), st.integers(1, 5), min_size=1))
    full = {version: data.draw(st.floats(0.0, 1.5 * count)) for version, count in present.items()}
    groups = sum(present.values())
    work = data.draw(st.dictionaries(st.integers(0, newest), st.floats(0, 1e6), max_size=5))
    shares = proportional(work, groups, newest)
    counts = keeping_full(shares, present, full, newest)
    assert sum(counts.values()) == groups and all(count > 0 for count in counts.values())
    older = sorted({*present, *shares} - {newest})
    lost = [version for version in older if shares.get(version, 0) and not present.get(version, 0)]
    for version in older:
        kept = min(present.get(version, 0), ceil(full.get(version, 0.0)))
        assert counts.get(version, 0) >= min(1, shares.get(version, 0))  # nobody with a share starves
        assert counts.get(version, 0) <= max(kept, shares.get(version, 0))  # and nothing is kept beyond need
        if not lost:
            assert counts.get(version, 0) >= kept  # nothing that is full is given up


def test_an_older_version_gives_dp_groups_up_as_its_kv_falls() -> None:
    shares = {3: 1, 4: 1, 5: 4}
    assert keeping_full(shares, {3: 1, 4: 5}, {3: 0.9, 4: 4.2}, 5) == {3: 1, 4: 5}  # the newest waits
    assert keeping_full(shares, {3: 1, 4: 5}, {3: 0.9, 4: 2.9}, 5) == {3: 1, 4: 3, 5: 2}
    assert keeping_full(shares, {3: 1, 4: 5}, {}, 5) == shares
    assert keeping_full({5: 2}, {}, {}, 5) == {5: 2}


def test_a_version_whose_dp_group_was_lost_goes_before_what_is_full() -> None:
    assert keeping_full({3: 1, 4: 1}, {4: 2}, {4: 2.0}, 5) == {3: 1, 4: 1}  # too few for the newest, 5, to have a share
    assert keeping_full({3: 1, 4: 1, 5: 1}, {4: 3}, {4: 3.0}, 5) == {3: 1, 4: 2}
    assert keeping_full({3: 1, 4: 1}, {3: 1, 4: 1}, {3: 0.9, 4: 0.9}, 5) == {3: 1, 4: 1}  # none of them is the newest


@given(st.data())
def test_assignment_keeps_what_it_can(data: st.DataObject) -> None:
    versions = data.draw(st.lists(st.integers(-1, 3), min_size=1, max_size=12))
    indexes = [
        WorkerCandidate(
            worker, loaded, loaded if loaded >= 0 else data.draw(st.integers(-1, 3)), data.draw(st.integers(0, 99))
        )
        for worker, loaded in enumerate(versions)
    ]
    wanted = Counter(data.draw(st.lists(st.integers(0, 3), min_size=len(indexes), max_size=len(indexes))))
    chosen = assign(indexes, wanted)
    assert Counter(chosen.values()) == wanted and set(chosen) == {index.worker for index in indexes}
    for version, count in wanted.items():
        had = [index for index in indexes if index.loaded == version]
        kept = [index for index in had if chosen[index.worker] == version]
        assert len(kept) == min(count, len(had))  # locality: no group changes version without need
        gone = [index.kv_tokens for index in had if chosen[index.worker] != version]
        assert not gone or max(gone) <= min((index.kv_tokens for index in kept), default=max(gone))  # the emptiest go


def test_hysteresis() -> None:
    counts, work = {1: 3, 2: 1}, {1: 500.0, 2: 500.0}
    assert not settled(counts, work, proportional(work, 4, 2), hysteresis=0.4)
    assert settled(counts, {1: 600.0, 2: 400.0}, {1: 2, 2: 2}, hysteresis=0.4)
    assert not settled({1: 4}, work, {1: 2, 2: 2}, hysteresis=1.0)  # a version without a group is never settled
