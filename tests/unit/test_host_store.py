"""A host's store: versions come in chunk by chunk, whole or not at all, within a bound, and stay while held."""

import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dora.client.publication import place_weights
from dora.data.types import Canary
from dora.errors import Conflict, InvalidValue, LimitExceeded, NotFound
from dora.models.tiny import make_tiny
from dora.rpc import dora_pb2 as pb
from dora.system.files import inner_entries
from dora.weights import examining, files, manifest
from dora.weights.holds import NAME_FILE, held
from dora.weights.host_store import HostStore, bound_of
from dora.weights.manifest import Manifest, parsed_name, read_manifest
from dora.weights.store import WeightStore
from dora.weights.whole import CANARY_FILE, MANIFEST_FILE
from dora.worker.loop import of_store
from tests.contract.workers import Worker
from tests.refusals import data_words, refused
from tests.sweeps import some_of

CHUNK_BYTES = 4096
NAME = "model.norm.weight"
FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, manifest):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("model") / "dense")


@pytest.fixture
def origin(tmp_path: Path, model: Path) -> WeightStore:
    """The service's host, with versions 1 and 2, which differ in one tensor."""
    store = WeightStore(tmp_path / "origin", model)
    tensors = load_file(model / FILE)
    for version in (1, 2):
        tensors[NAME] = tensors[NAME] + np.float32(version)
        store.publish(1, version, place_weights(tensors, (), store.begin(1, version)), Canary((1, 2), (-0.5,)))
    return store


@pytest.fixture
def store(tmp_path: Path, model: Path) -> HostStore:
    return HostStore(tmp_path / "host", model)


def content_of(origin: HostStore, version: int, file: str, index: int) -> bytes:
    offset, length = origin.manifest(version).file(file).chunk(index)
    return (origin.folder(version) / file).read_bytes()[offset : offset + length]


def bring(origin: HostStore, store: HostStore, version: int) -> Path:
    coming = store.receive(origin.manifest(version))
    missing = coming.missing()
    random.Random(version).shuffle(missing)
    for file, index in missing:
        coming.write(file, index, content_of(origin, version, file, index))
    return coming.seal()


def test_a_version_that_came_in_any_order_is_the_same_to_the_bit(origin: WeightStore, store: HostStore) -> None:
    folder = bring(origin, store, 1)
    assert folder == store.folder(1) and store.versions() == (0, 1)
    assert (folder / FILE).read_bytes() == (origin.folder(1) / FILE).read_bytes()
    assert store.manifest(1) == origin.manifest(1) and store.name(1) == origin.name(1) == origin.manifest(1).name
    assert store.canary(1) == Canary((1, 2), (-0.5,)) and (folder / "config.json").is_file()
    assert store.name(0) == origin.name(0) != store.name(1)


def test_nothing_is_seen_before_it_is_whole_and_a_damaged_chunk_comes_again(
    origin: WeightStore, store: HostStore
) -> None:
    coming = store.receive(origin.manifest(1))
    first, *rest = coming.missing()
    damaged = bytearray(content_of(origin, 1, *first))
    damaged[7] ^= 1
    with refused(
        InvalidValue, field="model.safetensors: checksum of chunk 0", value="e1f0264e01f05646ec6551bee3500166"
    ):
        coming.write(*first, damaged)
    with refused(InvalidValue, field="model.safetensors: bytes of chunk 0", value=4095):
        coming.write(*first, damaged[1:])
    with refused(Conflict, field="model.safetensors: chunk", value=0):
        coming.chunk(*first)
    for file, index in rest:
        assert coming.write(file, index, content_of(origin, 1, file, index))
    with refused(Conflict, field="version v1-bc044a85f84b0e2a3df00d16ac4ef00e", value="1 of 298 chunks missing"):
        coming.seal()
    assert store.versions() == (0,) and coming.missing() == [first]
    assert coming.write(*first, content_of(origin, 1, *first))
    assert not coming.write(*first, content_of(origin, 1, *first)), "a duplicate changes nothing"
    assert bytes(coming.chunk(*first)) == content_of(origin, 1, *first)
    coming.seal()
    assert store.versions() == (0, 1)
    with refused(Conflict, field="version", value="v1-bc044a85f84b0e2a3df00d16ac4ef00e"):
        coming.write(*first, content_of(origin, 1, *first))
    with refused(Conflict, field="version", value="v1-bc044a85f84b0e2a3df00d16ac4ef00e"):
        store.receive(origin.manifest(1))


