"""``dora profile``: the measurement of an engine whose steps take a known time, and the command."""

import json
import math
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from dora.cli.exits import DoraGroup, ExitCode
from dora.cli.profile import coefficients_text, conclude, failure, profile, report
from dora.errors import Conflict, DoraError, InvalidValue
from dora.planning.profile import coefficients_of, fit, validate
from dora.planning.samples import Measurement
from dora.sim.scenario import Cluster
from dora.types import RequestSpec, SamplingParams
from dora.worker.profiling import Grid, check_grid, default_grid, measure
from tests.unit.timed_engine import (
    CONTEXT,
    COST,
    KV_TOKENS,
    SLOTS,
    TimedEngine,
    samples,
    timed_engine,
)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"weight": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


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
    assert found.mixed_wall_s == pytest.approx([found.mixed_s] * grid.rounds)


def test_the_measurement_withstands_a_busy_machine(weights: Path) -> None:
    rng = np.random.default_rng(5)
    engine = timed_engine(weights, noise=lambda: float(rng.choice([1.0, 1.02, 1.5, 4.0], p=[0.4, 0.2, 0.2, 0.2])))
    grid = default_grid(SLOTS, KV_TOKENS, CONTEXT, rounds=8)
    found = measure(engine, grid, seed=1, clock=engine.clock)
    fitted = fit(found.decode, found.prefill).coefficients
    for batch, kv_tokens in ((1, 100), (4, 800), (8, 3000)):
        expected = COST.decode_step_s(batch, kv_tokens)
        assert fitted.model().decode_step_s(batch, kv_tokens) == pytest.approx(expected, rel=0.05)
    assert fitted.prefill_token_s == pytest.approx(COST.prefill_token_s, rel=0.05)
    checked = validate(fitted, found)
    assert checked.ratio == pytest.approx(1.0, abs=0.1)
    assert checked.wall_s > 1.3 * checked.measured_s  # what the noise has cost


@pytest.mark.parametrize(("period_s", "share"), [(40.0, 0.5), (60.0, 0.6), (100.0, 0.5)])
def test_bursts_of_other_work_do_not_matter(weights: Path, period_s: float, share: float) -> None:
    """Everything takes three times as long for ``share`` of every period, as when others take the processor."""
    engine = timed_engine(weights, noise=lambda: 3.0 if engine.now_s % period_s < share * period_s else 1.0)
    found = measure(engine, default_grid(SLOTS, KV_TOKENS, CONTEXT), seed=1, clock=engine.clock)
    fitted = fit(found.decode, found.prefill).coefficients
    assert asdict(fitted.model()) == pytest.approx(asdict(COST), rel=1e-6)
    assert validate(fitted, found).ratio == pytest.approx(1.0, rel=1e-6)
    assert max(found.mixed_wall_s) > 1.5 * found.mixed_s


def test_the_engine_is_left_empty_and_a_seed_repeats_a_measurement(weights: Path) -> None:
    grid = Grid(batches=(1, 4), contexts=(16, 64), mixed_requests=10, rounds=1)
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
        ("mixed_requests", replace(grid, mixed_requests=-1)),
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


@pytest.fixture
def measured(weights: Path) -> Measurement:
    engine = timed_engine(weights)
    return measure(engine, Grid(batches=(1, 4, 8), contexts=(16, 64)), seed=0, clock=engine.clock)


def test_a_fit_that_passes_its_check_is_written(measured: Measurement, tmp_path: Path) -> None:
    out = tmp_path / "cost.toml"
    conclude("tiny", measured, 0.15, out, force=False, as_json=True)
    assert coefficients_of(tomllib.loads(out.read_text())["cluster"]["cost"]).model().step_s == pytest.approx(0.02)


def test_a_fit_that_fails_its_check_is_not_written_and_says_why(
    measured: Measurement, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = replace(measured, mixed_s=1.4 * measured.mixed_s)  # slower than the steps that the fit saw
    out = tmp_path / "cost.toml"
    out.write_text("# of an earlier run\n")
    with pytest.raises(typer.Exit) as ended:
        conclude("tiny", busy, 0.15, out, force=False, as_json=True)
    assert ended.value.exit_code == ExitCode.FAILED
    assert out.read_text() == "# of an earlier run\n"
    shown = capsys.readouterr()
    assert json.loads(shown.out)["passed"] is False
    for words in ("throughput = 1.400 is not allowed: 0.85 to 1.15", "--rounds", "cost.toml is not written"):
        assert words in shown.err


def test_it_is_written_all_the_same_where_that_is_asked_for(
    measured: Measurement, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy, out = replace(measured, mixed_s=1.4 * measured.mixed_s), tmp_path / "cost.json"
    with pytest.raises(typer.Exit) as ended:
        conclude("tiny", busy, 0.15, out, force=True, as_json=False)
    assert ended.value.exit_code == ExitCode.FAILED
    assert (
        coefficients_of(json.loads(out.read_text())["cluster"]["cost"]) == fit(busy.decode, busy.prefill).coefficients
    )
    assert "not written" not in capsys.readouterr().err


def test_a_failed_check_names_what_was_fitted_as_nothing(measured: Measurement) -> None:
    flat = [replace(sample, step_s=0.03) for sample in measured.decode]  # as if requests and KV cost nothing
    fitted = fit(flat)
    lines = failure(fitted, validate(fitted.coefficients, measured), 0.15, None)
    assert any("fitted as 0: k1, k3;" in line for line in lines)


@pytest.mark.parametrize("field", ["kv_token_s", "weights_s", "request_s", "step_s", "prefill_token_s"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "fast"])
def test_bad_coefficients_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        coefficients_of({field: value})
    assert refused.value.field == f"cluster.cost.{field}"


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


def test_without_vllm_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    with pytest.raises(DoraError, match="needs torch and vLLM: pip install"):
        profile(model="tiny")


def test_an_unknown_model_is_refused_before_anything_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidValue, match="did you mean tiny"):
        profile(model="tinyy")
    assert "timing" not in capsys.readouterr().err
