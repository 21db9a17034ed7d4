"""Verification finds what is wrong with a record, and nothing in a sound one."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dora.data.run_record import CommittedStep, Recorder
from dora.data.trajectory import Trajectory
from dora.data.types import Segment
from dora.errors import InvalidValue
from dora.models.tiny import make_tiny
from dora.ops.cli.app import app
from dora.ops.cli.exits import ExitCode
from dora.ops.verify import VerifyReport, verify
from dora.ops.verify.check import drawn
from dora.ops.verify.recompute import Models, load_model
from tests.contract.trainer_service import make_trajectory
from tests.refusals import refused

Line = dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny("moe", folder / str(seed), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def trajectories(models: list[Path]) -> list[Trajectory]:
    """Two groups, of versions 0 and 1, trained in step 1; logprobs one sequence at a time, with no padding."""
    made = []
    for version, folder in enumerate(models):
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for sample in range(3):
            response = [(7 * sample + 3 * token) % 60 + 4 for token in range(4 + 5 * sample)]
            ids = torch.tensor([[1, 5 + version, *response]])
            with torch.no_grad():
                logprobs = torch.log_softmax(module(ids).logits[0, 1:-1], -1).gather(1, ids[0, 2:, None])[:, 0]
            tokens = len(response)
            segments = (Segment("w0", 0, 1, "new", version), Segment("w1", 2, tokens - 1, "migrated", version))
            made.append(
                make_trajectory(
                    1,
                    version,
                    sample,
                    group_size=3,
                    behaviour_version=version,
                    staleness=1 - version,
                    prompt_token_ids=[1, 5 + version],
                    response_token_ids=response,
                    logprobs=logprobs.numpy(),
                    loss_mask=[1] * tokens,
                    length_tokens=tokens,
                    worker_history=segments,
                )
            )
    return made


@pytest.fixture
def record(tmp_path: Path, models: list[Path], trajectories: list[Trajectory]) -> Path:
    with Recorder(tmp_path) as recorder:
        recorder.keep_version(0, models[0])
        recorder.commit(CommittedStep(0, 1, {}, 1.0), models[1])
        recorder.append(trajectories)
    return tmp_path


def rewrite(record: Path, change: Callable[[list[Line]], None]) -> None:
    file = record / "trajectories.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_sound_record_passes(record: Path, trajectories: list[Trajectory]) -> None:
    report = verify(record, window_versions=2)
    assert report.ok and report.violations == () and not report.logprob_mismatches
    assert (report.trajectories, report.versions, report.atol) == (6, (0, 1), 1e-3)
    assert report.tokens == sum(each.length_tokens for each in trajectories)
    assert 0 < report.max_abs_diff < 5e-5 and 0 < report.mean_abs_diff <= report.max_abs_diff
    assert verify(record, sample=2).tokens < report.tokens


def test_progress_goes_by_tokens_and_ends_at_one(record: Path, trajectories: list[Trajectory]) -> None:
    told: list[tuple[float, str]] = []
    verify(record, progress=lambda share, how_far: told.append((share, how_far)))
    assert [how_far for _, how_far in told] == [f"{count} of 6 trajectories" for count in range(1, 7)]
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert shares[0] == pytest.approx(16 / 66)  # the longest of its version comes first
    told.clear()
    shutil.rmtree(record / "versions" / "1")
    verify(record, sample=3, progress=lambda share, how_far: told.append((share, how_far)))
    assert told[-1] == (1.0, "3 of 3 trajectories")


def test_the_command_tells_its_progress_in_lines_on_stderr_alone(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.ops.cli.output.LINES_S", 0.0)
    shown = CliRunner().invoke(app, ["verify", str(record), "--json"])
    assert json.loads(shown.stdout)["ok"]
    lines = shown.stderr.splitlines()
    assert len(lines) == 6
    for number, line in enumerate(lines, start=1):
        assert re.match(rf"dora: verifying: \d+% \({number} of 6 trajectories\)(, .* left)?$", line)
    assert lines[-1].startswith("dora: verifying: 100%")
    monkeypatch.setattr("dora.ops.cli.output.LINES_S", 1e9)
    assert CliRunner().invoke(app, ["verify", str(record)]).stderr == ""


def test_one_corrupted_logprob_is_found(record: Path) -> None:
    def corrupt(lines: list[Line]) -> None:
        lines[4]["logprobs"][2] -= 0.01

    rewrite(record, corrupt)
    report = verify(record)
    assert report.violations_total == report.logprob_mismatches == 1
    assert "trajectory s1-g1-1, token 2" in report.violations[0]
    assert report.max_abs_diff == pytest.approx(0.01, abs=1e-3)
    assert verify(record, atol=0.02).ok


def test_a_trajectory_under_another_version_is_found(record: Path) -> None:
    def swap(lines: list[Line]) -> None:
        for line in lines[:3]:
            line["behaviour_version"], line["staleness"] = 1, 0
            for segment in line["worker_history"]:
                segment["version"] = 1

    rewrite(record, swap)
    report = verify(record)
    assert report.violations_total == 3 and all("version 1 gives" in sentence for sentence in report.violations)


@pytest.mark.parametrize(
    ("index", "change", "sentence"),
    [
        (0, {"worker_history": (Segment("w0", 0, 3, "new", 1),)}, "of version 0 has tokens of versions [1] (C1)"),
        (0, {"worker_history": (Segment("w0", 0, 1, "new", 0),)}, "segments hold 2 tokens, its response 4"),
        (0, {"worker_history": (Segment("w0", 1, 3, "new", 0),)}, "expected to begin at 0"),
        (0, {"worker_history": (Segment("w0", 0, 3, "migrated", 0),)}, "segment 0 arrived 'migrated'"),
        (0, {"staleness": 0}, "states a staleness of 0; trained step less version is 1"),
        (0, {"trained_step": 2, "staleness": 2}, "has a staleness of 2, over the window's 1 (C3)"),
        (0, {"window_versions": 1}, "has a staleness of 1, over the 0 of the window that it was admitted in (C3)"),
        (0, {"window_versions": 3}, "been admitted in a window of 3, over the window's 1 (C3)"),
        (0, {"window_versions": 2}, "has several values of window_versions: [0, 2]"),
        (5, {"trained_step": 0, "staleness": -1}, "before its version was published"),
        (0, {"logprobs": np.array([0.5, -1, -1, -1])}, "has logprobs that are none: [0.5]"),
        (0, {"loss_mask": [1, 2, 1, 1]}, "loss mask of other values"),
        (0, {"sample_index": 1}, "group s1-g0 of 3 lacks the samples [0]"),
        (0, {"prompt_token_ids": [1, 9]}, "group s1-g0 has several prompts"),
        (0, {"finished_at": 0.0}, "finished before it started"),
    ],
)
def test_every_broken_promise_is_a_sentence(
    tmp_path: Path, trajectories: list[Trajectory], index: int, change: dict[str, Any], sentence: str
) -> None:
    changed = [replace(each, **change) if place == index else each for place, each in enumerate(trajectories)]
    with Recorder(tmp_path) as recorder:
        recorder.append(changed)
    report = verify(tmp_path, window_versions=2)
    assert not report.ok and any(sentence in found for found in report.violations), report.violations


def test_a_repeated_line_and_a_missing_version_are_found(record: Path) -> None:
    rewrite(record, lambda lines: lines.append(lines[0]))
    (record / "versions" / "1").rename(record / "versions" / "7")
    report = verify(record)
    assert "trajectory s1-g0-0 is recorded 2 times." in report.violations
    assert "version 1 sampled 3 trajectories and is not in the record." in report.violations


@pytest.mark.parametrize(("groups", "is_found"), [({"s0-g0": 3}, True), (None, False)])
def test_a_step_that_stands_twice_is_found(record: Path, groups: dict[str, int] | None, is_found: bool) -> None:
    """A repeated commit of the same groups is none: earlier services wrote it twice."""
    file = record / "steps.jsonl"
    line = json.loads(file.read_text())
    again = {**line, "committed_at": 2.0, "groups": line["groups"] if groups is None else groups}
    before = verify(record).violations
    file.write_text(f"{json.dumps(again)}\n{json.dumps(line)}\n")
    told = set(verify(record).violations) - set(before)
    assert told == ({"step 0 stands in steps.jsonl twice, with different groups."} if is_found else set())


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with refused(InvalidValue, field="record"):
        verify(tmp_path)
    (tmp_path / "trajectories.jsonl").write_text("{\n")
    with refused(InvalidValue, field="trajectories.jsonl line 1"):
        verify(tmp_path)
    with refused(InvalidValue, field="sample", value=0):
        verify(tmp_path, sample=0)


def test_a_sample_is_even_over_versions_and_follows_its_seed(record: Path, trajectories: list[Trajectory]) -> None:
    by_version = {version: [each for each in trajectories if each.behaviour_version == version] for version in (0, 1)}
    by_version[7] = by_version[0][:1]
    for count in range(1, 9):
        found = drawn(by_version, count, seed=3)
        sizes = {version: len(found.get(version, ())) for version in by_version}
        assert sum(sizes.values()) == min(count, 7)
        assert max(sizes.values()) - min(sizes[0], sizes[1]) <= 1, sizes
        assert found == drawn(by_version, count, seed=3)
    seeds = {tuple(drawn(by_version, 1, seed)) for seed in range(20)}
    assert seeds == {(0,), (1,), (7,)}
    report = verify(record, sample=2)
    assert (report.trajectories, report.recomputed, report.versions) == (6, 2, (0, 1))


def test_every_line_is_checked_whatever_the_sample(record: Path) -> None:
    rewrite(record, lambda lines: lines[5].update(staleness=4))
    assert verify(record, sample=1).violations_total == 1


def commits(folder: Path, models: list[Path], weights: str, versions: range) -> None:
    with Recorder(folder, weights=weights) as recorder:
        recorder.keep_version(0, models[0])
        for version in versions:
            recorder.commit(CommittedStep(version - 1, version, {}, 1.0), models[version % 2])


def kept(folder: Path) -> list[int]:
    return sorted(int(each.name) for each in (folder / "versions").iterdir())


@pytest.mark.parametrize(
    ("weights", "remaining"),
    [("all", range(10)), ("none", [0, 8, 9]), ("every 1", range(10)), ("every 3", [0, 3, 6, 8, 9])],
)
def test_a_record_keeps_the_weights_that_were_asked_for_and_is_sound(
    tmp_path: Path, models: list[Path], trajectories: list[Trajectory], weights: str, remaining: list[int]
) -> None:
    commits(tmp_path, models, weights, range(1, 10))
    assert kept(tmp_path) == list(remaining)
    with Recorder(tmp_path) as recorder:
        recorder.append(
            replace(each, trained_step=9, staleness=9 - each.behaviour_version, group_id=f"s9-{each.group_id}")
            for each in trajectories
        )
    report = verify(tmp_path)
    is_lacking = 1 not in remaining
    assert report.ok, report.violations
    assert report.versions_without_weights == ((1,) if is_lacking else ())
    assert (report.without_weights, report.recomputed) == ((3, 3) if is_lacking else (0, 6))
    assert report.versions == (0, 1)


def test_only_weights_that_were_not_to_be_kept_may_be_missing(tmp_path: Path, models: list[Path]) -> None:
    commits(tmp_path, models, "all", range(1, 4))
    commits(tmp_path, models, "none", range(4, 8))
    assert kept(tmp_path) == [0, 1, 2, 3, 6, 7], "a later setting deletes nothing that an earlier one kept"
    commits(tmp_path, models, "all", range(8, 10))
    assert kept(tmp_path) == [0, 1, 2, 3, 8, 9]
    assert verify_empty(tmp_path).ok
    shutil.rmtree(tmp_path / "versions" / "9")
    shutil.rmtree(tmp_path / "versions" / "2")
    assert [sentence.split(",")[0] for sentence in verify_empty(tmp_path).violations] == ["version 2", "version 9"]


def verify_empty(folder: Path) -> VerifyReport:
    (folder / "trajectories.jsonl").touch()
    return verify(folder)


def test_the_last_version_is_kept_whatever_the_setting(tmp_path: Path, models: list[Path]) -> None:
    commits(tmp_path, models, "none", range(1, 4))
    shutil.rmtree(tmp_path / "versions" / "3")
    assert verify_empty(tmp_path).violations == ("version 3, which step 2 published, is not in the record.",)


def test_a_version_after_a_withdrawn_one_leaves_the_one_before(tmp_path: Path, models: list[Path]) -> None:
    commits(tmp_path, models, "none", range(1, 4))
    with Recorder(tmp_path, weights="none") as recorder:
        recorder.drop_version(3)
        assert kept(tmp_path) == [0, 2]
        recorder.republish(3, models[0], b"new")
        recorder.commit(CommittedStep(3, 4, {}, 1.0), models[1])
    assert kept(tmp_path) == [0, 3, 4] and verify_empty(tmp_path).ok


def test_the_command_says_what_it_could_not_recompute(
    tmp_path: Path, models: list[Path], trajectories: list[Trajectory]
) -> None:
    commits(tmp_path, models, "none", range(1, 5))
    with Recorder(tmp_path) as recorder:
        recorder.append(replace(each, trained_step=4, staleness=4 - each.behaviour_version) for each in trajectories)
    shown = CliRunner().invoke(app, ["verify", str(tmp_path), "--sample", "2"])
    assert shown.exit_code == 0, shown.stdout
    said = " ".join(shown.stdout.split())  # the folder's name may be as wide as a line
    assert ": verified" not in said and "2 of 6 trajectories" in said
    assert re.search(r"not recomputable\W+v1 \(3 trajectories\)", shown.stdout)
    assert re.search(r"recomputed\W+\d+ tokens of 2 trajectories", shown.stdout)


def test_a_record_without_the_weights_of_all_that_it_holds_proves_nothing(
    tmp_path: Path, models: list[Path], trajectories: list[Trajectory]
) -> None:
    commits(tmp_path, models, "none", range(1, 5))
    with Recorder(tmp_path) as recorder:
        recorder.append(
            replace(each, trained_step=4, staleness=3) for each in trajectories if each.behaviour_version == 1
        )
    report = verify(tmp_path)
    assert report.ok and not report.verified and (report.without_weights, report.recomputed) == (3, 0)
    shown = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert shown.exit_code == ExitCode.FAILED and "verified" not in shown.stdout
    assert json.loads(CliRunner().invoke(app, ["verify", str(tmp_path), "--json"]).stdout)["ok"] is False


def test_versions_are_loaded_into_one_module_and_give_what_a_new_one_gives(
    models: list[Path], tmp_path: Path, trajectories: list[Trajectory]
) -> None:
    tied = [make_tiny("dense", tmp_path / f"dense{seed}", seed) for seed in (0, 1)]
    for folders in (models, tied):
        one = Models()
        for folder in (*folders, *folders):
            expected = load_model(folder).state_dict()
            found = one.load(folder).state_dict()
            assert expected.keys() == found.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    before = one.load(tied[0])
    assert one.load(tied[1]) is before
    assert one.load(models[0]) is not before
