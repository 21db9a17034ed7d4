"""``dora report``: the curves of a record, its samples as text, and nothing of a run that a browser would execute."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from dora.data.mismatch import Mismatch, to_json
from dora.data.record_content import CommittedStep
from dora.data.score import Evaluated, Response, score_of_responses
from dora.errors import InvalidValue
from dora.ops.cli.app import app
from dora.ops.view.learning import learning_of
from dora.ops.view.learning_page import facts
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused

HOSTILE = "</pre><script>alert(1)</script>"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Eight steps of two groups; the reward rises, and step 3 has a response whose reward function failed."""
    lines = []
    for step in range(8):
        for sample in range(2):
            failed = step == 3 and sample == 1
            each = make_trajectory(
                step, 0, sample, trained_step=step, reward=float("nan") if failed else step + sample,
                reward_valid=not failed, verifier_log=HOSTILE, behaviour_version=max(0, step - 1),
            )  # fmt: skip
            lines.append(json.dumps(each.to_json_dict()))
    lines.append(json.dumps(make_trajectory(9, 0, 0, trained_step=9).to_json_dict()))  # of a step without a commit
    folder = tmp_path / "<b>run"
    folder.mkdir()
    (folder / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
    steps = [
        asdict(CommittedStep(step, step + 1, {"a": 1, "b": 1}, 100.0 + 10 * step, (1, 1), 4.0)) for step in range(8)
    ]
    marked = [*steps[:3], {"withdrawn_version": 3}, *steps[2:]]
    (folder / "steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in marked))
    score = [score_of_responses([[Response(reward, True, 3, "stop")]]) for reward in (0.5, 4.0, 9.0)]
    evaluated = [Evaluated(4 * n, 1, int(n == 2), 0, "", 1.0, 2.0, score[n]) for n in range(3)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(each.to_json_dict()) + "\n" for each in evaluated))
    return folder


def test_the_figures_are_those_of_committed_steps(record: Path) -> None:
    found = facts(learning_of(record), hourly=36.0)
    assert (found["steps"], found["responses"], found["tokens"]) == (8, 16, 8 * (3 + 4))
    assert [each["reward_mean"] for each in found["by_step"]] == [0.5, 1.5, 2.5, 3.0, 4.5, 5.5, 6.5, 7.5]
    assert (found["reward_first"], found["reward_last"], found["staleness_mean"]) == (1.0, 7.0, 0.5)
    assert (found["seconds"], found["waited_s"], found["cost"]) == (70.0, 28.0, 0.7)
    assert found["cost_per_million_tokens"] == 12_500.0
    assert (found["best_version"], found["best_reward"]) == (4, 4.0), "of complete evaluations"


def test_the_page_contains_all_that_it_shows_and_executes_nothing(record: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(record), "--html", str(out), "--hourly", "36", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cost"] == 0.7
    text = out.read_text()
    assert "<script" not in text and "<b>" not in text and "&lt;script&gt;" in text and "&lt;b&gt;run" in text
    assert not re.search(r"(src|href)\s*=", text)
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 3
    reward, times, ages = (ElementTree.fromstring(plot) for plot in plots)
    name = "{http://www.w3.org/2000/svg}"
    assert [len(line.attrib["points"].split()) for line in reward.findall(f"{name}polyline")] == [8, 3]
    assert len(times.findall(f"{name}rect")) == 7 * 2 and len(ages.findall(f"{name}rect")) == 8 * 2
    assert "step 0, best: reward 1" in text and "step 7, worst: reward 7" in text


def test_the_mismatch_of_engines_and_trainer_is_shown_by_version(record: Path, tmp_path: Path) -> None:
    steps = [json.loads(line) for line in (record / "steps.jsonl").read_text().splitlines()]
    for line in steps:
        if "step" in line:
            number = line["step"]
            told = [Mismatch(number, 0, 0.01 * number, 0.25, 9), Mismatch(max(0, number - 1), 1, 3.0, 1.0, 9)]
            line["mismatches"] = to_json(told)
    (record / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    found = facts(learning_of(record), hourly=0.0)
    assert [(each["version"], each["kl"]) for each in found["mismatches"]] == [(n, 0.01 * n) for n in range(7, -1, -1)]
    assert found["mismatch_kl"] == pytest.approx(0.035) and found["ratio_outside"] == 0.25
    done = CliRunner().invoke(app, ["report", str(record), "--html", str(tmp_path / "out.html")])
    assert done.exit_code == 0 and "mismatch_kl" in done.output
    text = (tmp_path / "out.html").read_text()
    assert "25.0% of ratios outside 0.8 to 1.25" in text and text.count("<svg") == 4


def test_a_record_without_steps_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").touch()
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--html", str(tmp_path / "out.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out.html").read_text().count("<svg") == 3


def test_what_is_no_record_is_named(record: Path, tmp_path: Path) -> None:
    with refused(InvalidValue, field="DIR", names=("--record",)):
        learning_of(tmp_path)
    for file, line in (("trajectories.jsonl", '{"trained_step": 1}'), ("steps.jsonl", "[]"), ("steps.jsonl", "{")):
        content = (record / file).read_text()
        (record / file).write_text(f"{line}\n")
        with refused(InvalidValue, field=f"{file} line 1"):
            learning_of(record)
        (record / file).write_text(content)
    done = CliRunner().invoke(app, ["report", str(record), "--html", str(tmp_path / "none" / "out.html")])
    assert done.exit_code and "--html" in done.stderr
