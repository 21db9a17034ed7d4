"""Real engines timed beside each other, each in a process of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from dora.data.engine_samples import pooled
from dora.errors import InvalidValue
from dora.lab.planning.profile import fit, validate
from dora.worker.side_by_side import ProfilerFailed, measure_side_by_side
from dora.worker.timing import Timing
from tests.refusals import refused

pytestmark = [pytest.mark.e2e, pytest.mark.full]


def timing(model: Path) -> Timing:
    return Timing(
        model,
        slots=4,
        kv_tokens=4096,
        max_model_len_tokens=256,
        dtype="float32",
        threads=1,
        seed=1,
        rounds=2,
        batches=3,
        clock="cpu",
    )


def test_two_engines_are_timed_while_both_are_at_work(tiny_dense: Path) -> None:
    found = measure_side_by_side(timing(tiny_dense), 2)
    assert len(found) == 2
    for each in found:
        assert [sample.running for sample in each.decode] == 3 * [1, 2, 4]
        assert all(0.0 < sample.step_s < 1.0 for sample in (*each.decode, *each.prefill))
        # time on a core is part of the time that passes
        assert 0.0 < each.mixed_s < 1.05 * max(each.mixed_wall_s)
        assert sum(each.mixed_wall_s) < each.wall_s
    assert found[0].mixed == found[1].mixed and found[0].decode != found[1].decode
    both = pooled(found)
    fitted = fit(both.decode, both.prefill)
    assert validate(fitted.coefficients, both).ratio == pytest.approx(1.0, abs=0.5)


def test_an_engine_that_cannot_start_ends_all(tiny_dense: Path) -> None:
    with refused(ProfilerFailed, field="output", value=""):
        measure_side_by_side(timing(tiny_dense.parent), 2)  # no model there
    with refused(InvalidValue, names=("max_model_len_tokens",)):
        measure_side_by_side(replace(timing(tiny_dense), max_model_len_tokens=32), 2)
