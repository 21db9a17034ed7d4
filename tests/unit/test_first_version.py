import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dora.data.types import Canary
from dora.weights import first_version
from dora.weights.canary import check_canary, compute_canary


def test_version_0_has_the_canary_that_a_commit_of_it_would_have(
    tiny_dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_version.main([str(tiny_dense)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = Canary(tuple(said["token_ids"]), tuple(said["logprobs"]))
    module = AutoModelForCausalLM.from_pretrained(tiny_dense, dtype=torch.float32)
    check_canary(found, module.config.vocab_size)
    assert found == compute_canary(module) and said["warnings"] == []


def test_weights_that_transformers_would_make_up_are_named(
    tiny_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_dense, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert first_version.main([str(folder)]) == first_version.LACKS
    assert "model.norm.weight" in capsys.readouterr().err
