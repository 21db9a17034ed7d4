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

from dora.core.forecast.cost import CostModel
from dora.data.engine_samples import Experts, Measurement, measurement_of, pooled
from dora.data.types import RequestSpec, SamplingParams
from dora.errors import Conflict, DoraError, InvalidValue
from dora.lab.planning.profile import coefficients_of, fit, validate
from dora.lab.sim.scenario import Cluster
from dora.ops.cli.exits import DoraGroup, ExitCode
from dora.ops.cli.offline.profile import coefficients_text, conclude, failure, profile
from dora.ops.view.profile import profile_tree
from dora.worker.profiling import MIXTURE_BATCHES, USUAL, Grid, check_grid, default_grid, keep_busy, measure
from tests.refusals import refused
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
    assert asdict(CostModel.of(fitted.coefficients)) == pytest.approx(asdict(COST), rel=1e-6)
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
        assert CostModel.of(fitted).decode_step_s(batch, kv_tokens) == pytest.approx(expected, rel=0.05)
    assert fitted.prefill_token_s == pytest.approx(COST.prefill_token_s, rel=0.05)
    checked = validate(fitted, found)
    assert checked.ratio == pytest.approx(1.0, abs=0.1)
    assert checked.wall_s > 1.3 * checked.measured_s  # what the noise has cost


def test_beside_others_the_usual_step_counts_not_the_fastest(weights: Path) -> None:
    """Another engine on the same cores: a step takes 1.2 times as long, now and then half of it, or far more."""
    rng = np.random.default_rng(5)
    engine = timed_engine(weights, noise=lambda: float(rng.choice([0.5, 1.2, 8.0], p=[0.1, 0.8, 0.1])))
    grid = default_grid(SLOTS, KV_TOKENS, CONTEXT, rounds=8, counted=USUAL)
    found = measure(engine, grid, seed=1, clock=engine.clock)
    fitted = fit(found.decode, found.prefill).coefficients
    for batch, kv_tokens in ((1, 100), (4, 800), (8, 3000)):
        expected = 1.2 * COST.decode_step_s(batch, kv_tokens)
        assert CostModel.of(fitted).decode_step_s(batch, kv_tokens) == pytest.approx(expected, rel=0.02)
    assert validate(fitted, found).ratio == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("period_s", "share"), [(40.0, 0.5), (60.0, 0.6), (100.0, 0.5)])
def test_bursts_of_other_work_do_not_matter(weights: Path, period_s: float, share: float) -> None:
    """Everything takes three times as long for ``share`` of every period, as when others take the processor."""
    engine = timed_engine(weights, noise=lambda: 3.0 if engine.now_s % period_s < share * period_s else 1.0)
    found = measure(engine, default_grid(SLOTS, KV_TOKENS, CONTEXT), seed=1, clock=engine.clock)
    fitted = fit(found.decode, found.prefill).coefficients
    assert asdict(CostModel.of(fitted)) == pytest.approx(asdict(COST), rel=1e-6)
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


def test_steps_may_have_another_clock_than_the_whole(weights: Path) -> None:
    """As on a core that others have for half of the time: the steps take what they take, all of it twice as long."""
    engine = timed_engine(weights)
    grid = default_grid(SLOTS, KV_TOKENS, CONTEXT, counted=USUAL)
    found = measure(engine, grid, seed=1, clock=engine.clock, wall_clock=lambda: 2.0 * engine.now_s)
    fitted = fit(found.decode, found.prefill).coefficients
    assert asdict(CostModel.of(fitted)) == pytest.approx(asdict(COST), rel=1e-6)
    assert found.mixed_wall_s == pytest.approx([2.0 * found.mixed_s] * grid.rounds)
    assert found.wall_s == pytest.approx(2.0 * engine.now_s)
    checked = validate(fitted, found)
    assert (checked.ratio, checked.wall_ratio, checked.slowdown) == pytest.approx((1.0, 2.0, 2.0), rel=1e-6)
    assert checked.passed(0.15)


