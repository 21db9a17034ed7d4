"""Versions that are kept on disk: what comes back into a store is what was published, or nothing."""

import shutil
from pathlib import Path

import pytest

from dora.journal.versions import REPLACED_SUFFIX, PersistedVersions
from dora.weights.host_store import HostStore
from dora.weights.store import WeightStore
from dora.weights.whole import is_sound
from tests.contract.relays import FILE, publish, same

LIVE = [0, 1, 2]


@pytest.fixture
def origin(tiny_dense: Path, tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path / "origin", tiny_dense)
    for version in (1, 2):
        publish(store, version)
    return store


@pytest.fixture
def kept(origin: WeightStore, tmp_path: Path) -> PersistedVersions:
    kept = PersistedVersions(tmp_path / "kept")
    for version in (1, 2):
        kept.keep(version, origin.folder(version))
    return kept


def alter(folder: Path) -> None:
    """The last page of the weights never got to the disk. The file is another one: it may have had links."""
    content = bytearray((folder / FILE).read_bytes())
    content[-4096:] = bytes(4096)
    (folder / FILE).unlink()
    (folder / FILE).write_bytes(content)


def test_what_is_kept_comes_back(
    origin: WeightStore, kept: PersistedVersions, tiny_dense: Path, tmp_path: Path
) -> None:
    assert not kept.bring_back(LIVE, tmp_path / "store" / "versions", is_sound)
    store = HostStore(tmp_path / "store", tiny_dense)
    assert store.versions() == (0, 1, 2) and all(same(origin, store, version) for version in (1, 2))


def test_what_is_damaged_in_the_store_is_replaced(
    origin: WeightStore, kept: PersistedVersions, tiny_dense: Path, tmp_path: Path
) -> None:
    versions = tmp_path / "store" / "versions"
    kept.bring_back(LIVE, versions, is_sound)
    alter(versions / "1")
    untouched = (versions / "2" / FILE).stat()
    assert not kept.bring_back(LIVE, versions, is_sound)
    assert (versions / "2" / FILE).stat().st_ino == untouched.st_ino
    assert same(origin, HostStore(tmp_path / "store", tiny_dense), 1)


def test_what_is_damaged_on_disk_does_not_come_back(kept: PersistedVersions, tiny_dense: Path, tmp_path: Path) -> None:
    alter(tmp_path / "kept" / "1")
    assert kept.bring_back(LIVE, tmp_path / "store" / "versions", is_sound) == [1]
    assert HostStore(tmp_path / "store", tiny_dense).versions() == (0, 2)


def test_what_is_damaged_on_disk_and_whole_in_the_store_stays_there(
    origin: WeightStore, kept: PersistedVersions, tmp_path: Path
) -> None:
    alter(tmp_path / "kept" / "1")
    assert not kept.bring_back(LIVE, origin.root / "versions", is_sound)
    assert origin.is_sound(1)
    shutil.rmtree(origin.folder(1))
    assert kept.bring_back(LIVE, origin.root / "versions", is_sound) == [1]


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def content_of(folder: Path, version: int) -> bytes:
    return (folder / str(version) / "model.safetensors").read_bytes()


def test_a_crash_in_the_midst_of_a_replacement_leaves_the_old_weights_or_the_new(tmp_path: Path) -> None:
    state = tmp_path / "versions"
    PersistedVersions(state).keep(1, weights(tmp_path / "old", b"old"))
    (state / "1").rename(state / f".1{REPLACED_SUFFIX}")  # where the new ones were to go
    weights(state / ".1", b"new")
    assert PersistedVersions(state).lacking([1]) == [] and content_of(state, 1) == b"old"
    weights(state / f".1{REPLACED_SUFFIX}", b"older")  # the new ones are there, and the old ones not gone yet
    assert PersistedVersions(state).lacking([1]) == [] and content_of(state, 1) == b"old"
    assert [entry.name for entry in state.iterdir()] == ["1"]


def test_a_version_that_is_published_anew_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    state = tmp_path / "versions"
    versions = PersistedVersions(state)
    versions.keep(1, weights(tmp_path / "old", b"old"))
    versions.keep(1, weights(tmp_path / "new", b"new"))
    assert content_of(state, 1) == b"new" and [entry.name for entry in state.iterdir()] == ["1"]