def test_what_is_given_up_leaves_nothing(origin: WeightStore, store: HostStore) -> None:
    coming = store.receive(origin.manifest(1))
    assert store.receiving(origin.name(1)) is coming and store.held_bytes > 0
    with refused(Conflict, field="version", value="v1-bc044a85f84b0e2a3df00d16ac4ef00e"):
        store.receive(origin.manifest(1))
    coming.close()
    assert store.held_bytes == 0 and store.receiving(origin.name(1)) is None
    bring(origin, store, 1)


def test_chunks_that_an_earlier_version_has_alike_need_not_travel(origin: WeightStore, store: HostStore) -> None:
    bring(origin, store, 1)
    newer = origin.manifest(2)
    changed = list(newer.changed_chunks(store.manifest(1)))
    assert len(changed) == 1 < newer.files[0].chunks
    coming = store.receive(newer)
    with store.hold(1, "relay") as base:
        assert coming.take_from(base, store.manifest(1)) == newer.files[0].chunks - 1
    assert coming.missing() == changed
    for file, index in changed:
        coming.write(file, index, content_of(origin, 2, file, index))
    assert (coming.seal() / FILE).read_bytes() == (origin.folder(2) / FILE).read_bytes()


def test_a_version_over_the_bound_or_the_room_is_refused_before_anything_is_written(
    origin: WeightStore, tmp_path: Path, model: Path
) -> None:
    size_bytes = origin.manifest(1).total_bytes
    store = HostStore(tmp_path / "bound", model, bound_bytes=2 * size_bytes - 1)
    bring(origin, store, 1)
    with refused(LimitExceeded, field="weights: version 2", value="1,218,512 bytes", names=(size_bytes - 1,)):
        store.receive(origin.manifest(2))
    assert store.held_bytes == size_bytes and not list((store.root / "receiving").iterdir())
    store.retire(1)
    bring(origin, store, 2)
    with refused(LimitExceeded, field="weights", value="1,152,921,504,606,846,976 bytes"):
        HostStore(tmp_path / "full", model).check_room("weights", 1 << 60)


def test_a_version_that_is_held_stays_until_it_is_let_go(origin: WeightStore, store: HostStore) -> None:
    bring(origin, store, 1)
    name = store.name(1)
    with store.hold(1, "w0") as folder, held(store.root, name, "w1"):
        assert store.holders(1) == ("w0", "w1")
        store.retire(1)
        assert store.versions() == (0,) and (folder / FILE).is_file()
        with (
            refused(NotFound, field="version", value="v1-bc044a85f84b0e2a3df00d16ac4ef00e"),
            held(store.root, name, "w2"),
        ):
            pass
        store.sweep()
        assert (folder / FILE).is_file() and store.held_bytes > 0
    store.sweep()
    assert store.held_bytes == 0 and not folder.exists()


def test_an_order_that_names_other_weights_of_the_same_number_finds_nothing(
    origin: WeightStore, store: HostStore
) -> None:
    bring(origin, store, 1)
    other = f"v1-{'0' * 32}"
    with (
        refused(NotFound, field="version", value="v1-00000000000000000000000000000000", names=data_words(other)),
        held(store.root, other, "w0"),
    ):
        pass
    with refused(InvalidValue, field="version's name", value="v1-../.."), held(store.root, "v1-../..", "w0"):
        pass
    assert parsed_name(store.name(1)) == (1, store.name(1)[3:])
    assert not list((store.root / "holds").iterdir()), "nothing is left of the questions"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": lambda folder: altered(folder / FILE),
    "a file that is cut": lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1]),
    "a file that is gone": lambda folder: (folder / FILE).unlink(),
    "a folder in its place": lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()),
    "the manifest": lambda folder: (folder / MANIFEST_FILE).write_bytes(b"\xff" * 99),
    "no manifest": lambda folder: (folder / MANIFEST_FILE).unlink(),
    "the canary": lambda folder: (folder / CANARY_FILE).write_bytes(bytes(99)),
    "the name": lambda folder: (folder / NAME_FILE).write_bytes(bytes(35)),
    "a name that is no text": lambda folder: (folder / NAME_FILE).write_bytes(b"\xff"),
    "another version's name": lambda folder: (folder / NAME_FILE).write_text(f"v2-{'0' * 32}"),
    "no name": lambda folder: (folder / NAME_FILE).unlink(),
}


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", some_of(DAMAGES, "a bit", "a file that is gone", "the manifest"))
def test_a_version_that_is_damaged_is_found_out_and_goes_alone(
    origin: WeightStore, store: HostStore, damage: str
) -> None:
    bring(origin, store, 1), bring(origin, store, 2)
    assert store.is_sound(1) and origin.is_sound(1) and not store.is_sound(3)
    DAMAGES[damage](store.folder(1))
    assert not store.is_sound(1) and store.is_sound(2)
    with store.hold(2, "w0"):
        store.retire(1)
        assert store.holders(2) == ("w0",)
    assert store.versions() == (0, 2) and not store.leaving()


