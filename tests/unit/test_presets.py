"""Presets: possible clusters under every policy, and how a scenario is composed of one and of what is given over it."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dora.config import merged, settings_tree, tree_of
from dora.data.validation import validated_as
from dora.errors import InvalidValue
from dora.lab.planning.generation import bound_s
from dora.lab.sim.presets import NAMES, composed, planned, preset, scenario_for
from dora.lab.sim.scenario import Scenario
from dora.lab.sim.workload import moments
from tests.refusals import data_words, refused


def bound_min(scenario: Scenario) -> float:
    """The bubble-free bound of a scenario in minutes."""
    cluster, responses = scenario.cluster, scenario.trainer.groups_per_step * scenario.workload.group_size
    lengths = moments(scenario.workload)
    tokens, context = lengths.generated_tokens(responses), lengths.context_tokens(responses)
    return bound_s(cluster.cost, cluster.slots, cluster.kv_tokens, tokens, context, cluster.engines) / 60


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["dora", "laminar", "sync", "one_step", "stream", "partial"])
def test_every_preset_is_a_possible_cluster_under_every_policy(name: str, policy: str) -> None:
    scenario = scenario_for(name, policy)
    assert (scenario.name, scenario.balance.policy) == (name, policy)
    assert scenario.cluster.engines >= 1
    assert (
        scenario.cluster.colocated
        or scenario.cluster.rollout_gpus + scenario.cluster.train_gpus == scenario.cluster.gpus
    )
    assert scenario.workload.lengths.cap_tokens < scenario.cluster.kv_tokens
    assert scenario.trainer.step_s > 0.0
    assert scenario.trainer.streams == (policy not in ("sync", "one_step") and not scenario.cluster.colocated)


@pytest.mark.parametrize(("name", "bound"), [("dora-64", 15.63), ("dora-128", 9.38)])
def test_the_dora_presets_have_the_bound_that_was_computed_for_them(name: str, bound: float) -> None:
    assert bound_min(preset(name)) == pytest.approx(bound, rel=0.02)


def test_sync_uses_all_accelerators_for_both() -> None:
    assert [scenario_for(f"dora-{gpus}", "sync").cluster.engines for gpus in (64, 128)] == [16, 32]


def test_a_parameter_of_a_distribution_that_is_not_in_use_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text('{"hist": {"100": 1, "200": 1}}')
    lengths = {"kind": "histogram", "file": str(file)}
    assert composed({"workload": {"lengths": lengths}}, "small").workload.lengths.kind == "histogram"
    with refused(InvalidValue, field="workload.lengths.sigma", value=0.5):
        composed({"workload": {"lengths": {**lengths, "sigma": 0.5}}}, "small")


def test_policies_have_the_window_of_their_definition() -> None:
    assert [scenario_for("dora-64", policy).window.size for policy in ("sync", "one_step", "stream", "dora")] == [
        1,
        2,
        2,
        3,
    ]
    assert scenario_for("dora-64", "dora", window=2).window.size == 2
    assert scenario_for("dora-64", "streamrl").window.size == 2
    assert scenario_for("dora-64", "streamrl", window=1).window.size == 1
    with refused(InvalidValue, field="window.size", value=3, names=("1",)):
        scenario_for("dora-64", "sync", window=3)
    with refused(InvalidValue, field="window.size", value=3, names=("1", "2")):
        composed({"balance": {"policy": "streamrl"}, "window": {"size": 3}})


def test_laminar_checks_for_idle_replicas_as_often_as_its_paper() -> None:
    assert [scenario_for("dora-64", policy).balance.period_s for policy in ("laminar", "dora")] == [5.0, 30.0]


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with refused(InvalidValue, field="--preset", value="dora64", names=("dora-64",)):
        preset("dora64")


def test_fields_are_overridden_and_checked() -> None:
    over = settings_tree(None, ["workload.lengths.sigma=1.0", "cluster.load_s=5"])
    scenario = composed(over, "dora-64")
    assert (scenario.workload.lengths.sigma, scenario.workload.lengths.mu) == (1.0, 7.0881)
    assert (scenario.cluster.load_s, scenario.cluster.rollout_gpus) == (5.0, 24)
    for override, message in (
        ("workload.lengths.sigmma=1", "did you mean sigma"),
        ("cluster.cost.kv_token_s=-1", "a number from 0 to 10000"),
        ("cluster.cost.kv_token_s=nan", "finite"),
        ('cluster.cost.kv_token_s="1"', "a number from 0 to 10000"),
        ("cluster.gpus_per_engine=1", "at least 4, with 80 GB each: 65.5 GB of weights"),
        ("window.size=soon", "a whole number from 1 to 64"),
        ("window=3", "a section with size, groups_per_step"),
        ("balance=3", "a section with policy, predictor"),
        ("window.groups_per_step=3", "0, or the 512 of trainer.groups_per_step"),
    ):
        with refused(InvalidValue, names=data_words(message)):
            composed(settings_tree(None, [override]), "dora-64")


def numbers(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of a section, and of those below it, that are numbers."""
    for name, each in section.model_fields.items():
        kinds = [each.annotation, *get_args(each.annotation)]
        for below in (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)):
            yield from numbers(below)
        if {int, float} & {kind for kind in kinds if isinstance(kind, type)}:
            yield f"{section.__name__}.{name}", each


