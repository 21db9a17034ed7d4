"""The simulated fleet that learns as the map says: its regimes, its clock, and its table of known outcomes."""

from pathlib import Path

import pytest

from dora.trainers.objectives.presets import DEFAULT
from experiments.staleness.cell import Cell
from experiments.staleness.fleet import AUTO, SYNC, Learning, Outcome, outcomes, scenario
from experiments.staleness.fleet_page import fleet_markdown
from experiments.staleness.grid import Result
from experiments.staleness.regimes import Reached, Regime, SimStep, prolonged, reached, regimes
from experiments.staleness.report import points

TWICE = Regime("twice", (0.1,) * 10, (0.0, 1.0), (1.0, 2.0), 0.0)  # a version of staleness doubles the samples


@pytest.mark.parametrize(("staleness", "steps"), [(0.0, 10), (0.5, 15), (1.0, 20), (2.0, 30)])
def test_the_level_takes_as_many_more_steps_as_staleness_costs(staleness: float, steps: int) -> None:
    found = reached(TWICE, [SimStep(6.0, staleness)] * 40)
    assert found is not None
    assert [found.hours, found.steps] == pytest.approx([steps / 10, steps])
    assert reached(TWICE, [SimStep(6.0, staleness)] * (steps - 1)) is None


def test_steps_that_differ_in_staleness_teach_each_their_own_share() -> None:
    steps = [SimStep(60.0, 0.0)] * 5 + [SimStep(30.0, 1.0)] * 20
    found = reached(TWICE, steps)
    assert found is not None
    assert [found.hours, found.steps] == pytest.approx([5 + 5, 15])


def test_a_longer_run_repeats_the_last_steps() -> None:
    run = [SimStep(float(minute), 0.0) for minute in range(4)]
    assert [step.took_min for step in prolonged(run, 9, 2)] == [0, 1, 2, 3, 2, 3, 2, 3, 2]
    assert prolonged(run, 3, 2) == run[:3]


def curve(rate: float, lag: int, gains: int, movement: float) -> Result:
    """A policy of the tiny task whose reward rises evenly over ``gains`` steps."""
    cell = Cell("tiny", DEFAULT, rate, lag, 0, steps=200)
    rewards = [0.0] * lag + [min(1.0, step / gains) for step in range(200)]
    return {"cell": cell.specification, "steps": [{"reward": each, "movement": movement} for each in rewards]}


def test_regimes_have_the_movement_and_the_costs_of_the_map() -> None:
    results = [curve(3e-3, lag, 20 * (1 + lag), 0.1) for lag in (0, 1)]
    results += [curve(1e-4, lag, 100, 1e-4) for lag in (0, 1)]
    found = {each.name: each for each in regimes(results, points(results), seed=0)}
    assert list(found) == ["fast", "settling", "fine-tuning"]
    assert found["fast"].learnt(0.0, 1.0) == pytest.approx(0.5, abs=0.1)
    assert found["fine-tuning"].learnt(0.0, 1.0) == 1.0
    settling = found["settling"]
    assert settling.at(0.0) == pytest.approx(0.1) and settling.at(1e9) == pytest.approx(1e-4)
    assert settling.learnt(0.0, 1.0) < settling.learnt(settling.steps - 1, 1.0) <= 1.0
    assert regimes(results, points(results), seed=1) == [], "the map has no such seed"


def test_a_fleet_learns_until_its_level_and_tells_its_movement() -> None:
    """A policy that moves fast: the window stays at one version, and no step is stale."""
    run = Learning(scenario(AUTO, 24), Regime("fast", (0.5,) * 5, (0.0, 1.0), (1.0, 2.0), 0.0), seed=0)
    run.run()
    assert len(run.steps) == 5 and run.sizes == [1] * 5
    assert all(step.staleness == 0.0 and step.took_min > 10.0 for step in run.steps)


def test_nothing_is_simulated_that_may_not_be(tmp_path: Path) -> None:
    assert outcomes([(0, [TWICE])], tmp_path, print, lambda: False) == []


def test_the_table_compares_auto_with_the_best_and_the_bars_with_sync() -> None:
    hours: dict[int | str, float] = {SYNC: 30.0, 1: 33.0, 2: 18.0, 3: 20.0, 4: 24.0, AUTO: 18.9}
    table = fleet_markdown([Outcome("s", "fine-tuning", row, 0, Reached(took, 60.0)) for row, took in hours.items()])
    assert "| fine-tuning | 30.0 h (60) | 33.0 h (60) |" in table and "| 1.05 | 0.63 |" in table
    assert "longer than the best of the others: **missed** in fine-tuning (1.050)" in table
    assert "longer than sync: met in every regime" in table
    assert "1.67 times sooner than sync (met: 1.5), 1.000 times its samples (met: 1.03)" in table
