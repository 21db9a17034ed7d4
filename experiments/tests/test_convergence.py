"""experiments/convergence: what the runs' results say, on curves that are known."""

from pathlib import Path
from typing import Any

import pytest

from dora.errors import InvalidValue
from experiments.convergence.__main__ import main
from experiments.convergence.intervals import estimate, first_at, ratio, running_mean
from experiments.convergence.page import BEGIN, END, markdown, with_results
from experiments.convergence.plan import Run, Store, chosen_rate, rate_runs, row_runs
from experiments.convergence.report import Runs, built, end_reward, step_seconds, steps_to, versions_to, waited_share
from experiments.convergence.rows import LIMITS, MODES, RATE_SEEDS, RATES, SYNC
from experiments.convergence.trial import reduced
from tests.refusals import refused

STEPS = 40
SYNC_ROW = next(row for row in MODES if row.name == SYNC)
WINDOW_ROW = next(row for row in MODES if row.name == "window-2")


def result(
    row: str, seed: int = 0, lag: int = 0, step_s: float = 1.0, rate: float = 1e-3, end: float = 1.0
) -> dict[str, Any]:
    """A policy that gains ``end / 20`` a step, up to ``end``; what it trains on is ``lag`` versions old."""
    policy = [end * min(1.0, version / 20) + seed / 1000 for version in range(STEPS)]
    rewards = [policy[max(0, step - lag)] for step in range(STEPS)]
    signals = {"trajectories": 64, "clip_fraction": 0.1, "effective_sample": 0.9, "ratio_p99": 1.2, "reward_mean": 0.5}
    return {
        "run": {"row": row, "seed": seed, "learning_rate": rate},
        "steps": [
            {"step": at, "reward": reward, "committed_s": at * step_s, "seconds": step_s, "waited_s": step_s / 4,
             "staleness_mean": float(min(lag, at)), "staleness_max": lag}
            for at, reward in enumerate(rewards)
        ],
        "versions": [{"version": at, "reward": policy[at], "trajectories": 64} for at in range(STEPS - lag)],
        "staleness": {str(lag): signals},
        "failures": [],
        "load_average": [1.0, 2.0],
    }  # fmt: skip


def report(**changes: Any) -> dict[str, Any]:
    runs = Runs(
        {
            SYNC: {seed: result(SYNC, seed) for seed in range(3)},
            "window-2": {seed: result("window-2", seed, **{"lag": 1, "step_s": 0.5, **changes}) for seed in range(3)},
        },
        {SYNC: 20.0, "window-2": 10.0, "partial": 8.0},
    )
    return built(runs, MODES, LIMITS, [], {"steps": STEPS, "learning_rate": 1e-3, "load": "1 to 2"})


def test_a_window_that_lags_by_one_step_reaches_sync_and_is_sooner_by_both_clocks() -> None:
    found = report()
    assert found["bars"] == {
        "window-2": {
            "reaches_sync_at_equal_samples": True,
            "policy_reaches_sync_at_equal_samples": True,
            "sooner_measured": True,
            "sooner_fleet": True,
        }
    }
    window, sync = found["modes"]["window-2"], found["modes"][SYNC]
    assert window["steps_to_level"].mean == sync["steps_to_level"].mean + 1
    assert window["versions_to_level"].mean == sync["versions_to_level"].mean  # the policy itself is no worse
    assert 1.8 < window["sooner_measured"].mean < 2.0 == window["sooner_measured_policy"].mean
    assert window["mean_difference"].high < 0.0 == window["end_difference"].mean
    assert found["modes"]["partial"]["sooner_fleet"].mean == 2.5


def test_a_window_that_learns_less_misses_the_bars() -> None:
    bars = report(end=0.8)["bars"]["window-2"]
    assert bars == dict.fromkeys(bars, False) | {"sooner_measured": None, "sooner_fleet": None}
    assert report(step_s=0.9)["bars"]["window-2"]["sooner_measured"] is False


def test_a_run_that_never_reaches_the_level_has_no_time_to_it() -> None:
    slow = result("window-2", end=0.5)
    assert steps_to(slow, 0.9) is None and versions_to(slow, 0.9) is None
    assert steps_to(slow, 0.4) is not None


def test_intervals_are_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None and found.mean == 2.0 and found.half == pytest.approx(4.303 / 3**0.5)
    assert estimate([]) is None and estimate([2.0]).half is None  # type: ignore[union-attr]
    halved = ratio([2.0, 8.0], [1.0, 1.0])
    assert halved is not None and halved.mean == pytest.approx(4.0)


