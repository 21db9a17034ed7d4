"""Lognormal beliefs: what is still to come, the chance to run on, the longest of a group."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.forecast.lognormal import Estimate, longest_quantile, remaining_tokens, survival_chance
from dora.errors import InvalidValue
from tests.refusals import refused

BELIEFS = [(7.0881, 1.2), (9.0, 0.3), (5.0, 0.8), (9.5, 1.5), (7.0, 0.01)]
TOKENS = (0, 10, 1000, 5000, 20_000, 29_900)


def survival(tokens: float, log_mean: float, log_sd: float) -> float:
    return 0.5 * math.erfc((math.log(max(tokens, 1e-9)) - log_mean) / log_sd / math.sqrt(2.0))


@pytest.mark.parametrize(("log_mean", "log_sd"), BELIEFS)
def test_remaining_tokens_is_the_conditional_mean(log_mean: float, log_sd: float) -> None:
    limit = 30_000
    for tokens in TOKENS:
        left = survival(tokens, log_mean, log_sd)
        if left < 1e-12:
            continue
        # E[min(X, limit) - tokens | X > tokens] is the area under the conditional survival function.
        grid = np.linspace(tokens, limit, 20_001)
        chance = np.array([survival(point, log_mean, log_sd) for point in grid.tolist()])
        expected = max(np.trapezoid(chance, grid) / left, 1.0)
        assert remaining_tokens(log_mean, log_sd, tokens, limit)[0] == pytest.approx(expected, rel=3e-3, abs=1)


@pytest.mark.parametrize(("log_mean", "log_sd"), BELIEFS)
def test_survival_chance_is_the_conditional_survival_up_to_the_limit(log_mean: float, log_sd: float) -> None:
    limit, ahead = 30_000, np.array([0.0, 100.0, 1000.0, 5000.0, 25_000.0])
    for tokens in TOKENS:
        left = survival(tokens, log_mean, log_sd)
        if left < 1e-12:
            continue
        one = np.ones(1)
        (chance,) = survival_chance(log_mean * one, log_sd * one, tokens * one, limit * one, ahead)
        runs = [survival(tokens + more, log_mean, log_sd) / left * (tokens + more < limit) for more in ahead.tolist()]
        assert chance == pytest.approx(runs, abs=1e-3)


def test_the_chance_to_run_on_is_one_up_to_a_known_length_and_none_beyond() -> None:
    tokens, ahead = np.array([0.0, 4000.0]), np.array([0.0, 900.0, 1100.0, 4900.0, 5100.0])
    known = np.full(2, math.log(5000))
    chance = survival_chance(known, np.zeros(2), tokens, np.full(2, 30_000.0), ahead)
    assert chance == pytest.approx(np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]), abs=1e-9)


@given(st.floats(-50, 100), st.floats(0, 20), st.integers(0, 40_000), st.integers(1, 40_000))
def test_what_remains_is_finite_and_within_the_limit(mean: float, sd: float, tokens: int, limit: int) -> None:
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        remaining = remaining_tokens(mean, sd, tokens, limit)[0]
    assert min(1, max(limit - tokens, 0)) <= remaining <= max(limit - tokens, 0)


def test_a_long_response_is_expected_to_stay_long() -> None:
    left = remaining_tokens(7.0881, 1.2, np.array([0, 2000, 8000, 16_000]), 1e9)
    assert (np.diff(left) > 0).all()


def test_a_known_length_leaves_exactly_the_rest() -> None:
    tokens = np.array([0, 1000, 4998, 4999, 5000])
    expected = np.array([5000, 4000, 2, 1, 1])
    assert remaining_tokens(math.log(5000), 0.0, tokens, 30_000) == pytest.approx(expected, abs=0.01)


def test_columns_longer_than_a_block_agree_with_single_rows() -> None:
    rng = np.random.default_rng(0)
    rows = 20_000
    mean, sd, tokens = rng.normal(7, 1, rows), rng.uniform(0, 2, rows), rng.integers(0, 30_000, rows)
    means = remaining_tokens(mean, sd, tokens, 30_000)
    for row in (0, 8191, 8192, 19_999):
        assert remaining_tokens(mean[row], sd[row], tokens[row], 30_000)[0] == pytest.approx(means[row])
    assert len(remaining_tokens(np.array([]), np.array([]), np.array([]), 30_000)) == 0


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("group_size", [1, 4, 16])
def test_the_longest_of_a_group(share: float, group_size: int) -> None:
    rng = np.random.default_rng(0)
    common = rng.standard_normal((200_000, 1)) * math.sqrt(share)
    own = rng.standard_normal((200_000, group_size)) * math.sqrt(1 - share)
    longest = np.exp(7.0 + 1.1 * (common + own)).max(axis=1)
    for q in (0.2, 0.5, 0.8, 0.95):
        predicted = longest_quantile(Estimate(7.0, 1.1, share), group_size, q)
        assert predicted == pytest.approx(np.quantile(longest, q), rel=0.03)


def test_the_longest_is_cut_at_the_limit_and_exact_where_known() -> None:
    assert longest_quantile(Estimate(9.0, 1.2, 0.5), 16, 0.9, 30_000) == 30_000
    assert longest_quantile(Estimate(5000.0, 1.2, 0.5), 16, 0.9) < math.inf
    assert longest_quantile(Estimate(6.0, 1.0, 0.0, (10, 900, 20)), 3, 0.5) == 900


@pytest.mark.parametrize("q", [0.0, 1.0, -1.0, math.nan])
def test_quantiles_lie_between_0_and_1(q: float) -> None:
    with refused(InvalidValue, field="q"):
        longest_quantile(Estimate(7.0, 1.0, 0.5), 16, q)
