"""A planned split, run."""

import pytest

from dora.sim.presets import planned, scenario_for
from dora.sim.run import simulate


def test_a_split_that_the_longest_response_limits_takes_about_as_long_as_planned() -> None:
    scenario = planned(scenario_for("verl-async-128", "laxity", 2))
    training_min = scenario.trainer.step_s / 60  # generation was planned to take as long
    report = simulate(scenario, steps=6, warmup=4, seed=0)
    assert report.bound_min < 0.3 * training_min  # it is not work that limits
    assert report.step_time_min == pytest.approx(training_min, rel=0.1)


def test_work_limits_at_the_split_that_is_planned_for_doras_setting() -> None:
    """Window 3: 36 train and 28 generate, as the facts say is within reach."""
    scenario = planned(scenario_for("dora-64", "laxity", 3))
    assert (scenario.cluster.train_gpus, scenario.cluster.rollout_gpus) == (36, 28)
