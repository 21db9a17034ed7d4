"""The papers' experiments: cluster, workload, and how each system divides the accelerators. Presets are made of them.

Training times are the only input that differs between the systems of one experiment. Where a paper states none they
come from one FLOP model, the same for all systems (``flop_training_s``); what else is assumed stands at each table.
"""

from collections.abc import Mapping
from typing import Final

from dora.sim.experiments import dora, laminar, own, staleflow, streamrl, verl
from dora.sim.experiments.base import Experiment

EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    **dora.EXPERIMENTS,
    **laminar.EXPERIMENTS,
    **staleflow.EXPERIMENTS,
    **streamrl.EXPERIMENTS,
    **dora.LONGCAT,
    **verl.EXPERIMENTS,
    **own.EXPERIMENTS,
}
