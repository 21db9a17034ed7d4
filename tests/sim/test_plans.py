"""A planned split."""

from dora.lab.sim.presets import planned, scenario_for


def test_work_limits_at_the_split_that_is_planned_for_doras_setting() -> None:
    """Window 3: 36 train and 28 generate, which is within reach."""
    scenario = planned(scenario_for("dora-64", "laxity", 3))
    assert (scenario.cluster.train_gpus, scenario.cluster.rollout_gpus) == (36, 28)
