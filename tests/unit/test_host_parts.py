"""A host's capacity, its folder, and the files it fetches."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dora.errors import InvalidValue
from dora.host.capacity import capacity_of
from dora.host.files import bring, check_plain, digest_of, model_files
from dora.host.folder import SNAPSHOTS, host_folder
from dora.weights.files import WeightFile
from dora.weights.reference import read_reference
from tests.refusals import refused


def test_what_a_machine_has_is_found(tmp_path: Path) -> None:
    found = capacity_of(tmp_path)
    assert found.cores >= 1
    assert 0 < found.store_free_bytes <= found.memory_free_bytes <= found.memory_bytes


def test_a_folder_of_its_own_is_removed_and_a_named_one_is_kept(tmp_path: Path) -> None:
    with host_folder("") as made:
        assert (made / SNAPSHOTS).is_dir()
    assert not made.exists()
    named = tmp_path / "host"
    with host_folder(str(named)) as folder:
        (folder / "kept").write_text("kept")
        (folder / SNAPSHOTS / "left").write_text("left")
        with refused(InvalidValue, field="--folder"), host_folder(str(named)):
            pass
    with host_folder(str(named)) as folder:
        assert (folder / "kept").read_text() == "kept" and not list((folder / SNAPSHOTS).iterdir())


async def test_the_models_files_are_brought_whole_or_refused(tiny_dense: Path, tmp_path: Path) -> None:
    files = model_files(read_reference(tiny_dense))
    names = {file.name for file in files}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    asked: list[str] = []

    async def content(name: str) -> AsyncIterator[bytes]:
        asked.append(name)
        whole = await asyncio.to_thread((tiny_dense / name).read_bytes)
        yield whole[:10]
        yield whole[10:]

    await bring(tmp_path, files, content)
    assert digest_of(model_files(read_reference(tmp_path))) == digest_of(files)
    await bring(tmp_path, files, content)
    assert sorted(asked) == sorted(names), "what is there does not travel again"

    async def longer(name: str) -> AsyncIterator[bytes]:
        yield b"x" * 100

    for wrong in (WeightFile("new.json", 99, b"0" * 32), WeightFile("new.json", 100, b"0" * 32)):
        with refused(InvalidValue, field="new.json", value="100 bytes"):
            await bring(tmp_path, [wrong], longer)
    assert not [name for name in os.listdir(tmp_path) if "new" in name]


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "a\\b", ".hidden", "a\n", "x" * 201])
def test_a_file_lies_in_its_folder(name: str) -> None:
    with refused(InvalidValue, field="file name"):
        check_plain(name)
