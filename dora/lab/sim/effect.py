"""Finds scenario fields that have no effect in combination with others. Setting such a field is an error.

Fields that describe the machine (links, memory, the cost of an engine's step) are accepted whether used or not, and so
are fields that a strategy ignores. A preset may hold fields without effect: only explicit settings are checked.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dora.errors import InvalidValue
from dora.lab.sim.scenario import TRACED_PROMPTS, Scenario, SimTurns, Workload, not_lognormal


def check_effect(scenarios: Sequence[Scenario], settings: Mapping[str, Any]) -> None:
    """Raises InvalidValue for the first field of ``settings``, a tree, that has no effect in any of the scenarios."""
    idle = [dict(fields_without_effect(scenario)) for scenario in scenarios]
    for field, value in _leaves(settings, ""):
        if all(field in fields for fields in idle):
            raise InvalidValue(field, value, f"left out: {idle[0][field]}")


def fields_without_effect(scenario: Scenario) -> Iterator[tuple[str, str]]:
    cluster, trainer, workload = scenario.cluster, scenario.trainer, scenario.workload
    if cluster.colocated:
        yield "cluster.rollout_gpus", "cluster.colocated is true, so all cluster.gpus generate"
    if trainer.streams and trainer.micro_batches == 1:
        yield "trainer.streams", "trainer.micro_batches is 1, so training begins when the whole step is there"
    elif trainer.micro_batches > 1 and not trainer.streams:
        yield "trainer.micro_batches", "trainer.streams is false, so training begins when the whole step is there"
    if not scenario.window.is_adaptive:
        fixed = f"window.size is {scenario.window.size}, not auto"
        for name in (
            "min",
            "max",
            "wait_share",
            "clip_fraction_max",
            "effective_sample_min",
            "staleness_cost",
            "look_steps",
            "rest_steps",
        ):
            yield f"window.{name}", fixed
        yield "trainer.clip_per_step", fixed
    else:
        yield "window.effective_sample_min", "the simulator's trainer tells no effective sample size"
        yield "window.staleness_cost", "the simulator's trainer tells no movement of its policy"
    if scenario.balance.predictor != "ranker":
        yield (
            "workload.feature_correlation",
            f"balance.predictor is {scenario.balance.predictor}, and only ranker reads features",
        )
    if not 0 < workload.group_size_min < workload.group_size:
        yield "workload.settled_fraction", "workload.group_size_min starts all responses at once"
    yield from _of_lengths(workload)
    yield from _of_turns(workload)


def _of_lengths(workload: Workload) -> Iterator[tuple[str, str]]:
    kind, tasks = workload.lengths.kind, workload.tasks
    if kind != "lognormal":
        yield from ((f"workload.lengths.{name}", not_lognormal(kind)) for name in ("mu", "sigma"))
    elif tasks and all(task.sigma is not None for task in tasks):
        yield "workload.lengths.sigma", _all_have("sigma")
    if tasks and all(task.file for task in tasks):
        yield "workload.lengths.file", _all_have("file")
    if workload.prompt_lengths == "trace":
        yield "workload.prompt_tokens", TRACED_PROMPTS
    elif tasks and all(task.prompt_tokens is not None for task in tasks):
        yield "workload.prompt_tokens", _all_have("prompt_tokens")


def _of_turns(workload: Workload) -> Iterator[tuple[str, str]]:
    if workload.tasks and all(task.turns is not None for task in workload.tasks):
        for name in SimTurns.model_fields:
            yield f"workload.turns.{name}", _all_have("turns")
    else:
        yield from _of_one_kind(workload.turns, "workload.turns")
    for index, task in enumerate(workload.tasks):
        if task.turns is not None:
            yield from _of_one_kind(task.turns, f"workload.tasks.{index}.turns")


def _of_one_kind(turns: SimTurns, place: str) -> Iterator[tuple[str, str]]:
    if turns.most == 1:
        for name in ("environment_mean_s", "environment_sigma", "answer_tokens"):
            yield f"{place}.{name}", f"{place}.most is 1, so no environment is asked"
    elif not turns.environment_mean_s:
        yield f"{place}.environment_sigma", f"{place}.environment_mean_s is 0, so every environment answers at once"


def _all_have(field: str) -> str:
    return f"every one of workload.tasks has {field} of its own"


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        elements: list[tuple[Any, Any]] = list(tree.items())
    elif isinstance(tree, list | tuple) and all(isinstance(each, Mapping) for each in tree):
        elements = list(enumerate(tree))
    else:
        yield path, tree
        return
    for name, below in elements:
        yield from _leaves(below, f"{path}.{name}" if path else f"{name}")
