"""Every verdict can fail: a planted violation turns each "ok", each exit code 0 and each "every promise held"."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import dora.ops.cli
from dora.data.run_record import Recorder
from dora.data.types import Segment
from dora.errors import InvalidValue, LimitExceeded
from dora.ops.cli import demo
from dora.ops.cli.app import app
from dora.ops.cli.control import evaluate
from dora.ops.cli.exits import ExitCode
from dora.ops.cli.offline.simulate import run as simulate
from dora.ops.demo.report import DemoReport, build_report
from dora.ops.doctor import engine_checks
from dora.ops.doctor import run as doctor
from dora.ops.doctor.run import run_stage
from dora.ops.doctor.stages import STAGES
from dora.ops.doctor.verdict import Failed, Outcome, StageResult, Subject
from dora.ops.verify import verify
from tests.chaos.report import not_struck
from tests.chaos.strikes import Struck
from tests.refusals import refused
from tests.stress.report import not_killed
from tests.stress.run import Seen
from tests.unit.effects.rows import Shown
from tests.unit.test_demo_report import RUN, SECONDS, healthy, row_of
from tests.unit.test_verify import models, record, rewrite, trajectories  # noqa: F401

PLANTED = {  # each module that may end a command with 1, and the tests in which it does
    "demo.py": Shown("tests/unit/test_verdicts.py::test_a_demo_with_a_broken_promise_ends_with_1"),
    "doctor.py": Shown("tests/unit/test_verdicts.py::test_a_machine_is_well_only_if_a_stage_is"),
    "control/evaluate.py": Shown("tests/unit/test_verdicts.py::test_an_evaluation_in_part_ends_with_1"),
    "offline/profile.py": Shown(
        "tests/unit/test_profile_run.py::test_a_fit_that_fails_its_check_is_not_written_and_says_why"
    ),
    "offline/replay.py": Shown(
        "tests/unit/test_replay.py::test_the_command_shows_what_ended_the_service_without_a_traceback"
    ),
    "offline/verify.py": Shown(
        "tests/unit/test_verdicts.py::test_a_record_with_a_violation_or_without_content_ends_with_1"
    ),
    "offline/simulate/run.py": Shown(
        "tests/unit/test_verdicts.py::test_a_simulation_whose_report_counts_a_violation_ends_with_1"
    ),
    "offline/simulate/sweep.py": Shown(
        "tests/unit/test_sweep.py::test_a_failure_is_printed_with_the_command_that_replays_it"
    ),
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_every_command_that_gives_a_verdict_has_a_planted_violation() -> None:
    folder = Path(dora.ops.cli.__file__).parent
    failing = {
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        if "typer.Exit(ExitCode.FAILED)" in file.read_text()
    }
    assert failing == set(PLANTED)
    for module, shown in PLANTED.items():
        shown.check("exit_code", "FAILED")
        assert module


# ----------------------------------------------------------------------------------------------------------- dora demo


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_demo_with_a_broken_promise_ends_with_1(monkeypatch: pytest.MonkeyPatch, is_sound: bool) -> None:
    rows, counters, trained = healthy()
    report = build_report(rows if is_sound else rows[1:], counters, trained, SECONDS, RUN)

    async def ended(*_: object) -> DemoReport:
        return report

    monkeypatch.setattr(demo, "_run", ended)
    shown = run("demo", "--model", "tiny")
    assert shown.exit_code == (ExitCode.OK if is_sound else ExitCode.FAILED)
    assert ("every promise held" in shown.stdout) == is_sound


def test_a_trajectory_without_a_version_and_one_trained_too_early_break_a_promise() -> None:
    rows, counters, trained = healthy()
    rows[-2] = row_of(2, 1, 0, worker_history=())
    assert build_report(rows, counters, trained, SECONDS, RUN)["c1_violations"] == 1
    rows, counters, trained = healthy()
    segments = (Segment("w0", 0, 2, "new", 5),)
    rows[-2] = row_of(2, 1, 0, behaviour_version=5, staleness=-3, worker_history=segments)
    assert any("s2-g1-0" in failure for failure in build_report(rows, counters, trained, SECONDS, RUN)["failures"])


# ---------------------------------------------------------------------------------------------------------- dora doctor


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (("ok", "skipped"), ExitCode.OK),
        (("ok", "failed"), ExitCode.FAILED),
        (("skipped", "skipped"), ExitCode.FAILED),
    ],
)
def test_a_machine_is_well_only_if_a_stage_is(
    monkeypatch: pytest.MonkeyPatch, tiny_dense: Path, outcomes: tuple[Outcome, ...], code: ExitCode
) -> None:
    left = iter(outcomes)
    monkeypatch.setattr(doctor, "run_stage", lambda stage, *_: StageResult(stage.name, next(left)))
    names = [part for stage in STAGES[1:3] for part in ("--stage", stage.name)]
    shown = run("doctor", "--device", "cpu", "--model", str(tiny_dense), "--json", *names)
    assert (shown.exit_code, json.loads(shown.stdout)["ok"]) == (code, code == ExitCode.OK)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"stage": "engine", "outcome": "ok"}, 0),  # of another stage
        ({"stage": "moves", "outcome": "good"}, 0),
        ({"stage": "moves", "outcome": "ok"}, 9),
        ({}, 0),
    ],
)
def test_a_stage_that_says_anything_else_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, str], code: int
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(said)}'\nexit {code}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    stage = next(each for each in STAGES if each.name == "moves")
    assert run_stage(stage, "cpu", tmp_path).outcome == "failed"


def test_another_refusal_is_none_of_too_large_a_kv_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(error: Exception) -> None:
        def started(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(engine_checks, "engine_of", started)

    subject = Subject("cuda", tmp_path, tmp_path)
    refuse(LimitExceeded("workers.kv_tokens", 1 << 31, "fewer"))
    assert "workers.kv_tokens" in engine_checks.memory(subject)["refusal"]
    refuse(InvalidValue("model", str(tmp_path), "a folder with config.json"))
    with refused(Failed):
        engine_checks.memory(subject)


# ---------------------------------------------------------------------------------------------------------- dora verify


def test_a_record_with_a_violation_or_without_content_ends_with_1(record: Path, tmp_path: Path) -> None:  # noqa: F811
    def broken(lines: list[dict[str, Any]]) -> None:
        lines[0]["logprobs"][0] -= 1.0

    assert run("verify", str(record)).exit_code == ExitCode.OK
    rewrite(record, broken)
    assert run("verify", str(record)).exit_code == ExitCode.FAILED
    with Recorder(tmp_path / "empty"):
        pass
    shown = run("verify", str(tmp_path / "empty"), "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["ok"]) == (ExitCode.FAILED, False)
    assert "verified" not in run("verify", str(tmp_path / "empty")).stdout


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"atol": float("nan")}, "atol"),
        ({"atol": float("inf")}, "atol"),
        ({"atol": -1.0}, "atol"),
        ({"sample": 0}, "sample"),
        ({"window_versions": 0}, "window"),
    ],
)
def test_a_tolerance_that_nothing_exceeds_is_refused(options: dict[str, Any], field: str, tmp_path: Path) -> None:
    with refused(InvalidValue, field=field):
        verify(tmp_path, **options)


# ------------------------------------------------------------------------------------------------------- simulate, eval


@pytest.mark.parametrize("field", ["", "violations", "lost", "duplicated"])
def test_a_simulation_whose_report_counts_a_violation_ends_with_1(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    whole = simulate._report
    planted = {field: 1} if field else {}
    monkeypatch.setattr(simulate, "_report", lambda *args, **more: replace(whole(*args, **more), **planted))
    shown = run("simulate", "--preset", "small", "--steps", "1", "--warmup", "0", "--json")
    assert shown.exit_code == (ExitCode.FAILED if field else ExitCode.OK)


@pytest.mark.parametrize(
    ("missing", "reason", "refusals"), [(0, "", {}), (1, "", {}), (0, "drains", {}), (0, "", {"p": "long"})]
)
def test_an_evaluation_in_part_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: int, reason: str, refusals: dict[str, str]
) -> None:
    found = SimpleNamespace(
        evaluation_id="e0", version=0, requested=1, missing=missing, reason=reason, refused=refusals, groups=[]
    )
    monkeypatch.setattr(evaluate, "ask", lambda *_: found)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "ab"}\n')
    is_whole = not (missing or reason or refusals)
    assert run("eval", str(file), "--json").exit_code == (ExitCode.OK if is_whole else ExitCode.FAILED)


# --------------------------------------------------------------------------------------------------- stress and chaos


def test_kills_that_did_not_happen_fail_a_stress_run() -> None:
    assert not_killed(Seen(worker_kills=2, trainer_kills=1), 2, 1) == []
    assert len(not_killed(Seen(worker_kills=1), 2, 1)) == 2


def test_faults_that_did_not_come_fail_a_chaos_run() -> None:
    assert not_struck(Struck(kills=["kill worker"] * 3), 3) == not_struck(Struck(faults=["cut"]), 0) == []
    assert len(not_struck(Struck(missed=["cut"]), 0)) == len(not_struck(Struck(kills=["kill worker"]), 3)) == 1
