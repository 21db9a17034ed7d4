"""The record: each trajectory once, whole lines, versions as loadable folders."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dora.data.run_record import CommittedStep, Recorder
from dora.errors import InvalidValue
from dora.models.tiny import make_tiny
from dora.ops.verify.check import read_trajectories
from dora.weights.store import WeightStore
from tests.contract.trainer_service import make_group
from tests.refusals import refused


def test_each_trajectory_is_written_once_over_restarts(tmp_path: Path) -> None:
    first, second = make_group(0, 0), make_group(0, 1)
    with Recorder(tmp_path) as recorder:
        assert recorder.append(first.trajectories) == 2
        assert recorder.append(first.trajectories) == 0
        assert len(read_trajectories(tmp_path / "trajectories.jsonl")) == 2  # flushed
    with Recorder(tmp_path) as recorder:
        assert recorder.append([*first.trajectories, *second.trajectories]) == 2
    ids = [each.trajectory_id for each in read_trajectories(tmp_path / "trajectories.jsonl")]
    assert ids == ["s0-g0-0", "s0-g0-1", "s0-g1-0", "s0-g1-1"]


def test_a_line_torn_by_a_crash_is_written_again(tmp_path: Path) -> None:
    group = make_group(0, 0)
    with Recorder(tmp_path) as recorder:
        recorder.append(group.trajectories)
    file = tmp_path / "trajectories.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    with Recorder(tmp_path) as recorder:
        assert recorder.append(group.trajectories) == 1
    assert len(read_trajectories(file)) == 2


@pytest.mark.parametrize("name", ["g0.0", 'a "quoted" one', "back\\slash", "späte"])
def test_an_earlier_process_has_written_a_trajectory_whatever_its_id(name: str, tmp_path: Path) -> None:
    (trajectory, *_) = make_group(0, 0).trajectories
    named = [replace(trajectory, trajectory_id=name)]
    with Recorder(tmp_path) as recorder:
        assert recorder.append(named) == 1
    with Recorder(tmp_path) as recorder:
        assert recorder.append(named) == 0


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").write_text(json.dumps({"name": "shopping"}) + "\n")
    with refused(InvalidValue, field="trajectories.jsonl line 1"):
        Recorder(tmp_path)
    (tmp_path / "file").write_text("")
    with refused(InvalidValue, field="record"):
        Recorder(tmp_path / "file")


def test_versions_are_kept_as_hugging_face_folders_after_the_store_lets_go(tmp_path: Path) -> None:
    model = make_tiny("dense", tmp_path / "model")
    store = WeightStore(tmp_path / "store", model)
    recorder = Recorder(tmp_path / "record")
    kept = recorder.keep_version(0, store.folder(0))
    assert recorder.keep_version(0, store.folder(0)) == kept
    store.retire(0)
    names = {file.name for file in kept.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not any(file.is_symlink() or file.name.startswith("dora-") for file in kept.iterdir())
    assert (kept / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_version_that_is_published_anew_replaces_what_an_earlier_process_has_kept(tmp_path: Path) -> None:
    """That had no time to write that it was withdrawn."""
    bad, good = tmp_path / "bad", tmp_path / "good"
    for folder in (bad, good):
        folder.mkdir()
        (folder / "model.safetensors").write_text(folder.name)
    with Recorder(tmp_path / "record") as recorder:
        recorder.commit(CommittedStep(0, 1, {"g0": 1}, 1.0), bad, b"bad")
    with Recorder(tmp_path / "record") as recorder:
        recorder.keep_version(1, bad)
        recorder.republish(1, good, b"good")
    assert (tmp_path / "record/versions/1/model.safetensors").read_text() == "good"
