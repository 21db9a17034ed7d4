"""Plans park requests on workers that are wanted, and those that a full engine would preempt."""

from dataclasses import replace

import pytest

from dora.config import BalanceConfig
from dora.core.plan import POOL, QUEUE, Move, Trigger
from dora.core.policies.dora import DoraPolicy
from dora.core.policies.laxity.policy import LaxityPolicy
from dora.core.policies.levelling import plan_moves
from dora.core.view import View
from tests.unit.views import make_view

BALANCE = BalanceConfig()


def wanted(pools: tuple[int, ...], *, slots: int = 2, remaining: int = 50) -> View:
    """Worker 0 is to take up version 1; of its two requests of version 0 worker 1, with two of its own, takes none."""
    workers = [{"loaded": 0, "target": 1, "slots": 2}, {"loaded": 0, "slots": slots}]
    return make_view(
        workers, [(0, 0, 100), (0, 0, 60), (0, 1, 50), (0, 1, 50)], pools=pools, newest=1, remaining_tokens=remaining
    )


def moved(view: View, targets: dict[int, int]) -> set[Move]:
    """By ``dora``."""
    return set(plan_moves(view, targets, BALANCE))


def test_what_finds_no_free_slot_is_parked_and_queues_only_where_there_is_no_pool() -> None:
    targets = {0: 1, 1: 0}
    assert moved(wanted((1000,)), targets) == {Move(0, POOL), Move(1, POOL)}
    assert moved(wanted(()), targets) == {Move(0, 1), Move(1, 1)}, "twice as many as it has slots"
    assert moved(wanted((1000,), slots=3), targets) == {Move(0, 1), Move(1, POOL)}, "a free slot is better"
    assert moved(wanted((), slots=1), targets) == set()


def test_a_pool_that_is_full_costs_a_prefill_and_a_response_that_ends_soon_stays() -> None:
    targets = {0: 1, 1: 0}
    assert moved(wanted((70, 20)), targets) == {Move(0, QUEUE), Move(1, POOL)}
    assert moved(wanted((1000,), remaining=2), targets) == set()


def test_a_request_whose_state_finds_no_room_in_a_pool_is_prefilled_again() -> None:
    view = replace(wanted((170,)), state_tokens=80)
    assert moved(view, {0: 1, 1: 0}) == {Move(0, QUEUE), Move(1, POOL)}


def full(pools: tuple[int, ...]) -> View:
    """A worker with 985 of 1000 tokens of KV in use."""
    return make_view([{"loaded": 0}], [(0, 0, 100)] * 9 + [(0, 0, 85)], pools=pools)


@pytest.mark.parametrize("policy", [DoraPolicy, LaxityPolicy])
def test_an_engine_that_would_preempt_its_youngest_parks_it(policy: type[DoraPolicy | LaxityPolicy]) -> None:
    assert Move(9, POOL) in policy(BALANCE).plan(full((1000,)), Trigger.PRESSURE).moves
    for pools in ((), (80,)):
        assert not policy(BALANCE).plan(full(pools), Trigger.PRESSURE).moves, "preempting costs a prefill too"
