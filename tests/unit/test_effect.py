"""A field without effect is reported; presets and comparisons may hold it."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora.config import merged, settings_tree
from dora.errors import InvalidValue
from dora.lab.sim.effect import check_effect
from dora.lab.sim.partial import strategies
from dora.lab.sim.presets import NAMES, composed, scenario_for
from dora.lab.sim.run import check_cluster, simulate
from dora.ops.cli.app import app
from dora.ops.cli.exits import ExitCode
from tests.refusals import refused

TRACED = "[{name='a',share=0.5,file='x'},{name='b',share=0.5,file='y'}]"
TURNED = "[{name='a',share=0.5,turns={most=3}},{name='b',share=0.5,turns={most=1}}]"


@pytest.mark.parametrize(
    ("settings", "field", "value", "cause"),
    [
        (["workload.turns.environment_mean_s=5"], "workload.turns.environment_mean_s", 5, "workload.turns.most is 1"),
        (["workload.turns.environment_sigma=0.5"], "workload.turns.environment_sigma", 0.5, "workload.turns.most is 1"),
        (["workload.turns.answer_tokens=100"], "workload.turns.answer_tokens", 100, "workload.turns.most is 1"),
        (
            ["workload.turns={most=3,environment_sigma=0.5}"],
            "workload.turns.environment_sigma", 0.5,
            "workload.turns.environment_mean_s is 0",
        ),
        (
            ["workload.lengths={kind='histogram',file='x',sigma=1.0}"],
            "workload.lengths.sigma", 1.0,
            "lengths.kind is histogram",
        ),
        (["workload.lengths={kind='trace',file='x',mu=7}"], "workload.lengths.mu", 7, "lengths.kind is trace"),
        (
            ["workload.lengths={kind='trace',file='x'}", "workload.prompt_lengths=trace", "workload.prompt_tokens=200"],
            "workload.prompt_tokens", 200,
            "workload.prompt_lengths is trace",
        ),
        (["workload.feature_correlation=0.5"], "workload.feature_correlation", 0.5, "balance.predictor is oracle"),
        (
            ["workload.feature_correlation=0.5", "balance.predictor=statistics"],
            "workload.feature_correlation", 0.5,
            "balance.predictor is statistics",
        ),
        (["cluster.colocated=true", "cluster.rollout_gpus=2"], "cluster.rollout_gpus", 2, "cluster.colocated is true"),
        (["trainer.streams=false", "trainer.micro_batches=4"], "trainer.micro_batches", 4, "trainer.streams is false"),
        (["trainer.micro_batches=1", "trainer.streams=true"], "trainer.streams", True, "trainer.micro_batches is 1"),
        (
            [f"workload.tasks={TRACED}", "workload.lengths={kind='trace',file='z'}"],
            "workload.lengths.file", "z",
            "workload.tasks has file",
        ),
        (
            ["workload.tasks=[{name='a',share=1.0,sigma=0.5,prompt_tokens=9}]", "workload.lengths.sigma=1.0"],
            "workload.lengths.sigma", 1.0,
            "workload.tasks has sigma",
        ),
        (
            ["workload.tasks=[{name='a',share=1.0,sigma=0.5,prompt_tokens=9}]", "workload.prompt_tokens=300"],
            "workload.prompt_tokens", 300,
            "workload.tasks has prompt_tokens",
        ),
        (
            [f"workload.tasks={TURNED}", "workload.turns.most=3"],
            "workload.turns.most", 3,
            "workload.tasks has turns",
        ),
        (
            [f"workload.tasks={TURNED}", "workload.tasks.1.turns.answer_tokens=9"],
            "workload.tasks.1.turns.answer_tokens", 9,
            "workload.tasks.1.turns.most is 1",
        ),
    ],
)  # fmt: skip
def test_a_field_without_effect_is_refused(settings: list[str], field: str, value: object, cause: str) -> None:
    with refused(InvalidValue, field=field, value=value, names=(cause,)):
        composed(settings_tree(None, settings), "small", "laxity")


@pytest.mark.parametrize(
    "settings",
    [
        ["workload.turns={most=2,environment_mean_s=5.0,environment_sigma=0.5,answer_tokens=10}"],
        ["workload.turns={most=2,answer_tokens=10}"],
        ["workload.lengths={mu=5.0,sigma=0.5,scale=2.0}"],
        ["workload.lengths={kind='histogram',file='x',scale=2.0}"],
        ["workload.lengths={kind='trace',file='x'}", "workload.prompt_tokens=200"],
        ["workload.feature_correlation=0.5", "balance.predictor=ranker"],
        ["cluster.rollout_gpus=3"],
        ["cluster={gpus=2,rollout_gpus=1,link_bytes_per_s=1e9}"],  # one engine: that of the machine all the same
        ["cluster.cost={expert_fraction=1.0,imbalance=0.1}"],
        ["trainer={micro_batches=1,streams=false}"],
        ["workload.tasks=[{name='a',share=0.5,turns={most=2}},{name='b',share=0.5}]", "workload.turns.most=3"],
    ],
)
def test_a_field_with_an_effect_is_taken(settings: list[str]) -> None:
    composed(settings_tree(None, settings), "small")


def test_what_a_preset_holds_was_given_by_nobody(tmp_path: Path) -> None:
    """Its mu and sigma stay in it beside a file."""
    file = tmp_path / "lengths.json"
    file.write_text('{"hist": {"100": 1}}')
    scenario = composed(
        settings_tree(None, ["workload.lengths.kind=histogram", f"workload.lengths.file='{file}'"]), "dora-64"
    )
    assert scenario.workload.lengths.mu == 7.0881


@pytest.mark.parametrize("policy", strategies())
def test_every_preset_runs_with_every_policy(policy: str) -> None:
    for name in NAMES:
        scenario = scenario_for(name, policy)
        check_cluster(scenario)
        assert composed({}, name, policy) == scenario


def test_a_comparison_takes_what_some_of_its_policies_use() -> None:
    """sync is colocated and trains on whole batches; the others are not and do not."""
    shared: dict[str, Any] = {"cluster": {"rollout_gpus": 2}, "trainer": {"micro_batches": 4}}
    scenarios = [composed(shared, "small", policy, shared=True) for policy in ("sync", "laxity")]
    check_effect(scenarios, shared)
    with refused(InvalidValue, field="cluster.rollout_gpus", value=2):
        check_effect(scenarios[:1], shared)
    with refused(InvalidValue, field="workload.turns.answer_tokens", value=9):
        check_effect(scenarios, merged(shared, {"workload": {"turns": {"answer_tokens": 9}}}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "sync", "--set", "trainer.micro_batches=4"], "trainer.micro_batches = 4"),
        (["--compare", "--set", "workload.turns.answer_tokens=4"], "workload.turns.answer_tokens = 4"),
        (["--compare", "--set", "trainer.micro_batches=4"], ""),
    ],
)
def test_the_command_refuses_what_none_of_its_policies_uses(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--preset", "small", "--steps", "1", "--warmup", "0", *arguments])
    if not message:
        assert result.exit_code == ExitCode.OK, result.output
        return
    assert result.exit_code == ExitCode.USAGE and result.stdout == ""
    assert result.stderr.startswith(f"dora: {message} is not valid: it must be left out: ")


def test_the_documented_scenario_is_accepted(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```toml\n")[1:]]
    [documented] = (block for block in blocks if "entry-points" not in block)
    file = tmp_path / "documented.toml"
    file.write_text(documented)
    scenario = composed(settings_tree(file, []))
    check_cluster(scenario)
    assert len(scenario.workload.tasks) == 2


def test_what_is_refused_changes_nothing_where_it_is_held_all_the_same() -> None:
    """The other side of each rule: a run is the same to the last number whatever such a field says."""
    for policy, field, values in (
        ("sync", ("trainer", "micro_batches"), (1, 16)),
        ("sync", ("cluster", "rollout_gpus"), (1, 3)),
        ("laxity", ("workload", "feature_correlation"), (0.1, 0.9)),
    ):
        section, name = field
        reports = [
            simulate(composed({section: {name: value}}, "small", policy, shared=True), steps=2, warmup=1, seed=0)
            for value in values
        ]
        one, other = (report.step_time_min for report in reports)
        assert one == pytest.approx(other, rel=1e-9), field
        assert reports[0].events == reports[1].events, field