def test_a_store_that_is_opened_with_another_model_shows_it(store: HostStore, model: Path, tmp_path: Path) -> None:
    origin = WeightStore(tmp_path / "origin", model)
    origin.publish(1, 1, place_weights(load_file(model / FILE), (), origin.begin(1, 1)), None)
    bring(origin, store, 1)
    before = (store.folder(0) / FILE).stat()
    again = HostStore(store.root, model)
    assert (again.folder(0) / FILE).samefile(model / FILE) and (again.folder(0) / FILE).stat() == before
    other = tmp_path / "other"
    shutil.copytree(model, other)
    moved = HostStore(store.root, other)
    assert {file.resolve().parent for file in moved.folder(0).iterdir() if file.is_symlink()} == {other}
    assert moved.name(0) == store.name(0) and moved.is_sound(1)
    assert (moved.folder(1) / "config.json").resolve().parent == other, "it is loaded with what lies there now"
    name, experts = store.name(0), make_tiny("moe", tmp_path / "moe")
    assert HostStore(store.root, experts).name(0) == HostStore(tmp_path / "new", experts).name(0) != name


def test_a_version_of_another_model_is_refused(store: HostStore, tmp_path: Path) -> None:
    other = WeightStore(tmp_path / "other", make_tiny("dense", tmp_path / "wide", kv_heads=2))
    tensors = load_file(tmp_path / "wide" / FILE)
    other.publish(1, 1, place_weights(tensors, (), other.begin(1, 1)), None)
    with refused(InvalidValue, field="weights: model.layers.0.self_attn.k_proj.weight: shape"):
        store.receive(other.manifest(1))
    assert store.name(0) != other.name(0)


def test_a_manifest_reads_back_and_a_changed_one_is_refused(origin: WeightStore) -> None:
    made = origin.manifest(1)
    assert read_manifest(made.to_json()) == made
    (file,) = made.files
    swapped = replace(made, files=(replace(file, sums=(file.sums[1], file.sums[0], *file.sums[2:])),))
    assert swapped.digest != made.digest
    text = made.to_json()
    for changed, complaint in (
        (text.replace(made.digest, "0" * 32), "manifest: digest"),
        (text.replace('"version":1', '"version":2'), "manifest: digest"),
        (text.replace('"version":1', '"version":-1'), "manifest: version"),
        (text.replace(FILE, "../x.safetensors"), "file name"),
        (text.replace('"format":1', '"format":9'), "the same DORA"),
        (text[:-1], "manifest"),
        ("[]", "a JSON object"),
        (text.replace('"version":1', '"version":true'), "manifest: version"),
        (text.replace('"version":1', '"version":1.0'), "manifest: version"),
        (text.replace('"digest":', '"digests":'), "manifest: digest"),
        (text.replace('"blake3":"', '"blake3":"x'), "manifest: files.0.blake3"),
        (text.replace('"blake3":"', '"blake3":"00'), "33 of blake3"),
        (text.replace('"files":[', '"files":[5,'), "manifest: files.0"),
        (text.replace('"canary":[[1,2],[', '"canary":[[1,2],["x",'), "manifest: canary"),
        (text.replace('"canary":[[1,2]', '"canary":[[1,-2]'), "manifest: canary"),
        (text.replace(',"F32",', ',"F33",'), "manifest: tensors.0.1"),
        (text.replace(f',"{FILE}",', f',"{FILE}",9999999'), "within a file"),
        (swapped.to_json().replace(swapped.digest, made.digest), "manifest: digest"),
    ):
        with refused(InvalidValue, names=data_words(complaint)):
            read_manifest(changed)