def test_running_means_weigh_and_begin_short() -> None:
    assert running_mean([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]
    assert running_mean([1.0, 4.0], 2, [3.0, 1.0]) == [1.0, 1.75]
    assert first_at([0.0, 2.0, 1.0], 1.0) == 1 and first_at([0.0], 1.0) is None


def test_the_rate_is_that_of_the_highest_mean_reward() -> None:
    sweep = [
        result(SYNC, seed, rate=rate, end=end)
        for seed in RATE_SEEDS[:1]
        for rate, end in zip(RATES, (0.6, 1.0, 0.7), strict=True)
    ]
    assert chosen_rate(sweep) == RATES[1]


def test_runs_come_seed_by_seed_and_the_sweep_has_seeds_of_its_own() -> None:
    runs = row_runs([SYNC_ROW, WINDOW_ROW, MODES[-1]], 2, STEPS, 1e-3, ("a.b=1",))
    assert [(run.seed, run.row) for run in runs] == [(0, SYNC), (0, "window-2"), (1, SYNC), (1, "window-2")]
    assert all(run.settings[-1] == "a.b=1" for run in runs)
    sweep = rate_runs(SYNC_ROW, RATES, STEPS, ())
    assert {run.seed for run in sweep}.isdisjoint(run.seed for run in runs) and len(sweep) == len(RATES) * len(
        RATE_SEEDS
    )


def test_a_result_counts_for_its_own_specification_alone(tmp_path: Path) -> None:
    store, run = Store(tmp_path), Run(SYNC, 0, STEPS, 1e-3, ("balance.policy=sync",))
    assert store.result(run) is None
    store.write(run, {"run": run.specification})
    assert store.result(run) == {"run": run.specification}
    assert store.result(Run(SYNC, 0, STEPS + 1, 1e-3, ("balance.policy=sync",))) is None


def test_a_record_is_reduced_to_steps_versions_and_staleness() -> None:
    rows = [_row(0, 0, 0.25), _row(1, 0, 0.5), _row(1, 1, 1.0), _row(2, 1, 1.0)]  # step 2 was not committed
    trained = [
        {"step": step, "seconds": 2.0, "waited_s": 1.0, "metrics": {"staleness_0/clip_fraction": 0.1 * step}}
        for step in (0, 1)
    ]
    committed = [{"step": 0, "committed_at": 100.0}, {"withdrawn_version": 1}, {"step": 1, "committed_at": 103.5}]
    found = reduced(rows, trained, committed)
    assert [step["reward"] for step in found["steps"]] == [0.25, 0.75]
    assert [step["committed_s"] for step in found["steps"]] == [0.0, 3.5]
    assert [step["staleness_mean"] for step in found["steps"]] == [0.0, 0.5]
    assert found["versions"] == [
        {"version": 0, "reward": 0.375, "trajectories": 2},
        {"version": 1, "reward": 1.0, "trajectories": 1},
    ]
    assert found["staleness"]["0"]["clip_fraction"] == pytest.approx(0.05)
    assert {name: cell["trajectories"] for name, cell in found["staleness"].items()} == {"0": 2, "1": 1}


def test_a_step_takes_what_it_takes_once_it_is_settled() -> None:
    early = result(SYNC)
    for step in early["steps"][1:6]:
        step["committed_s"] /= 2  # what was begun beforehand
    early["steps"][5]["committed_s"] = 5.0
    assert step_seconds(early) == pytest.approx(1.0)
    assert end_reward(early) == 1.0


def test_a_trainer_waits_within_steps_and_between_them() -> None:
    assert waited_share(result(SYNC)) == pytest.approx(0.25)
    between = result(SYNC)
    for step in between["steps"]:
        step["committed_s"] *= 2
    assert waited_share(between) == pytest.approx(0.625)


def test_the_page_keeps_what_is_around_its_results() -> None:
    page = f"before\n{BEGIN}\n\nold\n\n{END}\nafter\n"
    text = markdown(report())
    assert with_results(page, text) == f"before\n{BEGIN}\n\n{text}\n\n{END}\nafter\n"
    assert "| window 2 (3) |" in text and "| partial rollout |" in text
    with refused(InvalidValue, field="--page", value="no marks"):
        with_results("no marks", text)


def test_without_runs_there_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report", "--lr", "1e-3", "--out", str(tmp_path)]) == 1
    assert "no run has ended" in capsys.readouterr().err


def _row(step: int, version: int, reward: float) -> dict[str, Any]:
    return {"trained_step": step, "behaviour_version": version, "reward": reward, "reward_valid": True}