def test_every_number_has_a_least_and_a_most() -> None:
    """Else it ends a run half way: out of memory, of the 64 bits of a column, or of what a float can hold."""
    found = dict(numbers(Scenario))
    assert len(found) >= 45
    bounds = {name: [isinstance(limit, kinds) for kinds in ((Ge, Gt), (Le, Lt)) for limit in each.metadata].count(True)
              for name, each in found.items()}  # fmt: skip
    assert [name for name, count in bounds.items() if count != 2] == []


def test_without_a_preset_the_default_cluster_is_changed() -> None:
    assert composed({"balance": {"policy": "sync"}}).window.size == 1
    found = composed({"window": {"size": 4}}, policy="laminar")
    assert (found.window.size, found.balance.policy) == (4, "laminar")
    assert found.model_copy(update={"window": Scenario().window, "balance": Scenario().balance}) == Scenario()


def test_sections_are_merged_field_by_field() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}) == {
        "a": {"b": 1, "c": 4},
        "d": {"e": 5},
    }
    with refused(InvalidValue, field="nonsense", value=1):
        validated_as(Scenario, {"nonsense": 1})


def test_the_plan_splits_for_the_shortest_step() -> None:
    own, plan = preset("dora-64"), planned(preset("dora-64"))
    assert plan.cluster.gpus == own.cluster.gpus
    assert plan.trainer.step_s == pytest.approx(own.trainer.step_s * own.cluster.train_gpus / plan.cluster.train_gpus)
    longest = max(bound_min(own), own.trainer.step_s / 60)
    assert max(bound_min(plan), plan.trainer.step_s / 60) < longest
    with refused(InvalidValue, field="--split", value="plan"):
        planned(scenario_for("dora-64", "sync"))


@pytest.mark.parametrize("field", ["window.size", "balance.period_s", "filter_fraction"])
def test_a_truth_value_is_no_number_of_a_scenario(field: str) -> None:
    with refused(InvalidValue, value=True, names=(field,)):
        composed(tree_of(field, True), "small")


def test_without_a_preset_the_cluster_has_to_hold_its_model_too() -> None:
    with refused(InvalidValue, field="cluster.gpus_per_engine", value=4, names=("12503", "80")):
        composed({"cluster": {"weights_bytes": 1e15}})
    assert composed({"cluster": {"weights_bytes": 1e15, "gpu_memory_bytes": 0.0}}).cluster.engines