def test_a_mixture_of_experts_is_timed_at_more_batch_sizes(weights: Path) -> None:
    dense = default_grid(32, 65536, 2048)
    mixture = default_grid(32, 65536, 2048, batches=MIXTURE_BATCHES)
    assert dense.batches == (1, 2, 4, 8, 16, 32)
    assert mixture.batches == (1, 2, 3, 4, 5, 7, 9, 12, 17, 23, 32)
    bent = replace(COST, expert_fraction=0.25, imbalance=0.0, request_s=0.001)
    engine = timed_engine(weights, bent)
    found = measure(engine, default_grid(SLOTS, KV_TOKENS, CONTEXT, batches=12), seed=1, clock=engine.clock)
    fitted = fit(found.decode, found.prefill, Experts(8, 2)).coefficients
    assert (fitted.expert_fraction, fitted.imbalance) == (pytest.approx(0.25, rel=1e-3), 0.0)
    assert validate(fitted, found).ratio == pytest.approx(1.0, rel=1e-3)


def test_engines_beside_each_other_run_the_same_workload_and_are_pooled(weights: Path) -> None:
    grid = Grid(batches=(1, 4, 8), contexts=(16, 64), rounds=2)
    engines = [timed_engine(weights), timed_engine(weights, replace(COST, step_s=0.04))]
    found = [measure(engine, grid, seed=3, clock=engine.clock, place=place) for place, engine in enumerate(engines)]
    assert found[0].mixed == found[1].mixed
    assert found[0].decode != found[1].decode  # another order, other requests
    both = pooled([measurement_of(json.loads(json.dumps(asdict(each)))) for each in found])
    assert both.engines == 2
    assert [sample.running for sample in both.decode] == [1, 4, 8, 1, 4, 8]
    assert both.decode[2].step_s == pytest.approx((found[0].decode[2].step_s + found[1].decode[2].step_s) / 2)
    assert both.mixed_s == pytest.approx((found[0].mixed_s + found[1].mixed_s) / 2)
    fitted = fit(both.decode, both.prefill).coefficients
    assert fitted.step_s == pytest.approx(0.03, rel=1e-6)
    assert validate(fitted, both).ratio == pytest.approx(1.0, rel=1e-6)


def test_an_engine_is_kept_at_work_until_told(weights: Path) -> None:
    engine, grid = timed_engine(weights), Grid(batches=(1, 4), contexts=(16, 64))
    keep_busy(engine, grid, seed=3, until=lambda: engine.now_s > 60.0)
    assert 60.0 < engine.now_s < 61.0
    assert not engine.has_work()
    alone = timed_engine(weights)
    assert measure(alone, grid, seed=3, clock=alone.clock).mixed_s < 60.0 / 2  # so it ran the workload more than once


def test_engines_that_cannot_be_measured_are_refused(weights: Path) -> None:
    grid = Grid(batches=(1, 4), contexts=(16, 64))
    unloaded = TimedEngine(COST)
    with refused(InvalidValue, field="engine.version"):
        measure(unloaded, grid, seed=0, clock=unloaded.clock)
    with refused(InvalidValue, field="max_model_len_tokens and kv_tokens / slots", value=64):
        default_grid(8, 8192, 64)
    with refused(InvalidValue, field="slots", value=1):
        default_grid(1, 8192, 512)
    busy = timed_engine(weights)
    busy.add(RequestSpec("r", 1, (3, 4), SamplingParams()))
    with refused(Conflict, field="requests held", value=1):
        measure(busy, grid, seed=0, clock=busy.clock)
    for field, bad in (
        ("batches", replace(grid, batches=(1,))),
        ("batches", replace(grid, batches=(1, 9))),
        ("contexts", replace(grid, contexts=(16,))),
        ("contexts", replace(grid, contexts=(16, 500))),
        ("rounds", replace(grid, rounds=0)),
        ("mixed_requests", replace(grid, mixed_requests=-1)),
    ):
        with pytest.raises(InvalidValue) as caught:
            check_grid(bad, SLOTS, KV_TOKENS, CONTEXT)
        assert caught.value.field == field


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
    tree = json.loads(json.dumps(profile_tree("tiny", found, fitted, validate(fitted.coefficients, found), 0.15)))
    ratio = tree["predicted_tokens_per_s"] / tree["measured_tokens_per_s"]
    assert tree["predicted_over_measured"] == pytest.approx(ratio)
    assert tree["predicted_over_wall"] == pytest.approx(tree["predicted_tokens_per_s"] / tree["wall_tokens_per_s"])
    assert tree["wall_over_measured"] == pytest.approx(tree["measured_tokens_per_s"] / tree["wall_tokens_per_s"])
    assert (tree["held"], tree["engines"], tree["experts"]) == (["measured", "wall"], 1, None)
    assert tree["cost"] == fitted.coefficients.model_dump()
    assert len(tree["decode"]) == 4


