"""The weight store: what it admits is loadable, complete and what was announced; everything else is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from dora.client.publication import canary_of, place_weights
from dora.data.types import Canary
from dora.errors import Conflict, InvalidValue, NotFound
from dora.models.tiny import make_tiny
from dora.system.files import link_or_copy
from dora.weights.canary import canary_token_ids, check_canary, compute_canary
from dora.weights.files import WeightFile, check_file_name, hash_file, header_of, write_weights
from dora.weights.reference import TensorHeader, read_header, read_reference
from dora.weights.store import WeightStore
from tests.refusals import data_words, refused

NAME = "model.norm.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"dense": make_tiny("dense", folder / "dense"), "moe": make_tiny("moe", folder / "moe")}


@pytest.fixture
def store(tmp_path: Path, models: dict[str, Path]) -> WeightStore:
    return WeightStore(tmp_path / "store", models["dense"])


def published(store: WeightStore, version: int, weights: Any, epoch: int = 1) -> tuple[WeightFile, ...]:
    return place_weights(weights, (), store.begin(epoch, version))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_published_module_loads_again_bit_by_bit(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", models[kind])
    module = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.01)
    files = place_weights(module, store.reference.tensors, store.begin(1, 1))
    folder = store.publish(1, 1, files, compute_canary(module))
    assert folder == store.folder(1) and store.versions() == (0, 1)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert compute_canary(again) == store.canary(1)
    assert (folder / "tokenizer.json").is_file()


def test_version_0_is_the_reference_linked(store: WeightStore, models: dict[str, Path]) -> None:
    assert store.versions() == (0,) and store.canary(0) is None
    weights = store.folder(0) / "model.safetensors"
    assert weights.is_symlink() and weights.samefile(models["dense"] / "model.safetensors")
    store.keep_canary(0, Canary((1, 2), (-0.5,)))
    assert store.canary(0) == Canary((1, 2), (-0.5,))


def test_repeating_an_admission_changes_nothing_and_other_content_conflicts(store: WeightStore) -> None:
    tensors = load_file(store.folder(0) / "model.safetensors")
    files = published(store, 1, tensors)
    folder = store.publish(1, 1, files, None)
    assert store.publish(1, 1, files, None) == folder
    assert store.publish(2, 1, published(store, 1, tensors, epoch=2), None) == folder
    other = published(store, 1, {**tensors, NAME: tensors[NAME] + 1}, epoch=3)
    with refused(Conflict, field="version", value=1):
        store.publish(3, 1, other, None)
    store.retire(1)
    assert store.publish(3, 1, other, None) == folder


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: {**tensors, NAME: tensors[NAME][:-1]}, rf"{NAME}: shape = \[127\] .* must be \[128\]"),
        (lambda tensors: {**tensors, NAME: tensors[NAME].astype(np.float16)}, f"{NAME}: dtype = 'F16' .* must be F32"),
        (
            lambda tensors: {key: value for key, value in tensors.items() if key != NAME},
            rf"{NAME} is missing: .*\[128\]",
        ),
        (lambda tensors: {**tensors, "zzz": tensors[NAME]}, "weights: tensor = 'zzz'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(store: WeightStore, change: Any, complaint: str) -> None:
    files = published(store, 1, change(load_file(store.folder(0) / "model.safetensors")))
    with refused(InvalidValue, names=data_words(complaint)):
        store.publish(1, 1, files, None)
    assert store.versions() == (0,)


def test_what_differs_from_the_announcement_is_refused(store: WeightStore) -> None:
    tensors = load_file(store.folder(0) / "model.safetensors")
    (file,) = published(store, 1, tensors)
    path = store.begin(1, 1) / file.name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with refused(
        InvalidValue,
        field="model.safetensors: blake3",
        value="79c5e3377ee87cd1fec6895a13dc695d2b183c1964244283b1abe0fcf11ae618",
    ):
        store.publish(1, 1, [file], None)
    path.write_bytes(content[:-4])
    with refused(InvalidValue, field="model.safetensors: bytes of tensors", value=1215996):
        store.publish(1, 1, [file], None)
    with refused(InvalidValue, field="model.safetensors: bytes of tensors", value=1215996):
        store.publish(1, 1, [hash_file(path)], None)
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{]")
    with refused(InvalidValue, field="model.safetensors: header"):
        store.publish(1, 1, [hash_file(path)], None)
    path.unlink()
    with refused(InvalidValue, field="files", value="model.safetensors"):
        store.publish(1, 1, [file], None)
    with refused(InvalidValue, field="files"):
        store.publish(1, 1, [], None)


def test_several_files_get_an_index(store: WeightStore) -> None:
    tensors = load_file(store.folder(0) / "model.safetensors")
    names = sorted(tensors)
    folder = store.begin(1, 1)
    files = []
    for shard, part in enumerate((names[:5], names[5:])):
        path = folder / f"shard-{shard}.safetensors"
        save_file({name: tensors[name] for name in part}, path, metadata={"format": "pt"})
        files.append(hash_file(path))
    version = store.publish(1, 1, files, None)
    again = AutoModelForCausalLM.from_pretrained(version, dtype=torch.float32)
    assert np.array_equal(again.state_dict()[NAME].numpy(), tensors[NAME])
    assert read_reference(version).files == ("shard-0.safetensors", "shard-1.safetensors")


def test_uploads_are_bounded_and_whole(store: WeightStore) -> None:
    file = store.folder(0) / "model.safetensors"
    content = file.read_bytes()
    with store.upload(1, 1, "model.safetensors", len(content)) as upload:
        upload.append(content[:100])
        upload.append(content[100:])
        assert upload.finish() == len(content)
    store.publish(1, 1, [hash_file(file)], None)
    with store.upload(1, 2, "a.safetensors", 10) as upload:
        with refused(InvalidValue, field="file_bytes", value="more than 10"):
            upload.append(b"x" * 11)
        with refused(InvalidValue, field="file_bytes", value=0):
            upload.finish()
    assert not (store.begin(1, 2) / "a.safetensors").exists()
    with refused(InvalidValue, field="file_bytes", value=1099511627776):
        store.upload(1, 2, "a.safetensors", 1 << 40)
    for name in ("../a.safetensors", "a/b.safetensors", ".safetensors", "a.bin", "..", "a\n.safetensors"):
        with refused(InvalidValue, field="weights: file name"):
            store.upload(1, 2, name, 10)
        with refused(InvalidValue, field="weights: file name"):
            check_file_name(name)


def test_an_upload_that_could_not_be_opened_may_be_brought_again(store: WeightStore) -> None:
    size_bytes = (store.folder(0) / "model.safetensors").stat().st_size
    in_the_way = store.begin(1, 1) / ".model.safetensors"
    in_the_way.mkdir()
    with refused(IsADirectoryError, filename=in_the_way):
        store.upload(1, 1, "model.safetensors", size_bytes)
    in_the_way.rmdir()
    with store.upload(1, 1, "model.safetensors", size_bytes):
        pass


def test_an_upload_whose_base_has_vanished_may_be_brought_whole(store: WeightStore) -> None:
    tensors = load_file(store.folder(0) / "model.safetensors")
    (announced,) = published(store, 1, tensors)
    (store.publish(1, 1, [announced], None) / announced.name).unlink()
    with refused(NotFound, field="base_version", value=1):
        store.upload(1, 2, announced.name, announced.file_bytes, (1, announced.blake3), 1 << 20)
    with store.upload(1, 2, announced.name, announced.file_bytes):
        pass


def test_a_retired_file_that_is_linked_elsewhere_is_not_written_over(store: WeightStore, tmp_path: Path) -> None:
    """As by a record on the same disk."""
    tensors = load_file(store.folder(0) / "model.safetensors")
    spare = store.root / "spare"
    for version in (1, 2):
        folder = store.publish(1, version, published(store, version, tensors), None)
        if version == 1:
            link_or_copy(folder / "model.safetensors", tmp_path / "kept.safetensors")
    store.retire(1)
    assert not list(spare.iterdir())
    store.retire(2)
    assert [file.name for file in spare.iterdir()] == ["model.safetensors"]


def test_a_fenced_trainers_files_are_discarded_and_versions_retired(store: WeightStore) -> None:
    old, new = store.begin(1, 1), store.begin(2, 1)
    store.discard(1)
    assert not old.exists() and new.exists()
    store.retire(0)
    store.retire(99)
    with refused(NotFound, field="version", value=0):
        store.folder(0)


def test_the_version_that_a_kl_term_refers_to_is_kept(tmp_path: Path, models: dict[str, Path]) -> None:
    store = WeightStore(tmp_path / "store", models["dense"], kept_version=1)
    tensors = load_file(models["dense"] / "model.safetensors")
    for version in (1, 2):
        store.publish(1, version, published(store, version, tensors), None)
    for version in (0, 1, 2):
        store.retire(version)
    assert store.versions() == (1,)
    store.withdraw(1)
    store.publish(2, 1, published(store, 1, {**tensors, NAME: tensors[NAME] + 1}, epoch=2), None)
    assert store.versions() == (1,), "it was not committed, so others could be brought"


def test_a_store_that_is_opened_again_keeps_its_versions(store: WeightStore, models: dict[str, Path]) -> None:
    files = published(store, 1, load_file(store.folder(0) / "model.safetensors"))
    store.publish(1, 1, files, Canary((1, 2, 3), (-0.25, -1.5)))
    (store.root / "versions" / ".2").mkdir()  # as a crash would leave it
    again = WeightStore(store.root, models["dense"])
    assert again.versions() == (0, 1) and again.canary(1) == Canary((1, 2, 3), (-0.25, -1.5))
    assert again.publish(1, 1, files, None) == store.folder(1)
    assert again.proof.read_bytes() == again.proof_bytes


def test_a_canary_that_is_none_is_refused(store: WeightStore) -> None:
    for canary, complaint in (
        (Canary((1, 999), (-0.5,)), "token_ids = 999"),
        (Canary((1, 2), (float("nan"),)), "are the weights finite"),
        (Canary((1, 2), (0.5,)), "not above 0"),
        (Canary((1, 2, 3), (-0.5,)), "canary.logprobs = 1"),
    ):
        with refused(InvalidValue, names=data_words(complaint)):
            check_canary(canary, store.reference.vocab_size)


def test_the_canary_leaves_no_trace_and_agrees_with_a_plain_forward_pass(models: dict[str, Path]) -> None:
    module = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32, attention_dropout=0.5)
    module.train()
    module.model.norm.eval()  # a mixed state, to be left mixed
    before = torch.random.get_rng_state()
    canary = compute_canary(module)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert module.training and not module.model.norm.training and module.model.layers[0].training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert canary == compute_canary(module)
    assert canary.token_ids == canary_token_ids(64) and len(canary.logprobs) == 47
    ids = torch.tensor([canary.token_ids])
    expected = torch.log_softmax(module.eval()(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    assert np.allclose(canary.logprobs, expected.detach().numpy(), atol=1e-6)


def test_a_bf16_models_weights_and_canary_are_those_after_rounding(models: dict[str, Path], tmp_path: Path) -> None:
    reference = tmp_path / "bf16"
    shutil.copytree(models["moe"], reference)
    tensors = load_file(models["moe"] / "model.safetensors")
    headers = {name: TensorHeader(name, "BF16", tensor.shape) for name, tensor in tensors.items()}
    as_torch = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    write_weights(reference / "model.safetensors", as_torch, headers)
    store = WeightStore(tmp_path / "store", reference)
    module = AutoModelForCausalLM.from_pretrained(models["moe"], dtype=torch.float32)
    files = place_weights(module, store.reference.tensors, store.begin(1, 1))
    canary = canary_of(module, store.reference.tensors)
    folder = store.publish(1, 1, files, canary)
    assert {header.dtype for header in read_header(folder / "model.safetensors").values()} == {"BF16"}
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert canary is not None
    assert np.allclose(canary.logprobs, compute_canary(rounded).logprobs, atol=1e-5)
    assert not np.allclose(canary.logprobs, compute_canary(module).logprobs, atol=1e-3)


def test_writing_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {
        "odd": np.arange(3, dtype=np.uint8),
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.5, np.float64),
    }
    headers = {name: header_of(name, tensor) for name, tensor in tensors.items()}
    file = tmp_path / "model.safetensors"
    written = write_weights(file, tensors, headers)
    assert written == hash_file(file)
    again = load_file(file)
    assert {name: tensor.tolist() for name, tensor in again.items()} == {k: v.tolist() for k, v in tensors.items()}
    with refused(InvalidValue, field="weights: odd: dtype", value="uint8"):
        write_weights(file, tensors, {**headers, "odd": TensorHeader("odd", "BF16", (3,))})
    with refused(InvalidValue, field="weights: odd", value="list"):
        header_of("odd", [1])


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, models: dict[str, Path]) -> None:
    with refused(InvalidValue, field="model"):
        read_reference(tmp_path)
    shutil.copy(models["dense"] / "model.safetensors", tmp_path)
    with refused(InvalidValue, field="model"):
        read_reference(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with refused(InvalidValue, field="model"):
        read_reference(tmp_path)
