"""The stages of ``dora doctor``: their processes, their verdicts, and how a fault of one leaves the others."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dora.errors import InvalidValue
from dora.models import resolve_model
from dora.ops.cli.app import app
from dora.ops.demo.presets import PRESETS, preset
from dora.ops.doctor import run
from dora.ops.doctor.__main__ import verdict_of
from dora.ops.doctor.checks import demo_of
from dora.ops.doctor.run import chosen, run_stage, run_stages
from dora.ops.doctor.stages import STAGES, Stage
from dora.ops.doctor.verdict import Failed, Skipped, StageResult, Subject
from tests.refusals import refused


def subject(tmp_path: Path) -> Subject:
    return Subject("cpu", tmp_path, tmp_path)


def with_stage(monkeypatch: pytest.MonkeyPatch, outcome: Exception | dict[str, int]) -> None:
    def check(_: Subject) -> dict[str, int]:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("dora.ops.doctor.__main__.STAGES", [Stage("planted", "a test", check)])


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ({"moves": 3}, ("ok", "", {"moves": 3})),
        (Skipped("no GPU"), ("skipped", "no GPU", {})),
        (Failed("bytes differ", at=7), ("failed", "bytes differ", {"at": 7})),
        (ValueError("of a library\nsecond line"), ("failed", "ValueError: of a library", {})),
    ],
)
def test_a_stage_ends_with_a_verdict_whatever_it_meets(
    outcome: Exception | dict[str, int], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_stage(monkeypatch, outcome)
    verdict = verdict_of("planted", subject(tmp_path))
    assert (verdict.outcome, verdict.said, verdict.found) == expected


def test_a_process_that_ends_without_a_verdict_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = tmp_path / "python"
    ending.write_text("#!/bin/sh\necho 'CUDA error: out of memory' >&2\nexit 134\n")
    ending.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ending))
    verdict = run_stage(STAGES[0], "cuda", tmp_path)
    assert verdict.outcome == "failed" and verdict.said == "ended with 134: CUDA error: out of memory"
    assert verdict.logs == {"stderr.log": "CUDA error: out of memory"}
    assert (Path(verdict.folder) / "stderr.log").is_file()


def test_a_failure_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_stage(monkeypatch, ValueError("of a library"))
    verdict = verdict_of("planted", subject(tmp_path))
    assert "in check" in verdict.traceback and verdict.traceback.rstrip().endswith("ValueError: of a library")


def test_logs_of_workers_end_in_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "worker-0.log").write_text("".join(f"line {number}\n" for number in range(500)))
    found = run.last_lines(tmp_path)["run/logs/worker-0.log"].splitlines()
    assert found[-1] == "line 499" and len(found) == run.LOG_LINES


def test_a_limit_grows_with_the_model_and_allows_for_compilation(tmp_path: Path) -> None:
    stage = Stage("engine", "a test", lambda _: {})
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * 10**9)
    assert run.limit_s(stage, "cpu", tmp_path / "none") == stage.limit_s
    assert run.limit_s(stage, "cuda", tmp_path) == stage.limit_s + run.COMPILE_S + 8 * 160


def test_a_demo_suits_the_gpus_and_the_model(tmp_path: Path) -> None:
    on_gpu = Subject("cuda", tmp_path, tmp_path)
    assert demo_of(on_gpu, 1) == (str(tmp_path), 1)
    assert demo_of(on_gpu, 8) == (str(tmp_path), 2)
    assert demo_of(subject(tmp_path), 0) == ("tiny", 2)
    assert demo_of(Subject("cuda", Path(resolve_model("tiny")), tmp_path), 1) == ("tiny", 1)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16 * 10**9)
    assert demo_of(on_gpu, 1) == ("tiny", 1), "the trainer computes on the CPU"
    tiny = preset(str(resolve_model("tiny")))
    assert tiny == replace(PRESETS["smollm2"], train_layers=2), "tiny has two layers"


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    verdict = run_stage(Stage("moves", "a test", lambda _: {}, limit_s=0.2), "cpu", tmp_path)
    assert verdict.outcome == "failed" and "0.2 s" in verdict.said


def test_nothing_else_runs_where_the_environment_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_stage", lambda stage, *_: StageResult(stage.name, "failed", "no driver"))
    found = list(run_stages(STAGES, "cuda", tmp_path))
    assert [verdict.stage for verdict in found] == [stage.name for stage in STAGES]
    assert [verdict.outcome for verdict in found] == ["failed", *["skipped"] * (len(STAGES) - 1)]


def test_an_unknown_stage_is_refused() -> None:
    with refused(InvalidValue, field="stage", value="engin"):
        chosen(["engin"])


@pytest.mark.full
def test_stages_that_need_no_engine_are_green_here() -> None:
    result = CliRunner().invoke(
        app, ["doctor", "--device", "cpu", "--stage", "environment", "--stage", "purity", "--stage", "blocks", "--json"]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["ok"] and [each["outcome"] for each in document["stages"]] == ["ok"] * 3
    assert document["stages"][1]["found"] == {"replaced": ["Stream", "Event"]}, "vLLM's CPU modules do that"


def test_a_device_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cuda", "--stage", "blocks"])
    assert result.exit_code == 2


@pytest.mark.full
def test_every_stage_is_green_on_this_machine() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--json"])
    document = json.loads(result.stdout)
    assert document["ok"], document