@pytest.fixture
def measured(weights: Path) -> Measurement:
    engine = timed_engine(weights)
    return measure(engine, Grid(batches=(1, 4, 8), contexts=(16, 64)), seed=0, clock=engine.clock)


def test_a_fit_that_passes_its_check_is_written(measured: Measurement, tmp_path: Path) -> None:
    out = tmp_path / "cost.toml"
    conclude("tiny", measured, 0.15, out, force=False, as_json=True)
    assert coefficients_of(tomllib.loads(out.read_text())["cluster"]["cost"]).step_s == pytest.approx(0.02)


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
    for words in ("throughput = 1.400 is off: it must be 0.85 to 1.15", "--rounds", "cost.toml was not written"):
        assert words in shown.err


def test_the_clock_is_held_where_the_machine_was_quiet(
    measured: Measurement, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.13 of the steps and 1.04 times as long by the clock: 1.18 of it. A twentieth more is a busy machine's."""
    slower = replace(measured, mixed_s=1.13 * measured.mixed_s)
    for slowdown, held in ((1.04, {"measured": 1.13, "wall": 1.1752}), (1.06, {"measured": 1.13})):
        seen = replace(slower, mixed_wall_s=(slowdown * slower.mixed_s,))
        checked = validate(fit(seen.decode, seen.prefill).coefficients, seen)
        assert checked.held == pytest.approx(held, rel=1e-6)
        assert checked.passed(0.2)
        assert checked.passed(0.15) == ("wall" not in held)
        if "wall" in held:
            with pytest.raises(typer.Exit):
                conclude("tiny", seen, 0.15, None, force=False, as_json=False)
            shown = capsys.readouterr()
            assert "predicted/wall throughput = 1.175 is off" in shown.err
            assert "predicted/measured throughput" not in shown.err
        else:
            conclude("tiny", seen, 0.15, None, force=False, as_json=False)
            assert "1.198, not held" in capsys.readouterr().out


def test_the_table_says_what_was_seen_of_experts(measured: Measurement, capsys: pytest.CaptureFixture[str]) -> None:
    conclude("tiny-moe", replace(measured, experts=Experts(8, 2)), 0.15, None, force=False, as_json=False)
    assert "no effect measured" in capsys.readouterr().out


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
    with pytest.raises(InvalidValue) as caught:
        coefficients_of({field: value})
    assert caught.value.field == f"cluster.cost.{field}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "cost.yaml"), "--out"),
        (("--tolerance", "0"), "--tolerance"),
        (("--tolerance", "nan"), "--tolerance"),
        (("--model", "no/such/folder"), "--model"),
        (("--clock", "cpu", "--threads", "2"), "--clock"),
        (("--clock", "sun"), "--clock"),
        (("--engines", "0"), "--engines"),
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
    with refused(DoraError, field="package", value="vllm", names=("torch", "pip install")):
        profile(model="tiny")


def test_an_unknown_model_is_refused_before_anything_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    with refused(InvalidValue, field="--model", value="tinyy"):
        profile(model="tinyy")
    assert "timing" not in capsys.readouterr().err
