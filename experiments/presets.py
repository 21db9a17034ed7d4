"""Every row of the papers' tables as a :class:`~dora.lab.sim.scenario.Scenario`, the package's presets among them.

Training times are the only input that differs between the systems of one experiment. Where a paper states none they
come from one FLOP model, the same for all systems (``flop_training_s``); what else is assumed stands at each table.
"""

from collections.abc import Mapping
from typing import Any, Final

from dora.config import DEFAULT_POLICY, merged
from dora.errors import InvalidValue, one_of
from dora.lab.sim import presets
from dora.lab.sim.effect import fields_without_effect
from dora.lab.sim.presets import adapted
from dora.lab.sim.scenario import Scenario
from experiments import laminar, staleflow, streamrl, verl
from experiments.base import Experiment

EXPERIMENTS: Final[Mapping[str, Experiment]] = {
    **laminar.EXPERIMENTS,
    **staleflow.EXPERIMENTS,
    **streamrl.EXPERIMENTS,
    **verl.EXPERIMENTS,
}
# LongCat's agentic runs ("DORA", section 5.2). Assumed beside what longcat-4096 assumes: up to 16 turns, each but the
# last followed by a call of the environment, 30 s on average, and a 500-token answer. Training again takes a quarter of
# what sync's rollout takes.
AGENTIC: Final = "longcat-4096-agentic"
AGENTIC_TURNS: Final = {"most": 16, "environment_mean_s": 30.0, "environment_sigma": 1.0, "answer_tokens": 500}
AGENTIC_COLOCATED_TRAINING_S: Final = 605.0
NAMES: Final = (*presets.NAMES, *EXPERIMENTS, AGENTIC)


def preset(name: str) -> Scenario:
    """The row under the default policy."""
    return scenario_for(name, DEFAULT_POLICY)


def scenario_for(name: str, policy: str, window: int | None = None) -> Scenario:
    """The row with that policy's split, colocation and engine size, as the paper ran it.

    ``window``: instead of the row's; only for policies that have a choice. Raises InvalidValue for an unknown row and
    for a window that the policy cannot have.
    """
    if name in presets.NAMES:
        return presets.scenario_for(name, policy, window)
    if name == AGENTIC:
        return _agentic(policy, window)
    if name not in EXPERIMENTS:
        raise InvalidValue("preset", name, one_of(name, NAMES))
    return adapted(EXPERIMENTS[name].tree(policy), name, policy, window)


def file_of(scenario: Scenario) -> dict[str, Any]:
    """The scenario as a file for `dora simulate --file`: without what is the default, and what has no effect in it."""
    idle = {field for field, _ in fields_without_effect(scenario)}
    return _differing(scenario.model_dump(), Scenario().model_dump(), idle, "")


def _differing(tree: Mapping[str, Any], default: Mapping[str, Any], idle: set[str], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if value == default[name] or f"{path}{name}" in idle:
            continue
        nested = isinstance(value, Mapping) and isinstance(default[name], Mapping)
        found[name] = _differing(value, default[name], idle, f"{path}{name}.") if nested else value
    return found


def _agentic(policy: str, window: int | None) -> Scenario:
    maths = presets.scenario_for("longcat-4096", policy, window)
    step_s = AGENTIC_COLOCATED_TRAINING_S * maths.cluster.gpus / maths.cluster.train_gpus
    over = {"name": AGENTIC, "trainer": {"step_s": step_s}, "workload": {"turns": AGENTIC_TURNS}}
    return Scenario.model_validate(merged(maths.model_dump(), over))
