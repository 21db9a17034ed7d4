"""Mixtures of experts: how uneven their ranks are, and what of their cost can be fitted to steps."""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from dora.core.forecast.cost import CostModel
from dora.data.engine_samples import DecodeSample, Experts
from dora.lab.planning.experts import fullest_rank
from dora.lab.planning.profile import Fit, fit
from tests.sweeps import some_of, tenth_of

EXPERTS = Experts(total=128, per_token=8)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (100, 400, 900)
# weights bind up to 29 requests: 18 to 30 ms of them against 0.9 ms and more for each request
DENSE = CostModel(kv_token_s=2e-6, weights_s=0.03, request_s=0.0008, step_s=0.02)
MIXTURE = replace(DENSE, expert_fraction=1 / 16, imbalance=1.0)


def steps(cost: CostModel, sizes: Sequence[int] = SIZES, noise: float = 0.0, seed: int = 0) -> tuple[DecodeSample, ...]:
    """Decode samples of ``cost``, each off by a lognormal factor."""
    rng = np.random.default_rng(seed)
    return tuple(
        DecodeSample(size, size * context, cost.decode_step_s(size, size * context) * float(rng.lognormal(0.0, noise)))
        for size in sizes
        for context in CONTEXTS
    )


def squared_error(found: Fit, samples: Sequence[DecodeSample]) -> float:
    cost = CostModel.of(found.coefficients)
    return sum((cost.decode_step_s(each.running, each.kv_tokens) / each.step_s - 1) ** 2 for each in samples)


# How uneven ranks are.


@pytest.mark.parametrize(("ranks", "experts", "chosen"), [(4, 128, 8), (8, 128, 8), (32, 512, 8), (8, 64, 1)])
def test_the_fullest_rank_is_that_of_random_choices(ranks: int, experts: int, chosen: int) -> None:
    """Each token chooses different experts, evenly; expert e lies on rank e * ranks / experts."""
    rng = np.random.default_rng(ranks)
    for tokens, trials in ((64, 300), (512, 100)):
        over = []
        for _ in range(trials):
            choices = np.argpartition(rng.random((tokens, experts)), chosen - 1, axis=1)[:, :chosen]
            load = np.bincount(choices.ravel() * ranks // experts, minlength=ranks)
            over.append(load.max() / (tokens * chosen / ranks) - 1)
        assert fullest_rank(ranks, chosen) / tokens**0.5 == pytest.approx(np.mean(over), rel=0.1)


def test_one_rank_and_a_dense_model_are_even() -> None:
    assert fullest_rank(1, 8) == fullest_rank(32, 0) == 0.0


# The fit.


@pytest.mark.parametrize(
    "cost",
    [
        MIXTURE,
        replace(MIXTURE, weights_s=0.0, expert_fraction=1.0),  # bound by computing
        pytest.param(replace(MIXTURE, imbalance=0.0), marks=pytest.mark.full),
        pytest.param(replace(MIXTURE, expert_fraction=1.0), marks=pytest.mark.full),
        pytest.param(replace(MIXTURE, request_s=0.0, imbalance=0.0), marks=pytest.mark.full),  # by weights at any batch
    ],
)
def test_the_cost_of_a_mixture_is_recovered(cost: CostModel) -> None:
    found = fit(steps(cost), experts=EXPERTS)
    assert asdict(CostModel.of(found.coefficients)) == pytest.approx(asdict(cost), rel=1e-4, abs=1e-9)
    assert found.decode_error < 1e-6
    assert found.dense_error is not None and found.dense_error > 1e-5


def test_what_every_token_reads_is_found_in_the_rest() -> None:
    """Step times do not tell k4 from reading shared weights: only their sum is the same."""
    shared = replace(MIXTURE, shared_fraction=0.1, request_s=1e-5, imbalance=0.0)
    found = fit(steps(shared), experts=EXPERTS).coefficients
    assert (found.expert_fraction, found.shared_fraction) == (pytest.approx(1 / 16, rel=1e-3), 0.0)
    assert found.weights_s == pytest.approx(0.9 * 0.03, rel=1e-3)
    assert found.step_s == pytest.approx(0.02 + 0.1 * 0.03, rel=1e-3)


@pytest.mark.parametrize("noise", some_of((0.0, 0.02, 0.05), 0.02))
@pytest.mark.parametrize("seed", tenth_of(range(2)))
def test_a_dense_cost_stays_neutral_under_noise(seed: int, noise: float) -> None:
    found = fit(steps(DENSE, noise=noise, seed=seed), experts=EXPERTS)
    assert (found.coefficients.expert_fraction, found.coefficients.imbalance) == (1.0, 0.0)
    assert found.decode_error == found.dense_error


@pytest.mark.parametrize("seed", tenth_of(range(2)))
def test_noise_of_a_few_percent_makes_no_wild_values(seed: int) -> None:
    for noise in (0.02, 0.05):
        samples = steps(MIXTURE, noise=noise, seed=seed)
        found = fit(samples, experts=EXPERTS)
        cost = CostModel.of(found.coefficients)
        assert cost.expert_fraction == 1.0 or 1 / 32 < cost.expert_fraction < 1 / 8
        assert 0.0 <= cost.imbalance <= fullest_rank(128, 8)
        for size in range(1, 129):  # also twice as far as was sampled
            expected = MIXTURE.decode_step_s(size, 400 * size)
            assert cost.decode_step_s(size, 400 * size) == pytest.approx(expected, rel=5 * noise)
        assert squared_error(found, samples) <= squared_error(fit(samples), samples) + 1e-12


def test_a_model_that_is_not_known_to_be_a_mixture_is_fitted_as_dense() -> None:
    found = fit(steps(MIXTURE))
    assert (found.coefficients.expert_fraction, found.coefficients.imbalance) == (1.0, 0.0)
    assert found.dense_error is None


def test_a_term_needs_more_sizes_than_there_are_terms_and_half_of_the_error() -> None:
    few = (1, 4, 16, 64)
    assert fit(steps(MIXTURE, few), experts=EXPERTS).coefficients.expert_fraction == 1.0
    five = fit(steps(MIXTURE, (1, 4, 12, 24, 64)), experts=EXPERTS).coefficients
    assert five.expert_fraction < 0.2 and five.imbalance == 0.0  # one of the two terms
    # the same bend, under noise as large: a lower error, though by less than half
    noisy = steps(MIXTURE, noise=0.15, seed=3)
    found = fit(noisy, experts=EXPERTS)
    assert found.coefficients.expert_fraction == 1.0
    bent = replace(CostModel.of(found.coefficients), **asdict(MIXTURE))
    error = sum((bent.decode_step_s(each.running, each.kv_tokens) / each.step_s - 1) ** 2 for each in noisy)
    assert 0.5 * squared_error(found, noisy) < error < 1.2 * squared_error(found, noisy)


def test_up_to_how_many_requests_weights_bind() -> None:
    assert fit(steps(replace(MIXTURE, imbalance=0.0)), experts=EXPERTS).kink == 32  # of 24, 32 and 48
    assert fit(steps(replace(MIXTURE, request_s=0.0)), experts=EXPERTS).kink == 64
    assert fit(steps(replace(MIXTURE, weights_s=0.0)), experts=EXPERTS).kink == 0
