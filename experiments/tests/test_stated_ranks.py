"""The step time on ranks that somebody else chose."""

from dora.errors import InvalidValue
from dora.lab.planning.models import MODELS
from dora.lab.planning.options import options
from dora.lab.planning.pace import batch_of
from dora.lab.planning.workload import lognormal_of_mean, step_workload
from experiments.stated_ranks import over_even
from tests.refusals import refused
from tests.unit.test_layout import H800
from tests.unit.test_trainers import trainers


def test_no_ranks_are_better_than_those_that_the_planner_chooses() -> None:
    model, workload = MODELS["qwen2.5-32b"], step_workload(lognormal_of_mean(2400, 30_000), 512, 16, 120)
    tier, found = options(model, H800, batch_of(workload), 1), trainers("qwen2.5-32b", multiple=1)
    for gpus in (16, 36, 88, 100):
        chosen = found.layout(gpus).replica
        least = over_even(model, H800, workload, gpus, chosen.tensor, chosen.pipeline)
        ranks = {(each.replica.tensor, each.replica.pipeline) for each in tier if each.fits(gpus)}
        ratios = {each: over_even(model, H800, workload, gpus, *each) for each in ranks}
        assert len(ranks) > 1
        assert 1.0 <= least == min(ratios.values()) < max(ratios.values())


def test_a_pipeline_costs_the_more_the_fewer_micro_batches_a_replica_has() -> None:
    workload = step_workload(lognormal_of_mean(2400, 16_384), 512, 16, 150)
    at = [over_even(MODELS["qwen2.5-72b"], H800, workload, gpus, tensor=4, pipeline=4) for gpus in (128, 320, 640)]
    assert 1.0 < at[0] < at[1] < at[2]
    # 640 are 40 replicas: of an update each has two micro-batches, and waits for three.
    assert at[2] > 1.5


def test_ranks_that_do_not_fill_the_accelerators_or_hold_the_model_are_refused() -> None:
    workload = step_workload(lognormal_of_mean(2400, 16_384), 512, 16, 150)
    for gpus, tensor, pipeline in ((60, 4, 4), (64, 1, 1), (8, 4, 2)):
        with refused(
            InvalidValue,
            field="train_gpus",
            names=(
                gpus,
                tensor,
                pipeline,
            ),
        ):
            over_even(MODELS["qwen2.5-72b"], H800, workload, gpus, tensor, pipeline)
