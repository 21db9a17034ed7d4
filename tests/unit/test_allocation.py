"""Versions give up and get workers by the KV that requests hold and will hold."""

import math
from typing import Any

import numpy as np
import pytest

from dora.core.forecast.lognormal import remaining_tokens
from dora.core.plan import Move
from dora.core.policies.laxity.allocation import Allocation, Last
from dora.core.policies.laxity.schedule import Schedule
from dora.core.policies.laxity.tuning import TUNING
from dora.core.view import View
from tests.unit.views import MAX_TOKENS, PROMPT_TOKENS, make_view

TOKENS, LOG_SD = 2_000, 0.8
BELIEF = (math.log(3_000.0), LOG_SD)


def targets_of(view: View, group_kv_tokens: float = 0.0) -> dict[int, int]:
    return Allocation(view, None, Last(group_kv_tokens=group_kv_tokens)).targets()


def test_with_nothing_to_spare_the_version_gives_that_overflows_least() -> None:
    """Version 0 fills 1.1 of its two workers, version 1 nearly 2: it is 0 that can do with one."""
    workers = [{"loaded": version, "kv_tokens": 100_000} for version in (0, 0, 1, 1)]
    requests = [(0, 0, 54_000), (0, 1, 53_000), (1, 2, 95_000), (1, 3, 94_000)]
    targets = targets_of(make_view(workers, requests, newest=2, window=4, admissible={2: 8}))
    assert sorted(targets.values()) == [0, 1, 1, 2]
    assert targets[1] == 2  # the one with less KV


def test_few_workers_pass_a_version_over_while_the_one_before_may_begin_more() -> None:
    """Four of them, window 3: every second version is taken up."""
    workers, requests = [{"loaded": 0}] * 4, [(0, index, 500) for index in range(4)]

    def targets(newest: int, **admissible: int) -> list[int]:
        may = {int(version[1:]): groups for version, groups in admissible.items()}
        view = make_view(workers, requests, newest=newest, admissible=may, backlog_longest=np.array([100.0]), window=3)
        return sorted(targets_of(view).values())

    assert targets(1, v0=4, v1=8) == [0, 0, 0, 0]
    assert targets(1, v0=0, v1=8)[-1] == 1  # else workers would stand idle
    assert targets(2, v0=4, v1=8, v2=8)[-1] == 2


def test_what_an_old_version_gives_up_goes_to_the_earliest_deadline_that_is_short() -> None:
    """Version 0 can do with one; 1 and 2 need two each and have one. The newest would have kept it."""
    workers = [{"loaded": version, "kv_tokens": 100_000} for version in (0, 0, 1, 2)]
    requests = [(0, 0, 50_000), (0, 1, 1_000), (1, 2, 90_000), (1, 2, 60_000), (2, 3, 90_000), (2, 3, 60_000)]
    targets = targets_of(make_view(workers, requests, newest=2, admissible={2: 8}, backlog_longest=np.array([100.0])))
    assert targets == {0: 0, 1: 1, 2: 1, 3: 2}


def test_the_chance_to_run_on_is_certain_where_lengths_are_known() -> None:
    requests = make_view([{"loaded": 0}], [(0, 0, 100)] * 3, remaining_tokens=600.0).requests
    assert requests.runs_on(np.array([0, 2]), np.array([599.0, 600.0])).tolist() == [[1.0, 0.0]] * 2


def test_the_chance_to_run_on_follows_the_belief() -> None:
    """Against the lognormal's own tail: P[X > tokens + ahead] over P[X > tokens]."""
    requests = make_view([{"loaded": 0}], [(0, 0, TOKENS + PROMPT_TOKENS)], belief=BELIEF).requests

    def tail(tokens: float) -> float:
        return 0.5 * math.erfc((math.log(tokens) - BELIEF[0]) / LOG_SD / math.sqrt(2.0))

    ahead = np.array([TUNING.level_tokens, TUNING.horizon_tokens, MAX_TOKENS - TOKENS])
    chance = requests.runs_on(np.array([0]), ahead)[0]
    assert chance[:2] == pytest.approx([tail(TOKENS + tokens) / tail(TOKENS) for tokens in ahead[:2]], rel=1e-3)
    assert chance[2] == 0.0  # its limit


def test_believed_requests_need_the_kv_that_those_still_running_will_hold() -> None:
    """They are expected to run far beyond the horizon, but not all of them do: the version needs fewer workers."""
    log_mean, log_sd = BELIEF
    expected = float(remaining_tokens(log_mean, log_sd, TOKENS, MAX_TOKENS)[0])
    assert expected > TUNING.horizon_tokens
    workers = [{"loaded": 0, "kv_tokens": 50_000, "slots": 256} for _ in range(8)]
    requests = [(0, index % 8, TOKENS + PROMPT_TOKENS) for index in range(96)]  # 193,000 tokens of KV now
    fields = {"newest": 1, "window": 2, "admissible": {1: 100}, "backlog_longest": np.array([100.0])}
    known = targets_of(make_view(workers, requests, remaining_tokens=expected, **fields))
    believed = targets_of(make_view(workers, requests, remaining_tokens=expected, belief=BELIEF, **fields))
    count = [list(targets.values()).count(0) for targets in (known, believed)]
    assert count == [7, 5]  # 348,000 tokens if all run on; 206,000 as believed, of 48,500 a worker


