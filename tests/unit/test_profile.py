"""``dora profile``: the fit, the measurement of an engine whose steps take a known time, and the prediction."""

import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from dora.cli.exits import DoraGroup
from dora.cli.profile import coefficients_text, profile, report
from dora.errors import Conflict, InvalidValue
from dora.orchestrator.core.cost import CostModel
from dora.planning.profile import coefficients_of, fit, non_negative_least_squares, predicted_s, validate
from dora.planning.samples import DecodeSample, Measurement, MixedRequest, PrefillSample
from dora.sim.scenario import Cluster
from dora.types import RequestSpec, SamplingParams, TokenDelta
from dora.worker.fake_engine import FakeEngine
from dora.worker.profiling import Grid, check_grid, default_grid, measure

COST = CostModel(kv_token_s=2e-6, weights_s=0.012, request_s=0.003, step_s=0.02, prefill_token_s=5e-4)
SLOTS, KV_TOKENS, CONTEXT = 8, 8192, 512
BATCHES, CONTEXTS = (1, 2, 4, 6, 8), (100, 400, 900)


class TimedEngine(FakeEngine):
    """A fake engine on a clock of its own: each step takes what ``cost`` says, times ``noise()``."""

    def __init__(self, cost: CostModel, noise: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=CONTEXT)
        self.now_s = 0.0
        self._cost, self._noise = cost, noise
        self._context: dict[str, int] = {}
        self._prefilled: set[str] = set()

    def clock(self) -> float:
        return self.now_s

    def add(self, request: RequestSpec) -> None:
        super().add(request)
        self._context[request.request_id] = len(request.prompt_token_ids)

    def step(self) -> list[TokenDelta]:
        deltas = super().step()
        names = [delta.request_id for delta in deltas]
        new = [name for name in names if name not in self._prefilled]
        self._prefilled.update(new)
        step_s = self._cost.decode_step_s(len(names), sum(self._context[name] for name in names))
        step_s += self._cost.prefill_token_s * sum(self._context[name] for name in new)
        self.now_s += step_s * self._noise()
        for delta in deltas:
            self._context[delta.request_id] += len(delta.token_ids)
        return deltas


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"weight": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def timed_engine(weights: Path, cost: CostModel = COST, noise: Callable[[], float] = lambda: 1.0) -> TimedEngine:
    engine = TimedEngine(cost, noise)
    engine.load_weights(1, weights, None)
    return engine


def samples(cost: CostModel) -> tuple[list[DecodeSample], list[PrefillSample]]:
    """What a noiseless engine would be measured at."""
    decode = [
        DecodeSample(batch, batch * context, cost.decode_step_s(batch, batch * context))
        for batch in BATCHES
        for context in CONTEXTS
    ]
    prefill = [
        PrefillSample(1, context, cost.decode_step_s(1, context) + cost.prefill_token_s * context)
        for context in CONTEXTS
    ]
    return decode, prefill


# The fit.


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
    assert asdict(found.coefficients.model()) == pytest.approx(asdict(cost), abs=1e-12)
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
    cost = found.coefficients.model()
    errors = [abs(cost.decode_step_s(s.running, s.kv_tokens) - s.step_s) / s.step_s for s in decode]
    assert found.decode_error == pytest.approx(sum(errors) / 4)
    assert found.decode_error > 0.2


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
    with pytest.raises(InvalidValue, match="sample"):
        fit([replace(decode[0], step_s=bad), *decode[1:]])
    with pytest.raises(InvalidValue, match="sample"):
        fit(decode, [replace(prefill[0], step_s=bad)])


def test_samples_that_fix_no_coefficient_are_refused() -> None:
    decode, _ = samples(COST)
    for few in ([], [s for s in decode if s.running == 1], [s for s in decode if s.kv_tokens == 100 * s.running]):
        with pytest.raises(InvalidValue, match="two numbers of requests and two contexts"):
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
    with pytest.raises(InvalidValue, match="mixed workload"):
        validate(fit(*samples(COST)).coefficients, nothing)


# The measurement.


def test_an_engine_of_known_cost_is_found_out_and_its_run_predicted(weights: Path) -> None:
    engine = timed_engine(weights)
    grid = default_grid(SLOTS, KV_TOKENS, CONTEXT)
    found = measure(engine, grid, seed=1, clock=engine.clock)
    fitted = fit(found.decode, found.prefill)
    assert asdict(fitted.coefficients.model()) == pytest.approx(asdict(COST), rel=1e-6)
    checked = validate(fitted.coefficients, found)
    assert checked.ratio == pytest.approx(1.0, rel=1e-6)
    assert checked.tokens == sum(request.response_tokens for request in found.mixed)
    assert found.wall_s == pytest.approx(engine.now_s)
    assert {sample.running for sample in found.decode} == {1, 2, 3, 5, 8}
    assert found.mixed_wall_s == pytest.approx([found.mixed_s] * grid.mixed_repeats)


