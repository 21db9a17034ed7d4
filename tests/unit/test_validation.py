"""Errors of a configuration name the field, the value and the allowed values in DORA's words."""

from collections.abc import Iterator
from typing import Any, get_origin

import pytest
from pydantic import BaseModel

from dora.cluster.kubernetes import KubernetesTable
from dora.cluster.ray_order import RayTable
from dora.cluster.slurm import SlurmTable
from dora.config import Config, CostConfig, settings_tree, validated
from dora.data.validation import validated_as
from dora.errors import InvalidValue
from dora.lab.sim.scenario import Scenario
from tests.refusals import refused

PYDANTIC = ("Input", "should", "valid ", "permitted", "unable", "greater", "less than", "required", "String")
WRONG = (
    *("", "nonsense", "1.5", -(1 << 70), 1 << 70, 1.5, -1e300, 1e300, float("nan"), float("inf")),
    *(True, [], {"a": 1}, None),
)


def refusal(model: type[BaseModel], *overrides: str) -> str:
    with pytest.raises(InvalidValue) as refused:
        validated_as(model, settings_tree(None, overrides))
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("window.size=soon", "window.size = 'soon' is not valid: it must be a whole number from 1 to 64 or auto"),
        ("window.size=true", "window.size = True is not valid: it must be a whole number from 1 to 64 or auto"),
        ("balance.period_s=0", "balance.period_s = 0 is not valid: it must be a number from 0.001 to 100000"),
        ("filter_fraction=1", "filter_fraction = 1 is not valid: it must be a number from 0 to 0.99"),
        ("trainer.step_s=nan", "trainer.step_s = nan is not valid: it must be a finite number from 0 to 100000"),
        ("workload.lengths.mu=long", "workload.lengths.mu = 'long' is not valid: it must be a number from -50 to 50"),
        (
            "workload.lengths.drift_per_step=1",
            "workload.lengths.drift_per_step = 1 is not valid: it must be a number above -0.5",
        ),
        ("cluster.weights_bytes=0", "cluster.weights_bytes = 0 is not valid: it must be a number from 1 to 1e+18"),
        ("cluster.colocated=maybe", "cluster.colocated = 'maybe' is not valid: it must be true or false"),
        ("name=3", "name = 3 is not valid: it must be a text, in quotes"),
        ("balance.predictor=orcale", "'orcale' is not valid: did you mean oracle? One of oracle, statistics, ranker"),
        (
            "trainer=3",
            "trainer = 3 is not valid: it must be a section with groups_per_step, step_s, micro_batches, streams",
        ),
        ("trainer.steps=3", "trainer.steps = 3 is not valid: did you mean step_s? One of groups_per_step, step_s"),
        ("slots=3", "slots = 3 is not valid: did you mean cluster.slots or cluster.kinds.slots? One"),
        (
            "cost.step_s=3",
            "cost.step_s = 3 is not valid: did you mean balance.cost or cluster.cost? One of name",
        ),
        ("step_s=3", "did you mean balance.cost.step_s or cluster.cost.step_s or trainer.step_s? One of name"),
        ("zebra=3", "zebra = 3 is not valid: it must be one of name, window"),
    ],
)
def test_a_scenario_says_what_is_allowed(override: str, message: str) -> None:
    assert message in refusal(Scenario, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.seed=-1", "rollout.seed = -1 is not valid: it must be a whole number from 0 to 9223372036854775807"),
        ("model=", "model = '' is not valid: it must be a non-empty text"),
        ("service.listen=nowhere", "service.listen = 'nowhere' is not valid: it must be host:port"),
        ("reward.function=abc", "reward.function = 'abc' is not valid: it must be module:function; empty:"),
        ("balance.cost=3", "balance.cost = 3 is not valid: it must be a section with kv_token_s, weights_s"),
        (
            "balance.cost.kv_token_s=0",
            "balance.cost.weights_s is missing: it must be a number from 0 to 10000",
        ),
        ("windw.size=3", "windw.size = 3 is not valid: did you mean window? One of model"),
        ("windw.size.most=3", "windw.size.most = 3 is not valid: did you mean window? One of model"),
        ("windw={}", "windw is not a section: did you mean window? One of model"),
        ("windw={size = 3, min = 1}", "windw is not a section: did you mean window? One of model"),
        ("window.size.most=3", "size.most = 3 is not valid: it must be left out: window.size is a whole number from 1"),
        ("prompts.columns.promt.x=3", "prompts.columns.promt.x = 3 is not valid: did you mean prompt?"),
        ("balance.cost.kv_tokens=0", "balance.cost.kv_tokens = 0 is not valid: did you mean kv_token_s? One of"),
    ],
)
def test_a_service_says_what_is_allowed(override: str, message: str) -> None:
    assert message in refusal(Config, override)