def test_files_that_are_not_those_of_the_manifest_do_not_become_a_version(
    origin: WeightStore, store: HostStore, tmp_path: Path
) -> None:
    """Sound chunks of a file whose header says other tensors than the manifest does."""
    tensors = load_file(origin.folder(1) / FILE)
    save_file({**tensors, NAME: tensors[NAME].astype(np.float16)}, tmp_path / FILE, metadata={"format": "pt"})
    made = origin.manifest(1)
    lying = replace(manifest.manifest_of(1, [examining.examine_file(tmp_path / FILE)]), tensors=made.tensors)
    coming = store.receive(Manifest(1, lying.files, made.tensors))
    content = (tmp_path / FILE).read_bytes()
    for file, index in coming.missing():
        offset, length = lying.file(file).chunk(index)
        coming.write(file, index, content[offset : offset + length])
    with refused(
        InvalidValue, field="v1-8a68eea07643d6f36aa9b1bec4080e16: tensors", value="different from those in its files"
    ):
        coming.seal()
    assert store.versions() == (0,) and store.held_bytes == 0


def test_a_publication_over_the_bound_is_refused_and_may_be_repeated(tmp_path: Path, model: Path) -> None:
    """A version that left the window and is held counts; what a retired one has left to be written over does not."""
    store = WeightStore(tmp_path / "store", model)
    tensors = load_file(model / FILE)
    store.publish(1, 1, place_weights(tensors, (), store.begin(1, 1)), None)
    size_bytes = store.manifest(1).total_bytes
    store.bound_bytes = 2 * size_bytes
    store.publish(1, 2, place_weights(tensors, (), store.begin(1, 2)), None)
    with store.hold(1, "w0"):
        store.retire(1)
        announced = place_weights(tensors, (), store.begin(1, 3))
        with refused(LimitExceeded, field="weights: version 3", value="0 bytes"):
            store.publish(1, 3, announced, None)
        assert store.versions() == (0, 2)
    store.publish(1, 3, announced, None)
    assert store.versions() == (0, 2, 3) and (store.root / "spare" / FILE).is_file()
    store.retire(2)
    assert len(list((store.root / "spare").iterdir())) == 1 and store.held_bytes == size_bytes


def test_a_store_is_bound_to_versions_of_a_size_that_its_model_says(model: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", model)
    store.bound_bytes = bound_of(store.reference, 1)
    store.publish(1, 1, place_weights(load_file(model / FILE), (), store.begin(1, 1)), None)
    assert store.reference.content_bytes < store.bound_bytes < 8 * store.reference.content_bytes


def test_a_worker_that_is_told_of_a_version_that_its_host_lacks_loads_nothing(
    origin: WeightStore, store: HostStore, model: Path
) -> None:
    """That is no fault of the weights, and it keeps what it has."""
    worker = Worker(None, model, versions=of_store(store.root, "w0"))
    bring(origin, store, 1)
    assert worker.obey(load_version=pb.LoadVersion(version=1, name=store.name(1))).ok
    refused = worker.obey(load_version=pb.LoadVersion(version=2, name=origin.name(2)))
    assert (refused.ok, refused.error_kind) == (False, "missing") and origin.name(2) in refused.error
    assert worker.engine.version == 1 and not store.holders(1)


def test_folders_that_are_deleted_meanwhile_are_passed_over(tmp_path: Path) -> None:
    for name in ("1", "2", ".3.gone-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(b"")
    (tmp_path / "a file").touch()
    found = inner_entries(tmp_path)
    assert next(found) == tmp_path / ".3.gone-1" / FILE
    shutil.rmtree(tmp_path / "1")
    assert [*found] == [tmp_path / "2" / FILE]
    assert not [*inner_entries(tmp_path / "gone")]


def test_the_room_is_counted_while_retired_versions_are_deleted(origin: WeightStore) -> None:
    """``check_room`` runs in a thread of a commit, and deletions in others."""
    versions, whole_bytes = origin.root / "versions", origin.held_bytes

    def retire_many() -> None:
        for number in range(300):
            (versions / f".9.gone-{number}").mkdir()
            shutil.rmtree(versions / f".9.gone-{number}")

    deleting = threading.Thread(target=retire_many)
    deleting.start()
    while deleting.is_alive():
        origin.check_room("weights", 0)
        assert (origin.held_bytes, origin.leaving()) == (whole_bytes, ())
