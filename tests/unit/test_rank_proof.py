"""The proof that lifts the refusal of engines of several GPUs."""

import json
from pathlib import Path

import pytest

from dora.host import proof


def test_a_proof_is_of_its_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not proof.proof_file("ranks", tmp_path).exists()
    file = proof.write_proof("ranks", {"moves": 3}, tmp_path)
    assert file == proof.proof_file("ranks", tmp_path) and file.is_file()
    document = json.loads(file.read_text())
    assert document["found"] == {"moves": 3} and document["machine"] == proof.machine()
    assert {"dora", "vllm", "torch", "nixl", "driver", "gpus"} == {*document["machine"]}
    for name in document["machine"]:
        with monkeypatch.context() as another:
            another.setattr(proof, "machine", lambda name=name: {**document["machine"], name: "another"})
            assert not proof.proof_file("ranks", tmp_path).exists(), name
    assert proof.proof_file("ranks", tmp_path) == file


def test_the_proof_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert proof.write_proof("ranks", {}).is_relative_to(tmp_path / "dora")