def test_a_field_is_named_with_the_section_that_it_stands_in() -> None:
    with refused(InvalidValue, field="cluster.cost.step_s", value=-1, names=("0", "10000")):
        validated_as(CostConfig, {"step_s": -1}, section="cluster.cost")


@pytest.mark.parametrize(
    ("table", "override", "message"),
    [
        (SlurmTable, "host=--gres=gpu:8", "host = '--gres=gpu:8' is not valid: it must be a list of options of sbatch"),
        (SlurmTable, "setup=[3]", "setup.0 = 3 is not valid: it must be a list of lines of shell"),
        (KubernetesTable, "patches=x", "patches = 'x' is not valid: it must be a list of kustomize patches"),
        (KubernetesTable, "host.cpu=4", "host.cpu = 4 is not valid: it must be a text, in quotes"),
        (RayTable, "service.CPU=a", "service.CPU = 'a' is not valid: it must be a finite number"),
        (RayTable, "service=3", "service = 3 is not valid: it must be a table"),
    ],
)
def test_a_schedulers_table_says_what_is_allowed(table: type[BaseModel], override: str, message: str) -> None:
    given = "folder=x" if table is SlurmTable else "port=1" if table is RayTable else "image=x"
    assert message in refusal(table, given, override)


def test_what_is_no_mapping_at_all_is_refused_too() -> None:
    with refused(InvalidValue, field="configuration", names=("1",)):
        validated([1])  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [Config, Scenario])
def test_a_misspelt_name_is_shown_as_it_was_typed(model: type[BaseModel]) -> None:
    for path in places(model):
        for misspelt in range(len(path)):
            typed = (*path[:misspelt], f"{path[misspelt]}z", *path[misspelt + 1 :])
            if any(part.isdecimal() for part in typed):
                continue  # an element of a list
            said = refusal(model, f"{'.'.join(typed)}=3")
            assert said.startswith(f"{'.'.join(typed)} = 3 is not valid: "), said


def test_a_long_value_is_shown_by_its_beginning() -> None:
    digits = "1" * 5000
    assert "111... (5,002 characters) is not valid" in refusal(Scenario, f"window.size={digits}")
    assert "window.size = (a number of too many digits) is not valid" in refusal(
        Scenario, "window.size=0x" + "f" * 5000
    )


def places(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every section and field; of a list of sections in its first element."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from places(kind, (*path, name, *(["0"] if get_origin(field.annotation) is tuple else [])))


@pytest.mark.parametrize("model", [Config, Scenario])
def test_no_field_and_no_value_lets_the_words_of_pydantic_out(model: type[BaseModel]) -> None:
    refused = 0
    for path in places(model):
        for value in WRONG:
            tree: Any = value
            for part in reversed(path):
                tree = [tree] if part == "0" else {part: tree}
            try:
                validated_as(model, tree)
            except InvalidValue as error:
                refused += 1
                assert error.field and error.allowed
                assert not any(word in error.allowed for word in PYDANTIC), error
    assert refused > 300


def test_a_word_may_stand_in_place_of_a_number() -> None:
    assert validated(settings_tree(None, ["window.size=auto"])).window.size == "auto"
    for value in ("Auto", "65", "0", "1.5", "true"):
        told = refusal(Config, f"window.size={value}")
        assert told.startswith("window.size = ") and told.endswith("a whole number from 1 to 64 or auto")
