"""Presets: named scenarios, each a TOML file in this directory.

A file has the fields of a :class:`~dora.lab.sim.scenario.Scenario`. A section ``[policy.NAME]`` has the fields that
differ for that strategy. Each strategy may have its own split, and strategies that alternate training and rollout
share all accelerators.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from dora.config import DEFAULT_POLICY, WindowSize, merged, value_at
from dora.core.forecast.cost import CostModel
from dora.core.policies import check_sizes, check_window, nearest_window
from dora.data.validation import validated_as
from dora.errors import InvalidValue, one_of
from dora.lab.planning.allocation import TrainingTime, allocate
from dora.lab.planning.generation import EngineOption, Generation, generation, ways_to_generate
from dora.lab.planning.workload import StepWorkload
from dora.lab.sim.effect import check_effect
from dora.lab.sim.partial import strategies
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.tasks import mixed_tokens, shapes_of
from dora.lab.sim.workload import moments

NAMES: Final = (
    *("dora-64", "dora-128", "longcat-4096", "fleet-1024", "agent-64", "agent-1024", "hybrid-64", "two-kinds-128"),
    "small",
)
LISTED_BY: Final = "dora simulate presets"  # command that lists them
OWN_PERIODS_S: Final = {"laminar": 5.0}  # period of its repacking check ("Laminar", section 5.1)
# Strategies that train a step only when it is complete, as does any that shares accelerators with the trainer.
WHOLE_BATCH: Final = frozenset({"sync", "one_step"})
_DEFAULTS: Final = Scenario().model_dump()


def preset(name: str) -> Scenario:
    """The preset with the default policy. Raises InvalidValue for an unknown name, with the nearest one."""
    return scenario_for(name, DEFAULT_POLICY)


def scenario_for(name: str, policy: str, window: WindowSize | None = None) -> Scenario:
    """Returns the preset with the split, colocation and period of ``policy``.

    ``window`` replaces the preset's, if the policy allows a choice. Raises InvalidValue for an unknown preset and for a
    window that the policy does not allow.
    """
    if name not in NAMES:
        raise InvalidValue("--preset", name, one_of(name, NAMES, listed_by=LISTED_BY))
    return adapted(_file(name), name, policy, window)


def adapted(tree: Mapping[str, Any], name: str, policy: str, window: WindowSize | None = None) -> Scenario:
    """The scenario of a preset's ``tree`` under ``policy``, as in ``scenario_for``."""
    own = tree.get("policy", {}).get(policy, {})
    whole = merged(_DEFAULTS, merged({key: value for key, value in tree.items() if key != "policy"}, own))
    period = {"period_s": OWN_PERIODS_S[policy]} if policy in OWN_PERIODS_S else {}
    over = {
        "name": name,
        "window": {"size": window_of(policy, whole["window"]["size"], window)},
        "balance": {"policy": policy, **period},
        "trainer": {"streams": policy not in WHOLE_BATCH and not whole["cluster"]["colocated"]},
    }
    return validated_as(Scenario, merged(whole, over))


@cache
def _file(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))


def window_of(policy: str, default: int, requested: WindowSize | None = None) -> WindowSize:
    """The window ``requested``; otherwise ``default``, or the nearest one that ``policy`` allows."""
    if requested is None:
        return nearest_window(policy, default, strategies())
    if isinstance(requested, int):
        check_window(policy, requested, strategies=strategies())
    return requested  # the scenario's validation checks the bounds of an adaptive one


def composed(
    over: Mapping[str, Any], name: str = "", policy: str = "", window: WindowSize | None = None, *, shared: bool = False
) -> Scenario:
    """Returns the preset ``name``, or the default cluster, with the fields of ``over`` replaced.

    ``policy`` and ``window`` override those of ``over``. If ``shared``, ``over`` applies to several policies, so some
    of its fields may have no effect here. Raises InvalidValue for an unknown preset, a field that is unknown, invalid
    or without effect, and an impossible cluster.
    """
    policy = policy or str(value_at(over, "balance.policy") or DEFAULT_POLICY)
    requested = value_at(over, "window.size") if window is None else window
    own = (
        requested if isinstance(requested, int) or requested == "auto" else None
    )  # the validation refuses other values
    if name:
        base = scenario_for(name, policy, own).model_dump()
    else:
        size = window_of(policy, _DEFAULTS["window"]["size"], own)
        base = merged(_DEFAULTS, {"window": {"size": size}, "trainer": {"streams": policy not in WHOLE_BATCH}})
    chosen = {"balance": {"policy": policy}} | ({} if window is None else {"window": {"size": window}})
    sound = {section: fields for section, fields in chosen.items() if isinstance(over.get(section, {}), Mapping)}
    scenario = validated_as(Scenario, merged(merged(base, over), sound))
    check_sizes(policy, scenario.window, strategies())
    if not shared:
        check_effect([scenario], over)
    return scenario


def planned(scenario: Scenario) -> Scenario:
    """The scenario with the train:rollout split of StreamRL's Algorithm 1. Engines stay the same.

    Training is assumed to scale linearly with its accelerators. Raises InvalidValue for a colocated scenario, which has
    no split, and for training without duration, which needs none.
    """
    cluster, trainer, workload = scenario.cluster, scenario.trainer, scenario.workload
    if cluster.colocated:
        raise InvalidValue(
            "--split", "plan", f"preset: {scenario.balance.policy} is colocated, its roles share all of them"
        )
    if cluster.kinds:
        raise InvalidValue("--split", "plan", "preset: cluster.kinds has engines of several kinds")
    if trainer.step_s <= 0.0:
        raise InvalidValue("--split", "plan", f"preset: training takes trainer.step_s = {trainer.step_s}, no time")
    option = EngineOption(cluster.gpus_per_engine, CostModel.of(cluster.cost), cluster.slots, cluster.kv_tokens)
    responses = trainer.groups_per_step * workload.group_size
    shapes = shapes_of(workload)
    lengths = moments(workload, shapes)
    batch = StepWorkload(
        responses=responses,
        tokens_at=mixed_tokens(shapes),
        n_tokens=lengths.generated_tokens(responses),
        c_tokens=lengths.context_tokens(responses),
        cap_tokens=workload.lengths.cap_tokens,
        prompt_tokens=lengths.prompt_tokens,
    )
    micro_batches = trainer.micro_batches if trainer.streams else 1

    def on_engines(option: EngineOption, engines: int) -> Generation:
        return generation(option, engines, batch, scenario.window.most, micro_batches)

    training = TrainingTime(((cluster.train_gpus, trainer.step_s),), multiple=cluster.gpus_per_engine)
    split, _ = allocate(cluster.gpus, lambda gpus: ways_to_generate(gpus, on_engines, [option]), training)
    rollout_gpus, train_gpus = split.generation.gpus, cluster.gpus - split.generation.gpus
    return scenario.model_copy(
        update={
            "cluster": cluster.model_copy(update={"rollout_gpus": rollout_gpus}),
            "trainer": trainer.model_copy(update={"step_s": training.seconds(train_gpus)}),
        }
    )
