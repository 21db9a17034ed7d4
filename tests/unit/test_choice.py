"""Stay, move, park or re-prefill: whatever is chosen is possible, and nothing possible costs less."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from dora.core.forecast.cost import CostModel
from dora.core.handoff.choice import TYPICAL, Choice, cheapest

seconds = st.floats(0.0, 1e3)
rates = st.floats(1e-9, 1e-2)
contexts = st.integers(1, 1_000_000)
costs = st.builds(lambda prefill, copy: replace(TYPICAL, prefill_token_s=prefill, copy_token_s=copy), rates, rates)


@given(costs, contexts, seconds, st.booleans(), st.booleans())
def test_only_what_is_possible_is_chosen(
    cost: CostModel, context: int, held_up_s: float, slot: bool, pool: bool
) -> None:
    choice = cheapest(cost, context, held_up_s, slot=slot, pool=pool)
    assert (choice is not Choice.MOVE or slot) and (choice is not Choice.PARK or pool)


@given(costs, contexts, seconds)
def test_with_a_free_slot_nothing_is_parked(cost: CostModel, context: int, held_up_s: float) -> None:
    """One copy is less than two."""
    assert cheapest(cost, context, held_up_s, slot=True, pool=True) is not Choice.PARK


@given(costs, contexts, st.booleans(), st.booleans())
def test_what_holds_nobody_up_stays(cost: CostModel, context: int, slot: bool, pool: bool) -> None:
    assert cheapest(cost, context, 0.0, slot=slot, pool=pool) is Choice.STAY


@given(costs, contexts, seconds, st.floats(1.0, 100.0))
def test_what_is_parked_is_parked_too_where_it_holds_up_more_or_a_copy_is_faster(
    cost: CostModel, context: int, held_up_s: float, times: float
) -> None:
    def parked(cost: CostModel, held_up_s: float) -> bool:
        return cheapest(cost, context, held_up_s, slot=False, pool=True) is Choice.PARK

    faster = replace(cost, copy_token_s=cost.copy_token_s / times)
    assert parked(cost, held_up_s) <= min(parked(faster, held_up_s), parked(cost, held_up_s * times))


@given(contexts, st.floats(1e-9, 2e-2), st.floats(1e-9, 2e-2))
def test_of_parking_and_prefilling_again_the_faster_is_chosen(context: int, copy_s: float, prefill_s: float) -> None:
    assume(abs(2.0 * copy_s - prefill_s) > 1e-6)
    cost = replace(TYPICAL, copy_token_s=copy_s, prefill_token_s=prefill_s)
    chosen = cheapest(cost, context, 1e9, slot=False, pool=True)
    assert chosen is (Choice.PARK if 2.0 * copy_s < prefill_s else Choice.REPREFILL)


def test_where_no_engine_was_profiled_a_long_response_is_parked_and_a_pool_that_is_full_costs_a_prefill() -> None:
    unmeasured = replace(TYPICAL, prefill_token_s=0.0)
    for cost in (None, unmeasured):
        assert cheapest(cost, 4000, 60.0, slot=False, pool=True) is Choice.PARK
        assert cheapest(cost, 4000, 60.0, slot=False, pool=False) is Choice.REPREFILL
        assert cheapest(cost, 4000, 0.02, slot=False, pool=True) is Choice.STAY


def test_a_state_costs_a_short_context_as_much_as_a_long_one() -> None:
    cost = replace(TYPICAL, copy_token_s=1e-5, copy_state_s=1e-2)
    assert cheapest(cost, 400, 60.0, slot=False, pool=True) is Choice.REPREFILL
    assert cheapest(replace(cost, copy_state_s=0.0), 400, 60.0, slot=False, pool=True) is Choice.PARK
    assert cheapest(cost, 4000, 60.0, slot=False, pool=True) is Choice.PARK
