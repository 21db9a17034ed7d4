"""The frontier of step time against staleness: what its runs are."""

import pytest

from dora.lab.sim.extent import expected_bound_s
from dora.lab.sim.presets import preset
from experiments.freshness import scaled
from experiments.tables import split


@pytest.mark.parametrize("scale", [2, 8])
def test_a_scaled_run_has_the_same_bound_and_training_time(scale: int) -> None:
    whole = preset("dora-64")
    part = scaled(whole, scale)
    assert part.trainer.groups_per_step * scale == whole.trainer.groups_per_step
    assert part.trainer.step_s == whole.trainer.step_s
    assert expected_bound_s(part) == pytest.approx(expected_bound_s(whole), rel=1e-3)


def test_training_scales_with_the_accelerators_that_rollout_leaves_it() -> None:
    assert split(preset("dora-64"), 32).trainer.step_s == pytest.approx(774.0 * 40 / 32)