def test_a_worker_that_is_to_change_is_emptied_though_its_peers_will_only_just_have_room() -> None:
    """If every request counted as running on, its peer would seem to overflow, and the worker would stand still."""
    workers = [{"loaded": 0, "kv_tokens": 50_000}, {"loaded": 0, "kv_tokens": 50_000, "target": 1}]
    requests = [(0, 0, TOKENS)] * 19 + [(0, 1, TOKENS)] * 2
    targets = {0: 0, 1: 1}
    known, believed = (
        make_view(workers, requests, newest=1, remaining_tokens=2_000.0, **belief)
        for belief in ({}, {"belief": (math.log(2_500.0), 0.5)})
    )
    moves = [Allocation(view, None, Last()).moves(targets)[0] for view in (known, believed)]
    assert [len(each) for each in moves] == [0, 2]


@pytest.mark.parametrize(("contexts", "moved"), [((99_000,), []), ((60_000, 39_000), [Move(0, 1)])])
def test_a_request_that_fills_a_worker_alone_stays_though_another_is_empty(
    contexts: tuple[int, ...], moved: list[Move]
) -> None:
    """It would press the other as much, and move back; of two one goes."""
    workers = [{"loaded": 0, "kv_tokens": 100_000} for _ in range(2)]
    allocation = Allocation(make_view(workers, [(0, 0, context) for context in contexts], newest=0), None, Last())
    moves, _ = allocation.moves({0: 0, 1: 0})
    assert list(moves) == moved


ROOM = 97_000  # KV of a worker of the tests below, as far as it is filled


def ten_idle(**fields: Any) -> View:
    """Twelve workers of version 0, of which two work; version 1 may begin four groups, which are a step."""
    workers = [{"loaded": 0, "kv_tokens": 100_000} for _ in range(12)]
    waits = {"newest": 1, "admissible": {1: 4}, "backlog_longest": np.array([500.0])}
    return make_view(workers, [(0, 0, 1_000), (0, 1, 1_000)], **{**waits, **fields})


@pytest.mark.parametrize(("group_kv_tokens", "ample"), [(0.99 * ROOM, True), (1.01 * ROOM, False), (0.0, False)])
def test_an_old_version_is_packed_tight_only_where_begun_and_to_come_do_not_fit_twice(
    group_kv_tokens: float, ample: bool
) -> None:
    """Each version has begun what one worker holds, and four groups fill four: six of 12, or a little more."""
    allocation = Allocation(ten_idle(), None, Last(group_kv_tokens=group_kv_tokens))
    targets = allocation.targets()
    assert list(targets.values()).count(0) == (2 if ample else 1)
    assert allocation.ample == ample


@pytest.mark.parametrize(("group_kv_tokens", "ample"), [(1.01 * ROOM, True), (1.6 * ROOM, True), (1.7 * ROOM, False)])
def test_kv_that_was_ample_is_so_for_longer(group_kv_tokens: float, ample: bool) -> None:
    """At a publish the newest version's step counts twice: what it has begun by then, and what it may begin."""
    allocation = Allocation(ten_idle(), None, Last(group_kv_tokens=group_kv_tokens, ample=True))
    allocation.targets()
    assert allocation.ample == ample


def test_the_newest_version_gets_what_all_that_it_may_begin_can_fill() -> None:
    """It may begin forty groups, a quarter of which is more than there is for: workers go in proportion, 1 to 11."""
    targets = list(targets_of(ten_idle(admissible={1: 40}), 0.99 * ROOM).values())
    assert (targets.count(0), targets.count(1)) == (1, 11)


def test_a_worker_that_empties_for_a_version_does_not_work_for_it() -> None:
    """Eight are to have version 1 and still hold 0, whose KV needs one: only what idles goes to where it works."""
    workers = [{"loaded": 0, "target": 1, "kv_tokens": 100_000}] * 8 + [{"loaded": 2, "kv_tokens": 100_000}] * 12
    requests = [*((0, index, 1_000) for index in range(8)), (2, 8, 1_000)]
    view = make_view(workers, requests, newest=2, admissible={2: 4}, backlog_longest=np.array([500.0]))
    assert sorted(targets_of(view, 1_000.0).values()) == [0] + [2] * 19


def test_kv_that_reserved_workers_keep_free_has_not_begun() -> None:
    allocation = Allocation(ten_idle(), None, Last({0: 6.0 * ROOM}, 1_000.0))
    allocation.targets()
    assert allocation.ample


@pytest.mark.parametrize(("admissible", "hosts"), [(40, 5), (2, 2), (0, 1)])
def test_an_older_version_has_what_its_schedule_says_as_far_as_it_could_fill_that(admissible: int, hosts: int) -> None:
    """A step old, of four: five of 20 workers by the schedule, while its requests hold half of one.

    Two groups more could nearly fill another one. One that may begin none has what its requests hold.
    """
    workers = [{"loaded": version, "kv_tokens": 100_000} for version in (0, 1) for _ in range(10)]
    requests = [(0, 0, 50_000), *((1, index, 95_000) for index in range(10, 20))]
    waits = {"newest": 1, "window": 5, "admissible": {0: admissible, 1: 400}, "backlog_longest": np.array([500.0])}
    schedule = Schedule(20, 5, 1, 1, 1, 0.0, next_s=100.0, step_s=100.0)
    allocation = Allocation(make_view(workers, requests, **waits), schedule, Last(group_kv_tokens=40_000.0))
    assert list(allocation.targets().values()).count(0) == hosts
    assert schedule.share(0, 0.0) == 5.0