def test_the_measurement_withstands_a_busy_machine(weights: Path) -> None:
    rng = np.random.default_rng(5)
    engine = timed_engine(weights, noise=lambda: float(rng.choice([1.0, 1.02, 1.5, 4.0], p=[0.4, 0.2, 0.2, 0.2])))
    grid = replace(default_grid(SLOTS, KV_TOKENS, CONTEXT), mixed_repeats=8)
    found = measure(engine, grid, seed=1, clock=engine.clock)
    fitted = fit(found.decode, found.prefill).coefficients
    for batch, kv_tokens in ((1, 100), (4, 800), (8, 3000)):
        expected = COST.decode_step_s(batch, kv_tokens)
        assert fitted.model().decode_step_s(batch, kv_tokens) == pytest.approx(expected, rel=0.05)
    assert fitted.prefill_token_s == pytest.approx(COST.prefill_token_s, rel=0.05)
    checked = validate(fitted, found)
    assert checked.ratio == pytest.approx(1.0, abs=0.1)
    assert checked.wall_s > 1.3 * checked.measured_s  # what the noise has cost


def test_the_engine_is_left_empty_and_a_seed_repeats_a_measurement(weights: Path) -> None:
    grid = Grid(batches=(1, 4), contexts=(16, 64), mixed_requests=10, mixed_repeats=1)
    found = []
    for seed in (1, 1, 2):
        engine = timed_engine(weights)
        found.append(measure(engine, grid, seed=seed, clock=engine.clock))
        assert (engine.load().running, engine.load().waiting, engine.has_work()) == (0, 0, False)
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_engines_that_cannot_be_measured_are_refused(weights: Path) -> None:
    grid = Grid(batches=(1, 4), contexts=(16, 64))
    unloaded = TimedEngine(COST)
    with pytest.raises(InvalidValue, match="weights loaded"):
        measure(unloaded, grid, seed=0, clock=unloaded.clock)
    with pytest.raises(InvalidValue, match="max_model_len_tokens"):
        default_grid(8, 8192, 64)
    with pytest.raises(InvalidValue, match="slots = 1"):
        default_grid(1, 8192, 512)
    busy = timed_engine(weights)
    busy.add(RequestSpec("r", 1, (3, 4), SamplingParams()))
    with pytest.raises(Conflict, match="requests held = 1"):
        measure(busy, grid, seed=0, clock=busy.clock)
    for field, bad in (
        ("batches", replace(grid, batches=(1,))),
        ("batches", replace(grid, batches=(1, 9))),
        ("contexts", replace(grid, contexts=(16,))),
        ("contexts", replace(grid, contexts=(16, 500))),
        ("rounds", replace(grid, rounds=0)),
        ("mixed_repeats", replace(grid, mixed_repeats=-1)),
    ):
        with pytest.raises(InvalidValue) as refused:
            check_grid(bad, SLOTS, KV_TOKENS, CONTEXT)
        assert refused.value.field == field


# The command.


def test_the_files_are_a_scenarios_cost() -> None:
    fitted = fit(*samples(COST))
    for text in (
        tomllib.loads(coefficients_text(fitted, ".toml")),
        json.loads(coefficients_text(fitted, ".json")),
    ):
        assert Cluster.model_validate(text["cluster"]).cost == fitted.coefficients
        assert coefficients_of(text["cluster"]["cost"]) == fitted.coefficients


def test_the_report_is_plain_json(weights: Path) -> None:
    engine = timed_engine(weights)
    found = measure(engine, Grid(batches=(1, 4), contexts=(16, 64)), seed=0, clock=engine.clock)
    fitted = fit(found.decode, found.prefill)
    tree = json.loads(json.dumps(report("tiny", found, fitted, validate(fitted.coefficients, found))))
    ratio = tree["predicted_tokens_per_s"] / tree["measured_tokens_per_s"]
    assert tree["predicted_over_measured"] == pytest.approx(ratio)
    assert tree["cost"] == fitted.coefficients.model_dump()
    assert len(tree["decode"]) == 4


@pytest.mark.parametrize("field", ["kv_token_s", "weights_s", "request_s", "step_s", "prefill_token_s"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "fast"])
def test_bad_coefficients_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        coefficients_of({field: value})
    assert refused.value.field == f"cost.{field}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "cost.yaml"), "--out"),
        (("--tolerance", "0"), "--tolerance"),
        (("--tolerance", "nan"), "--tolerance"),
        (("--model", "no/such/folder"), "--model"),
    ],
)
def test_bad_input_is_refused_before_an_engine_starts(arguments: tuple[str, ...], words: str) -> None:
    app = typer.Typer(cls=DoraGroup)
    app.command("profile")(profile)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["profile", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
