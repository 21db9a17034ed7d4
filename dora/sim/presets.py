"""Presets: every row of the papers' tables as a :class:`~dora.sim.scenario.Scenario`, by name."""

from collections.abc import Mapping
from typing import Any, Final

from dora.config import DEFAULT_POLICY, merged
from dora.errors import InvalidValue, one_of
from dora.orchestrator.core.policies import check_window, nearest_window
from dora.planning.allocation import TrainingTime, allocate
from dora.planning.generation import EngineOption, Generation, generation, ways_to_generate
from dora.planning.workload import StepWorkload
from dora.sim.effect import check_effect
from dora.sim.experiments import EXPERIMENTS
from dora.sim.scenario import Scenario
from dora.sim.tasks import mixed_tokens, shapes_of
from dora.sim.workload import moments
from dora.validation import validated_as

LISTED_BY: Final = "dora simulate presets"  # the command
OWN_PERIODS_S: Final = {"laminar": 5.0}  # its repack is checked so often (paper 001, section 5.1)
# These train a step only when all of it is there; so does whatever shares its accelerators with the trainer.
WHOLE_BATCH: Final = frozenset({"sync", "one_step"})


def names() -> list[str]:
    """All presets, in the order of the papers."""
    return list(EXPERIMENTS)


def preset(name: str) -> Scenario:
    """The preset under the default policy. Raises InvalidValue for an unknown name, with the nearest one."""
    return scenario_for(name, DEFAULT_POLICY)


def scenario_for(name: str, policy: str, window: int | None = None) -> Scenario:
    """The preset with that policy's split, colocation and engine size, as the paper ran it.

    ``window``: instead of the preset's; only for policies that have a choice. Raises InvalidValue for an unknown
    preset and for a window that the policy cannot have.
    """
    experiment = EXPERIMENTS.get(name)
    if experiment is None:
        raise InvalidValue("--preset", name, one_of(name, EXPERIMENTS, listed_by=LISTED_BY))
    placement = experiment.placement(policy)
    return validated_as(
        Scenario,
        {
            "name": name,
            "policy": policy,
            "window": window_of(policy, placement.window or experiment.window, window),
            "period_s": OWN_PERIODS_S.get(policy, experiment.period_s),
            "cluster": {
                "gpus": experiment.gpus,
                "rollout_gpus": placement.rollout_gpus,
                "gpus_per_engine": placement.engine_gpus,
                "colocated": placement.colocated,
                "slots": experiment.slots,
                **experiment.engine(placement.engine_gpus),
            },
            "trainer": {
                "groups_per_step": experiment.groups_per_step,
                "step_s": placement.training_s,
                "micro_batches": experiment.micro_batches,
                "streams": policy not in WHOLE_BATCH and not placement.colocated,
                "publish_s": placement.publish_s,
            },
            "workload": experiment.workload,
            "in_flight_groups": placement.in_flight_groups,
        },
    )


def window_of(policy: str, default: int, asked: int | None = None) -> int:
    """The window ``asked`` for; else ``default``, or the nearest one that ``policy`` is defined for."""
    if asked is None:
        return nearest_window(policy, default)
    check_window(policy, asked, "window")
    return asked


def composed(
    over: Mapping[str, Any], name: str = "", policy: str = "", window: int | None = None, *, shared: bool = False
) -> Scenario:
    """The preset ``name`` with the fields of ``over`` in their place; without a name, the default cluster with them.

    ``policy`` and ``window`` stand above those of ``over``. ``shared``: other policies have ``over`` too, so a field of
    it may be without effect here. Raises InvalidValue for an unknown preset, a field that is unknown, wrong or without
    effect, and an impossible cluster.
    """
    policy = policy or str(over.get("policy", DEFAULT_POLICY))
    asked = over.get("window") if window is None else window
    own = asked if isinstance(asked, int) else None  # anything else is for the validation to refuse
    if name:
        base = scenario_for(name, policy, own).model_dump()
    else:
        default = Scenario.model_fields["window"].default
        base = {"window": window_of(policy, default, own), "trainer": {"streams": policy not in WHOLE_BATCH}}
    chosen = {"policy": policy} | ({} if window is None else {"window": window})
    scenario = validated_as(Scenario, merged(merged(base, over), chosen))
    if not shared:
        check_effect([scenario], over)
    return scenario


def planned(scenario: Scenario) -> Scenario:
    """The scenario with the train:rollout split that StreamRL's Algorithm 1 picks for it; engines stay as they are.

    Training scales linearly with its accelerators. Raises InvalidValue for a colocated scenario, which has no split,
    and for training that takes no time, which needs none.
    """
    cluster, trainer, workload = scenario.cluster, scenario.trainer, scenario.workload
    if cluster.colocated:
        raise InvalidValue("--split", "plan", f"preset: {scenario.policy} is colocated, its roles share all of them")
    if trainer.step_s <= 0.0:
        raise InvalidValue("--split", "plan", f"preset: training takes trainer.step_s = {trainer.step_s}, no time")
    option = EngineOption(cluster.gpus_per_engine, cluster.cost.model(), cluster.slots, cluster.kv_tokens)
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
        return generation(option, engines, batch, scenario.window, micro_batches)

    training = TrainingTime(((cluster.train_gpus, trainer.step_s),), multiple=cluster.gpus_per_engine)
    split, _ = allocate(cluster.gpus, lambda gpus: ways_to_generate(gpus, on_engines, [option]), training)
    rollout_gpus, train_gpus = split.generation.gpus, cluster.gpus - split.generation.gpus
    return scenario.model_copy(
        update={
            "cluster": cluster.model_copy(update={"rollout_gpus": rollout_gpus}),
            "trainer": trainer.model_copy(update={"step_s": training.seconds(train_gpus)}),
        }
    )
