"""The weights of published versions on disk: whatever a crash or a full disk leaves, a version is there whole."""

from pathlib import Path

from dora.journal.versions import REPLACED_SUFFIX, KeptVersions


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def kept(folder: Path, version: int) -> bytes:
    return (folder / str(version) / "model.safetensors").read_bytes()


def test_a_crash_in_the_midst_of_a_replacement_leaves_the_old_weights_or_the_new(tmp_path: Path) -> None:
    state = tmp_path / "versions"
    KeptVersions(state).keep(1, weights(tmp_path / "old", b"old"))
    (state / "1").rename(state / f".1{REPLACED_SUFFIX}")  # where the new ones were to go
    weights(state / ".1", b"new")
    assert KeptVersions(state).lacking([1]) == [] and kept(state, 1) == b"old"
    weights(state / f".1{REPLACED_SUFFIX}", b"older")  # the new ones are there, and the old ones not gone yet
    assert KeptVersions(state).lacking([1]) == [] and kept(state, 1) == b"old"
    assert [entry.name for entry in state.iterdir()] == ["1"]


def test_a_version_that_is_published_anew_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    state = tmp_path / "versions"
    versions = KeptVersions(state)
    versions.keep(1, weights(tmp_path / "old", b"old"))
    versions.keep(1, weights(tmp_path / "new", b"new"))
    assert kept(state, 1) == b"new" and [entry.name for entry in state.iterdir()] == ["1"]
