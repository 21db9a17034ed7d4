"""The duration of a batch's generation: the bubble-free bound, and the benefit of more engines."""

from dataclasses import replace
from itertools import pairwise

import pytest

from dora.lab.planning.generation import EFFICIENCY, bound_s, generation
from tests.unit.test_planning import CLUSTER, DORA_STEP, OPTION


@pytest.mark.parametrize(("engines", "minutes"), [(6, 15.63), (10, 9.38)])
def test_the_bound_is_that_of_the_papers_ratios(engines: int, minutes: float) -> None:
    found = bound_s(CLUSTER.cost, CLUSTER.slots, CLUSTER.kv_tokens, 19.66e6, 8.04e10, engines)
    assert found / 60 == pytest.approx(minutes, abs=0.005)


def test_slots_bind_where_contexts_are_short_and_weights_where_batches_are_small() -> None:
    cost = OPTION.cost
    short = bound_s(cost, 256, 772_000, 1e6, 1e8, 1)
    assert short == pytest.approx(cost.kv_token_s * 1e8 + cost.request_s * 1e6 + cost.step_s * 1e6 / 256)
    small = bound_s(cost, 8, 772_000, 1e6, 1e8, 1)
    assert small == pytest.approx(cost.kv_token_s * 1e8 + (cost.weights_s + cost.step_s) * 1e6 / 8)


def test_no_schedule_of_a_mixture_of_experts_is_below_its_bound() -> None:
    for shared in (0.0, 0.2):
        cost = replace(OPTION.cost, expert_fraction=0.1, shared_fraction=shared, weights_s=0.03, imbalance=0.5)
        for batches in ([64], [1, 64, 64], [1] * 50 + [64] * 3, [32, 64, 16]):
            time_s = sum(cost.decode_step_s(batch, 100 * batch) for batch in batches)
            assert bound_s(cost, 64, 6400, sum(batches), 100 * sum(batches), 1) <= time_s
        alone_s = 100 * cost.decode_step_s(1, 5000)  # KV for one request at a time: the bound is met
        assert bound_s(cost, 64, 5000, 100, 5000 * 100, 1) == pytest.approx(alone_s)


def test_generation_is_the_bound_times_the_efficiency_and_needs_the_window_for_its_tail() -> None:
    found = generation(OPTION, 6, DORA_STEP, window=3)
    bound = bound_s(OPTION.cost, OPTION.slots, OPTION.kv_tokens, DORA_STEP.n_tokens, DORA_STEP.c_tokens, 6)
    assert found.work_s == pytest.approx(EFFICIENCY * bound, rel=1e-9)
    full = 2 * generation(OPTION, 6, DORA_STEP, window=2, tail_load=1.0).tail_s
    alone = 2 * generation(OPTION, 6, DORA_STEP, window=2, tail_load=0.0).tail_s
    assert full / 60 == pytest.approx(27, abs=0.3)  # a 30K response on a full engine, and alone
    assert alone / 60 == pytest.approx(13.3, abs=0.3)
    assert found.tail_s == pytest.approx(generation(OPTION, 6, DORA_STEP, window=2).tail_s * 2 / 3)


def test_engines_with_time_to_spare_run_emptier_which_hurries_the_longest_response() -> None:
    """More engines are never slower, down to what the longest response takes alone; until then each helps."""
    alone_s = generation(OPTION, 6, DORA_STEP, window=2, tail_load=0.0).tail_s
    found = [generation(OPTION, engines, DORA_STEP, window=2) for engines in range(1, 200)]
    assert all(fewer.seconds > more.seconds > alone_s for fewer, more in pairwise(found))
    assert found[-1].seconds < 1.1 * alone_s


def test_they_are_as_empty_as_they_can_be_to_do_the_work_in_that_time() -> None:
    cost = replace(OPTION.cost, weights_s=0.0, request_s=0.0)  # steps of 20 ms, and the reading of KV
    steps, read_s = DORA_STEP.c_tokens / OPTION.kv_tokens, cost.kv_token_s * OPTION.kv_tokens
    assert steps > DORA_STEP.n_tokens / OPTION.slots  # KV is what is full
    found = [generation(replace(OPTION, cost=cost), engines, DORA_STEP, window=2) for engines in range(1, 200)]
    limited = [each for each in found if each.tail_s > each.work_s]
    assert len(limited) > 100
    for each in limited:
        fill = (2 * each.tail_s / DORA_STEP.cap_tokens - 0.02) / (0.5 * read_s)  # the longest has half of it beside it
        work_s = EFFICIENCY * steps / fill * (0.02 + fill * read_s) / each.engines
        assert work_s == pytest.approx(each.tail_s, rel=1e-4)
