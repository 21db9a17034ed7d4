"""``dora simulate``: what it prints, what it refuses, and that nothing is printed where it refuses."""

import io
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from dora.config import BalanceConfig
from dora.core.groups.window import Window
from dora.core.plan import Plan, Trigger
from dora.core.policies import POLICIES, Strategy
from dora.core.policies.laxity import LaxityPolicy
from dora.core.view import View
from dora.lab.sim.figures.meter import Consumed
from dora.lab.sim.figures.report import Report
from dora.lab.sim.ledger import SimGroup
from dora.lab.sim.partial import strategies
from dora.lab.sim.presets import NAMES, composed, preset, scenario_for
from dora.lab.sim.run import simulate as simulate_scenario
from dora.lab.sim.workload import WorkloadStream
from dora.ops.cli.app import app
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.offline.simulate import run as simulate
from dora.ops.cli.output import progress_bar

NO_COST = [
    word for name in ("kv_token_s", "weights_s", "request_s", "step_s") for word in ("--set", f"cluster.cost.{name}=0")
]
TRACE = ("--preset", "small", "--set", "workload.lengths.kind=trace", "--set")
SMALL = ("simulate", "--preset", "small", "--steps", "3", "--warmup", "1")
SHORT = ("simulate", "--preset", "small", "--steps", "1", "--warmup", "0")
LENGTHS = [pytest.param(SHORT, id="short"), pytest.param(SMALL, marks=pytest.mark.full, id="whole")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_one_run_is_one_json_object_with_every_field() -> None:
    result = run(*SMALL, "--json")
    assert result.exit_code == ExitCode.OK, result.output
    answer = json.loads(result.stdout)
    split = {"gpus": 4, "train_gpus": 2, "rollout_gpus": 2, "gpus_per_engine": 1, "colocated": False, "split": "preset"}
    assert answer.items() >= (split | {"warmup": 1, "settings": []}).items()
    assert set(answer) == {field.name for field in fields(Report)} | {"warmup", "settings", "replay", *split}
    assert (answer["preset"], answer["policy"], answer["window"], answer["steps"]) == ("small", "laxity", 3, 3)
    assert answer["violations"] == answer["lost"] == answer["duplicated"] == 0
    assert 0 < answer["bound_min"] <= answer["step_time_min"]
    assert answer["staleness_max"] <= 2


def test_the_same_seed_gives_the_same_numbers_and_the_report_has_the_command() -> None:
    first = json.loads(run(*SMALL, "--seed", "7", "--json").stdout)
    second = json.loads(run(*shlex.split(first["replay"])[1:], "--json").stdout)
    for answer in (first, second):
        del answer["wall_s"], answer["sim_speedup"]
    assert first == second


def test_options_and_settings_reach_the_scenario() -> None:
    arguments = ("--window", "2", "--predictor", "statistics", "--set", "trainer.step_s=600")
    answer = json.loads(run(*SMALL, *arguments, "--json").stdout)
    assert (answer["window"], answer["predictor"]) == (2, "statistics")
    assert answer["step_time_min"] > 10.0 - 1e-9  # training alone, but for rounding
    assert answer["settings"] == ["trainer.step_s=600"]


def test_filter_and_redundant_rollout_are_recorded_and_shown_where_they_are_on() -> None:
    on = ("--set", "filter_fraction=0.25", "--set", "redundant_fraction=0.25")
    answer = json.loads(run(*SMALL, *on, "--json").stdout)
    assert (answer["filter_fraction"], answer["redundant_fraction"]) == (0.25, 0.25)
    assert answer["groups_filtered"] > 0 and 0.0 < answer["tokens_wasted_fraction"] < 1.0
    assert f"{answer['groups_filtered']}, {answer['groups_dropped']}" in run(*SMALL, *on).stdout
    assert "filtered" not in run(*SMALL).stdout


def test_a_scenario_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text('name = "mine"\n[window]\nsize = 2\n[trainer]\nstep_s = 600\n')
    answer = json.loads(run(*SMALL, "--file", str(file), "--json").stdout)
    assert (answer["preset"], answer["window"]) == ("mine", 2)
    assert answer["step_time_min"] > 10.0 - 1e-9  # training alone, but for rounding


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    result = run(*SMALL, "--plot", str(tmp_path / "run.svg"))
    assert result.exit_code == ExitCode.OK, result.output
    assert "run.svg" in result.stdout
    text = (tmp_path / "run.svg").read_text()
    assert "small · laxity · window 3" in text and "step 3" in text


def test_the_example_of_the_help_runs() -> None:
    words = simulate.EXAMPLE.replace("dora-64", "small").replace("--steps 8", "--steps 1").split()
    result = run(*words[1:])
    assert result.exit_code == ExitCode.OK, result.output


@pytest.mark.parametrize("length", LENGTHS)
def test_all_policies_are_compared_in_one_table_and_in_one_json_object(length: tuple[str, ...]) -> None:
    answer = json.loads(run(*SMALL, "--compare", "--json").stdout)
    assert (answer["preset"], answer["steps"], answer["warmup"], answer["settings"]) == ("small", 3, 1, [])
    rows = {row["report"]["policy"]: row for row in answer["policies"]}
    assert list(rows) == list(strategies())
    assert rows["sync"]["speedup"] == 1.0 and rows["sync"]["report"]["window"] == 1
    assert rows["dora"]["speedup"] > 1.0
    table = run(*length, "--compare").stdout
    assert all(policy in table for policy in strategies())


@pytest.mark.parametrize("length", LENGTHS)
def test_each_policy_of_a_comparison_has_the_nearest_window_that_it_is_defined_for(length: tuple[str, ...]) -> None:
    """That of the preset is 3; what is asked for, by an option or a setting, is for those that have a choice."""
    own = {"sync": 1, "one_step": 2, "stream": 2, "streamrl": 2, "partial": 64, "laxity": 3, "dora": 3}
    for asked, windows in (
        ((), own),
        (("--window", "1"), own | {"streamrl": 1, "laxity": 1, "dora": 1}),
        (("--set", "window.size=4"), own | {"laxity": 4, "dora": 4}),
    ):
        found = json.loads(run(*length, "--compare", *asked, "--json").stdout)["policies"]
        rows = {row["report"]["policy"]: row["report"]["window"] for row in found}
        assert rows.items() >= windows.items(), asked


def plant_over_admission(patch: pytest.MonkeyPatch) -> None:
    admissible = Window.admissible
    patch.setattr(Window, "admissible", lambda self, version: admissible(self, version) + (version == self.newest))


def test_a_broken_promise_is_told_with_its_time_and_the_command_that_shows_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = (*SMALL, "--policy", "dora", "--window", "2", "--seed", "5", "--set", "trainer.step_s=30")
    assert json.loads(run(*arguments, "--json").stdout)["violations"] == 0
    plant_over_admission(monkeypatch)
    told = run(*arguments, "--json")
    answer = json.loads(told.stdout)
    assert told.exit_code == ExitCode.FAILED
    assert (answer["preset"], answer["policy"], answer["window"], answer["seed"]) == ("small", "dora", 2, 5)
    assert (answer["violations"], answer["lost"], answer["duplicated"], answer["stalled"]) == (1, 0, 0, 0)
    assert answer["raised"] is False
    assert "(C3)" in answer["violation"] or "does not fit" in answer["violation"]
    assert 0.0 <= answer["at_s"] < 86_400.0

    again = run(*shlex.split(answer["replay"])[1:])
    assert again.exit_code == ExitCode.FAILED and again.stdout == ""
    assert answer["violation"] in again.stderr and f"{answer['at_s']:.3f} s" in again.stderr
    assert answer["replay"] in again.stderr and "Traceback" not in again.stderr
    monkeypatch.undo()
    assert run(*shlex.split(answer["replay"])[1:]).exit_code == ExitCode.OK


def test_a_comparison_ends_with_the_policy_that_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command names that policy alone, with the window that it had."""
    plant_over_admission(monkeypatch)
    told = run(*SMALL, "--set", "window.freshness=0", "--compare", "--json")
    answer = json.loads(told.stdout)
    assert told.exit_code == ExitCode.FAILED and answer["violations"] == 1
    again = run(*shlex.split(answer["replay"])[1:], "--json")
    assert json.loads(again.stdout) == answer


class Faulty(LaxityPolicy):
    """A strategy with a bug: it plans three times."""

    plans = 0

    def plan(self, view: View, trigger: Trigger) -> Plan:
        self.plans += 1
        if self.plans > 3:
            raise KeyError("w9")
        return super().plan(view, trigger)


def not_made(_config: BalanceConfig) -> Faulty:
    raise RuntimeError("no such table")


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        (Faulty, "KeyError: 'w9' (test_simulate_cli.py:"),
        (not_made, "RuntimeError: no such table (test_simulate_cli.py:"),
    ],
)
def test_a_strategy_that_raises_is_told_with_its_name_its_time_and_the_command_that_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, faulty: Callable[[BalanceConfig], Faulty], said: str
) -> None:
    monkeypatch.setitem(POLICIES, "faulty", Strategy(faulty))
    told = run(*SMALL, "--policy", "faulty", "--seed", "5", "--json")
    answer = json.loads(told.stdout)
    assert (told.exit_code, told.stderr) == (ExitCode.FAILED, "")
    assert (answer["policy"], answer["seed"], answer["violations"], answer["raised"]) == ("faulty", 5, 1, True)
    assert answer["violation"].startswith(said) and (answer["at_s"] > 0.0) == (faulty is Faulty)

    again = run(*shlex.split(answer["replay"])[1:])
    assert (again.exit_code, again.stdout) == (ExitCode.FAILED, "")
    told_s = f"{answer['at_s']:.3f} s"
    assert f"small, faulty, window 3, seed 5: an exception was raised after {told_s}" in again.stderr
    assert answer["violation"] in again.stderr and answer["replay"] in again.stderr
    assert "Traceback" not in again.stderr


def test_the_report_counts_groups_that_were_trained_outside_the_window() -> None:
    consumed = Consumed()
    prompt = WorkloadStream(preset("small").workload, 0, 1).take(1)[0]
    for version, window in ((5, 3), (4, 3), (3, 3), (2, 3), (6, 3), (4, 1)):  # the last was admitted in a window of 1
        consumed.add(5, 1.0, [SimGroup(prompt, version, window, (), started=0, unscored=0)], [])
    assert consumed.out_of_window == 3


def test_the_plan_changes_the_split() -> None:
    slow_training = ("--set", "trainer.step_s=60", "--json")
    own = json.loads(run(*SMALL, *slow_training).stdout)
    planned = json.loads(run(*SMALL, *slow_training, "--split", "plan").stdout)
    assert (own["engines"], planned["engines"]) == (2, 1)
    divided = [(each["split"], each["train_gpus"], each["rollout_gpus"], each["gpus"]) for each in (own, planned)]
    assert divided == [("preset", 2, 2, 4), ("plan", 3, 1, 4)]
    assert planned["step_time_min"] < own["step_time_min"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "dora-64"),
        (("--preset", "dora65"), "did you mean dora-64? One of dora-64, dora-128"),
        (("--preset", "zebra"), "one of dora-64, dora-128, longcat-4096, fleet-1024, agent-64, agent-1024, hybrid-64"),
        (("--preset", "small", "--policy", "stale"), "is not valid: did you mean staleflow? One of sync, one_step"),
        (("--preset", "small", "--policy", "sync", "--window", "3"), "by the definition of sync"),
        (("--preset", "small", "--policy", "streamrl", "--window", "3"), "1 to 2, by the definition of streamrl"),
        (("--preset", "small", "--policy", "sync", "--split", "plan"), "colocated"),
        (("--preset", "small", "--set", "trainer.step_s=0", "--split", "plan"), "training takes trainer.step_s = 0.0"),
        (("--preset", "small", "--predictor", "orcale"), "oracle"),
        (("--preset", "small", "--set", "cluster.gpu=3"), "did you mean gpus"),
        (("--preset", "small", "--set", "cluster.cost.step_s=-1"), "cluster.cost.step_s = -1"),
        (("--preset", "small", "--set", "cluster.cost.step_s=nan"), "finite"),
        (("--preset", "small", "--set", "cluster.weights_bytes=1e12"), "do not fit"),
        (("--preset", "small", "--set", "cluster.kv_tokens=1000"), "longest response"),
        (("--preset", "small", "--set", "workload.prompt_tokens=2049"), "a whole number from 1 to 2048"),
        (("--preset", "small", "--set", "cluster.rollout_gpus=4"), "cluster.rollout_gpus = 4"),
        (("--preset", "small", "--set", "workload.prompts=1000000000000"), "a whole number from 1 to 16777216"),
        (("--preset", "small", "--set", "workload.turns.most=1000000000"), "a whole number from 1 to 4096"),
        (
            ("--preset", "small", "--set", "workload.turns.most=1024", "--set", "workload.group_size=64"),
            "workload.turns.most = 1024 is not valid: it must be at most 512 with workload.group_size = 64",
        ),
        (("--preset", "small", "--set", f"cluster.slots={10**21}"), "a whole number from 1 to 1048576"),
        (
            ("--preset", "small", "--set", "workload.turns.most=4", "--set", "workload.turns.answer_tokens=5000"),
            "cluster.kv_tokens = 8000",
        ),
        (("--preset", "small", *NO_COST), "cluster.cost.step_s = 0"),
        (("--preset", "small", "--file", "no-such.toml"), "--file = 'no-such.toml'"),
        (("--preset", "small", "--plot", "run.pdf"), "--plot = 'run.pdf'"),
        (("--preset", "small", "--compare", "--plot", "run.png"), "left out with --compare"),
        (
            ("--preset", "small", "--compare", "--set", "balance.policy=dora"),
            "balance.policy = 'dora' is not valid: it must be left out with",
        ),
        (
            ("--preset", "small", "sweep", "--seeds", "1"),
            "--preset = 'small' is not valid: it must be left out before sweep",
        ),
        (
            ("--set", "window=2", "--set", "name=x", "sweep"),
            "--set = ['window=2', 'name=x'] is not valid: it must be left out",
        ),
        (("--json", "sweep"), "--json = True is not valid: it must be left out before sweep"),
        (("--split", "plan", "sweep"), "--split = 'plan' is not valid: it must be left out before sweep"),
        (
            ("--preset", "small", "--set", "workload.lengths.file=lengths.json"),
            "workload.lengths.file = 'lengths.json' is not valid: it must be "
            "left out: lengths.kind is lognormal, and only "
            "histogram and trace read a file",
        ),
        ((*TRACE, "workload.lengths.file=no-such.jsonl"), "no-such.jsonl"),
        ((*TRACE, f"workload.lengths.file={__file__}/below"), "a readable file (Not a directory)"),
        ((*TRACE, r'workload.lengths.file="a\u0000b"'), "a readable file (embedded null byte)"),
    ],
)
def test_a_bad_value_is_one_line_on_stderr_and_nothing_on_stdout(arguments: tuple[str, ...], message: str) -> None:
    result = run("simulate", *arguments)
    assert result.exit_code in (ExitCode.USAGE, ExitCode.REFUSED)
    assert result.stdout == ""
    assert result.stderr.startswith("dora: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_presets_are_listed_as_the_default_strategy_runs_them() -> None:
    listed = json.loads(run("simulate", "presets", "--json").stdout)
    assert [row["preset"] for row in listed] == list(NAMES)
    assert listed[0] == {
        "preset": "dora-64", "train_gpus": 40, "rollout_gpus": 24, "gpus_per_engine": 4, "window": 3,
        "groups_per_step": 512, "group_size": 16, "cap_tokens": 30_000,
    }  # fmt: skip
    shown_rows = run("simulate", "presets").stdout.splitlines()
    assert max(map(len, shown_rows)) <= 100
    assert [line.split()[0] for line in shown_rows if ":" in line][1:] == list(NAMES)


def test_dp_groups_that_were_said_to_be_lacking_let_generation_keep_up_better() -> None:
    def report(engines: int) -> Report:
        cluster = {"gpus": engines + 2, "rollout_gpus": engines}
        return simulate_scenario(composed({"cluster": cluster}, "small", "dora"), steps=12, warmup=4, seed=0)

    before = report(2)
    assert before.dp_groups_to_add
    after = report(2 + before.dp_groups_to_add)
    assert after.rollout_only_fraction < before.rollout_only_fraction
    together = simulate_scenario(scenario_for("small", "sync"), steps=2, warmup=0, seed=0)
    assert together.dp_groups_to_add is None, "they take turns"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("step_s", ["0", "1e-20"])
def test_a_trainer_that_takes_no_time_is_simulated_and_no_dp_groups_would_keep_up_with_it(
    step_s: str, length: tuple[str, ...]
) -> None:
    """So little time is lost in rounding beside that since the start."""
    step = ("--set", f"trainer.step_s={step_s}")
    free = (*SMALL, *step)
    answer = json.loads(run(*free, "--json").stdout)
    assert (answer["dp_groups_to_add"], answer["rollout_only_fraction"]) == (None, 1.0)
    table = run(*free)
    assert table.exit_code == ExitCode.OK, table.output
    assert re.search(r"workers to add for it\s+│\s+- │", table.stdout), table.stdout
    assert len(json.loads(run(*length, *step, "--compare", "--json").stdout)["policies"]) == len(strategies())


def test_progress_moves_within_a_step() -> None:
    told: list[float] = []
    simulate_scenario(scenario_for("small", "laxity"), steps=3, warmup=1, seed=0, progress=told.append)
    steps = [4 * share for share in told]
    assert told == sorted(told) and told[-1] == 1.0
    assert {step for step in steps if step.is_integer()} >= {1.0, 2.0, 3.0, 4.0}
    assert any(not step.is_integer() for step in steps), steps


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere_each_after_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(terminal: bool, patience_s: float) -> str:
        stream = io.StringIO()
        with progress_bar(Console(file=stream, force_terminal=terminal), "small, dora", patience_s) as tell:
            tell(0.5)
        return stream.getvalue()

    assert "small, dora" in told(terminal=True, patience_s=0.0)
    assert told(terminal=True, patience_s=60.0).strip() == ""
    assert told(terminal=False, patience_s=0.0) == ""
    monkeypatch.setattr("dora.ops.cli.output.LINES_S", 0.0)
    assert told(terminal=False, patience_s=0.0).startswith("dora: small, dora: 50%")
