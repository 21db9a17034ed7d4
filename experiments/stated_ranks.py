"""The step time of a trainer whose ranks a paper states."""

from functools import cache

from dora.data.hardware import Hardware
from dora.errors import InvalidValue
from dora.lab.planning.models import ModelSpec
from dora.lab.planning.options import Option, best, even_s, options, shortest_pipelines
from dora.lab.planning.pace import Batch, batch_of
from dora.lab.planning.workload import StepWorkload


def over_even(
    model: ModelSpec, hardware: Hardware, workload: StepWorkload, gpus: int, tensor: int, pipeline: int
) -> float:
    """The step time on ``gpus`` accelerators with these tensor and pipeline ranks, relative to an even division.

    1 or more: the best layout with these ranks, over the best of any with fractional replicas and layers. Raises
    InvalidValue if whole replicas of these ranks do not fill ``gpus`` or do not fit into memory.
    """
    found = _undivided(model, hardware, batch_of(workload))
    stated = (each for each in found if (each.replica.tensor, each.replica.pipeline) == (tensor, pipeline))
    option = best(stated, gpus)
    if option is None:
        raise InvalidValue("train_gpus", gpus, f"one on which replicas of {tensor} x {pipeline} fit {model.name}")
    shortest = shortest_pipelines(model)
    compared = [each for each in found if each.replica.pipeline in shortest]
    return option.step_s(gpus) / even_s([option, *compared], gpus)


@cache
def _undivided(model: ModelSpec, hardware: Hardware, batch: Batch) -> tuple[Option, ...]:
    """The options in which a sequence is on one rank. Cached, as trying all layouts is slow."""
    return tuple(options(model, hardware, batch, context=1))
