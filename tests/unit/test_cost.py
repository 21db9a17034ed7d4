"""The cost of an engine step, and what a mixture of experts bends of it."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from dora.core.forecast.cost import CostModel, read_share
from dora.data.limits import DRAFT_TOKENS_MAX

DENSE = CostModel(kv_token_s=1e-6, weights_s=0.03, request_s=0.001, step_s=0.02)


def test_a_dense_step_is_that_of_the_paper() -> None:
    """StaleFlow eq. 11; no factor of a mixture changes a digit of it."""
    for running, kv_tokens in ((1, 100), (30, 3000), (64, 1e5)):
        matmul_s = max(0.03, 0.001 * running) + 0.02
        assert DENSE.decode_step_s(running, kv_tokens) == 1e-6 * kv_tokens + matmul_s
        assert DENSE.kv_tokens_at(running, DENSE.decode_step_s(running, kv_tokens)) == pytest.approx(kv_tokens)
    assert DENSE.kv_tokens_at(1, 0.049) < 0.0
    assert DENSE.matmul_s(0) == 0.0
    assert read_share(1.0, 0.0, 1) == read_share(1.0, 0.0, 500) == 1.0


@pytest.mark.parametrize(("experts", "chosen", "shared"), [(128, 8, 0.05), (64, 1, 0.3), (8, 2, 0.0)])
def test_a_step_reads_what_is_shared_and_the_experts_that_any_token_chose(
    experts: int, chosen: int, shared: float
) -> None:
    """Against drawing each token's experts: the share of the weights that a batch of them touches."""
    rng = np.random.default_rng(1)
    for running in (1, 2, 5, 16, 64):
        choices = np.argsort(rng.random((300, running, experts)), axis=2)[:, :, :chosen].reshape(300, -1)
        touched = np.mean([len(np.unique(batch)) for batch in choices]) / experts
        expected = shared + (1 - shared) * touched
        assert read_share(chosen / experts, shared, running) == pytest.approx(expected, abs=0.015)


def test_one_token_reads_the_active_share() -> None:
    assert read_share(8 / 128, 0.05, 1) == pytest.approx(0.05 + 0.95 * 8 / 128)


def test_uneven_experts_lengthen_computing_by_less_the_more_tokens_there_are() -> None:
    cost = replace(DENSE, imbalance=2.0)
    for running, longer in ((64, 2 / 8), (400, 2 / 20)):
        assert cost.matmul_s(running) - 0.02 == pytest.approx(0.001 * running * (1 + longer))
    assert cost.matmul_s(4) == 0.03 + 0.02  # weights bind
    assert cost.tokens_per_s(64, 0.0) == pytest.approx(64 / (0.064 * (1 + 2 / sqrt(64)) + 0.02))


def test_drafts_bring_most_in_small_batches_and_nothing_in_full_ones() -> None:
    drafting = replace(DENSE, draft_acceptance=0.7, draft_verify_s=0.002)
    gains = [DENSE.decode_step_s(n, 1000.0 * n) / drafting.decode_step_s(n, 1000.0 * n) for n in (1, 4, 16, 64, 400)]
    assert gains == sorted(gains, reverse=True)
    assert 2.5 < gains[0] < 1 / (1 - 0.7)
    assert gains[-1] == 1.0
    assert drafting.kv_tokens_at(4, drafting.decode_step_s(4, 5000.0)) == pytest.approx(5000.0)


def test_a_draft_of_any_length_yields_what_drawn_ones_do() -> None:
    """One request; all of a step is constant, so the longest draft is best."""
    drafting = CostModel(0.0, 0.0, 0.0, 0.02, draft_acceptance=0.6)
    rng = np.random.default_rng(1)
    accepted = (rng.random((20_000, DRAFT_TOKENS_MAX)) < 0.6).cumprod(axis=1).sum(axis=1)
    assert 0.02 / drafting.decode_step_s(1, 0.0) == pytest.approx(1 + accepted.mean(), rel=0.02)
