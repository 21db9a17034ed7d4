"""``dora profile``: the fit, and the prediction."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from dora.core.forecast.cost import CostModel
from dora.data.engine_samples import DecodeSample, DraftSample, Measurement, MixedRequest
from dora.errors import InvalidValue
from dora.lab.planning.least_squares import non_negative_least_squares
from dora.lab.planning.profile import fit, predicted_s, validate
from tests.refusals import refused
from tests.unit.timed_engine import COST, SLOTS, samples


@pytest.mark.parametrize(
    "cost",
    [
        COST,  # weights bound up to 4 requests
        replace(COST, weights_s=0.0),  # bound by computing at any batch
        replace(COST, kv_token_s=0.0, weights_s=0.0),
        replace(COST, weights_s=0.0, request_s=0.0),  # constant
    ],
)
def test_the_fit_finds_the_coefficients_of_exact_samples(cost: CostModel) -> None:
    found = fit(*samples(cost))
    assert asdict(CostModel.of(found.coefficients)) == pytest.approx(asdict(cost), abs=1e-12)
    assert found.decode_error == pytest.approx(0.0, abs=1e-9)
    assert found.prefill_error == pytest.approx(0.0, abs=1e-9)
    assert found.kink == (4.0 if cost.weights_s else 0.0)


def test_coefficients_are_never_negative() -> None:
    decode, prefill = samples(COST)
    shrinking = [replace(sample, step_s=0.05 - 1e-6 * sample.kv_tokens) for sample in decode]  # longer is faster
    found = fit(shrinking, prefill).coefficients
    assert found.kv_token_s == 0.0
    assert min(found.model_dump().values()) >= 0.0


def test_the_error_is_the_mean_relative_error() -> None:
    decode = [
        DecodeSample(1, 100, 1.0),
        DecodeSample(1, 100, 3.0),
        DecodeSample(2, 400, 2.0),
        DecodeSample(2, 400, 2.0),
    ]
    found = fit(decode)
    cost = CostModel.of(found.coefficients)
    errors = [abs(cost.decode_step_s(s.running, s.kv_tokens) - s.step_s) / s.step_s for s in decode]
    assert found.decode_error == pytest.approx(sum(errors) / 4)
    assert found.decode_error > 0.2


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_three_percent_leaves_every_step_within_five(seed: int) -> None:
    noise = np.random.default_rng(seed)
    decode, prefill = samples(COST)
    noisy = [replace(sample, step_s=sample.step_s * float(noise.lognormal(0.0, 0.03))) for sample in decode]
    found = fit(noisy, prefill)
    for sample in decode:
        predicted = CostModel.of(found.coefficients).decode_step_s(sample.running, sample.kv_tokens)
        assert predicted == pytest.approx(sample.step_s, rel=0.05)
    assert 0.0 < found.decode_error < 0.05


def test_non_negative_least_squares_is_a_minimum() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        columns, target = rng.normal(size=(8, 3)), rng.normal(size=8)
        solution, loss = non_negative_least_squares(columns, target)
        assert loss == pytest.approx(float(np.square(columns @ solution - target).sum()))
        slope = columns.T @ (columns @ solution - target)
        assert (solution >= 0.0).all()
        assert (slope >= -1e-9).all()  # no coefficient can grow with profit,
        assert np.abs(slope * solution).max() < 1e-9  # and none above 0 can change


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0, math.inf])
def test_impossible_samples_are_refused(bad: float) -> None:
    decode, prefill = samples(COST)
    with refused(InvalidValue, field="sample (requests, tokens, seconds)"):
        fit([replace(decode[0], step_s=bad), *decode[1:]])
    with refused(InvalidValue, field="sample (requests, tokens, seconds)"):
        fit(decode, [replace(prefill[0], step_s=bad)])


def test_samples_that_fix_no_coefficient_are_refused() -> None:
    decode, _ = samples(COST)
    for few in ([], [s for s in decode if s.running == 1], [s for s in decode if s.kv_tokens == 100 * s.running]):
        with refused(InvalidValue, field="decode samples"):
            fit(few)


# The prediction.


def test_a_prediction_goes_step_by_step() -> None:
    requests = [MixedRequest(10, 2), MixedRequest(20, 1), MixedRequest(30, 1)]
    cost = COST
    first = cost.decode_step_s(2, 30) + cost.prefill_token_s * 30  # the second ends here
    second = cost.decode_step_s(2, 11 + 30) + cost.prefill_token_s * 30  # the third has its slot
    assert predicted_s(cost, requests, slots=2) == pytest.approx(first + second)
    assert predicted_s(cost, [], slots=2) == 0.0


def test_validation_needs_a_measured_run() -> None:
    nothing = Measurement(SLOTS, (), (), (), 0.0, (), 0.0)
    with refused(InvalidValue, field="mixed workload", value=0):
        validate(fit(*samples(COST)).coefficients, nothing)


def test_verifying_drafts_costs_what_their_tokens_do_not_explain() -> None:
    cost = replace(COST, draft_verify_s=0.004)
    drafts = [
        DraftSample(batch, 4, 100.0, cost.kv_token_s * 100.0 + cost.computed_s(5 * batch) + 0.004)
        for batch in (1, 2, 8)
    ]
    decode, prefill = samples(COST)
    assert fit(decode, prefill, None, drafts).coefficients.draft_verify_s == pytest.approx(0.004)
    assert fit(decode, prefill).coefficients.draft_verify_s == 0.0
