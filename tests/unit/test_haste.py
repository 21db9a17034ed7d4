"""The shortest step in which the longest responses can end, and how full workers may be for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.forecast.cost import CostModel
from dora.core.forecast.rates import LengthMix
from dora.core.policies.laxity.reserved import Haste

COST = CostModel(kv_token_s=4e-8, weights_s=6e-3, request_s=4e-5, step_s=15e-3)
SLOTS, KV_TOKENS = 512, 500_000.0
PROMPT_TOKENS = 100


def mix_of(lengths: list[float]) -> LengthMix:
    mix = LengthMix()
    mix.add(lengths, PROMPT_TOKENS)
    return mix


def test_the_mix_keeps_what_groups_ask_for_by_length() -> None:
    mix = LengthMix()
    mix.add([1000.0, 1010.0, 9000.0], 100)
    mix.add([1020.0], 50)
    assert mix.responses.sum() == pytest.approx(2.0)  # of a group
    works = [length * (length / 2 + 100) for length in (1000.0, 1010.0, 9000.0)] + [1020.0 * (510.0 + 50)]
    assert mix.work.sum() == pytest.approx(sum(works) / 2)
    short, long = mix.classes().tolist()
    assert mix.tokens[short] / mix.responses[short] == pytest.approx(1010.0)
    assert mix.tokens[long] / mix.responses[long] == pytest.approx(9000.0)
    assert mix.context_tokens() == pytest.approx(sum(works) / (1000 + 1010 + 9000 + 1020))


def test_a_length_that_came_once_is_forgotten() -> None:
    mix = mix_of([30_000.0] + [500.0] * 15)
    assert len(mix.classes()) == 2
    for _ in range(20_000):
        mix.add([500.0] * 16, PROMPT_TOKENS)
    assert len(mix.classes()) == 1


def test_a_wide_window_needs_no_more_than_kv_that_is_always_full() -> None:
    mix = mix_of([2000.0] * 15 + [20_000.0])
    haste = Haste(mix, COST, (SLOTS, KV_TOKENS), workers=4, groups=200, lifetime_steps=100.0)
    full_s = COST.decode_step_s(int(KV_TOKENS / mix.context_tokens()), KV_TOKENS)
    bound_s = 200 * mix.work.sum() / (4 * KV_TOKENS) * full_s
    assert haste.step_s == pytest.approx(bound_s, rel=1e-4)
    assert not haste.at(haste.step_s, KV_TOKENS)[0]


def test_a_narrow_window_keeps_workers_below_full_for_the_longest() -> None:
    mix = mix_of([500.0] * 15 + [20_000.0])
    wide, narrow = (
        Haste(mix, COST, (SLOTS, KV_TOKENS), workers=4, groups=64, lifetime_steps=steps) for steps in (20.0, 1.5)
    )
    assert narrow.step_s > wide.step_s
    hurried, fill, pace_s = narrow.at(narrow.step_s, KV_TOKENS)
    assert hurried and fill < 0.9
    assert 20_000 * pace_s <= 1.5 * narrow.step_s
    assert narrow.at(0.9 * narrow.step_s, KV_TOKENS)[1] < fill  # with less time they can do with less KV


def test_slots_that_run_out_before_kv_set_what_a_dp_group_holds() -> None:
    mix = mix_of([1000.0] * 16)
    haste = Haste(mix, COST, (100, KV_TOKENS), workers=4, groups=64, lifetime_steps=10.0)
    hurried, fill, _ = haste.at(haste.step_s, KV_TOKENS)
    assert not hurried and fill * KV_TOKENS == pytest.approx(100 * mix.context_tokens())


@given(
    lengths=st.lists(st.floats(1.0, 60_000.0), min_size=1, max_size=16),
    workers=st.integers(1, 64),
    groups=st.integers(1, 2000),
    lifetime_steps=st.floats(0.5, 8.0),
)
def test_the_shortest_step_leaves_time_for_the_longest_and_for_all(
    lengths: list[float], workers: int, groups: int, lifetime_steps: float
) -> None:
    mix = mix_of(lengths)
    haste = Haste(mix, COST, (SLOTS, KV_TOKENS), workers, groups, lifetime_steps)
    _, fill, pace_s = haste.at(haste.step_s, KV_TOKENS)
    longest = mix.tokens[mix.classes()[-1]] / mix.responses[mix.classes()[-1]]
    assert np.isfinite(haste.step_s)
    assert longest * pace_s <= lifetime_steps * haste.step_s * (1 + 1e-6)
    assert 0 < fill <= 1
    always_full_s = groups * mix.work.sum() / (workers * KV_TOKENS) * COST.decode_step_s(1, KV_TOKENS)
    assert haste.step_s >= always_full_s * (1 - 1e-6)
