import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dora.core.state import Refusal, SuspectVersion
from dora.data.types import Canary
from dora.errors import CanaryMismatch
from dora.orchestrator.first_canary import compare_later
from dora.orchestrator.runtime import Runtime
from dora.orchestrator.waiting import unreproduced
from dora.weights import first_version
from dora.weights.canary import check_canary, compute_canary
from tests.refusals import refused
from tests.service import configured


def test_version_0_has_the_canary_that_a_commit_of_it_would_have(
    tiny_dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_version.main([str(tiny_dense)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = Canary(tuple(said["token_ids"]), tuple(said["logprobs"]))
    module = AutoModelForCausalLM.from_pretrained(tiny_dense, dtype=torch.float32)
    check_canary(found, module.config.vocab_size)
    assert found == compute_canary(module) and said["warnings"] == []


@pytest.mark.parametrize("error", [pytest.param(0.0, marks=pytest.mark.full), 0.5])
async def test_on_gpus_it_is_compared_with_what_the_first_worker_computed(tiny_dense: Path, error: float) -> None:
    """Beside the start, which does not wait for transformers."""
    module = AutoModelForCausalLM.from_pretrained(tiny_dense, dtype=torch.float32)
    own = compute_canary(module)
    asked: Iterator[Canary | None] = iter([None, replace(own, logprobs=tuple(each - error for each in own.logprobs))])
    said: list[str] = []
    config = configured(tiny_dense, workers__engine="vllm", workers__device="cuda", workers__count=1)
    comparing = compare_later(config, tiny_dense, lambda: next(asked), said.append)
    if error:
        with refused(CanaryMismatch, names=("0.5",)):
            await comparing
        return
    await comparing
    assert len(said) == 2 and next(asked, "all were asked") == "all were asked"


def test_weights_that_transformers_would_make_up_are_named(
    tiny_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_dense, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert first_version.main([str(folder)]) == first_version.LACKS
    assert "model.norm.weight" in capsys.readouterr().err


def test_weights_that_give_no_finite_logprobs_are_refused_by_name(
    tiny_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_dense, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert first_version.main([str(folder)]) == first_version.BAD_LOGPROBS
    assert "canary.logprobs = nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workers", "refused_by", "newest", "ends"),
    [
        *[(1, ["w0"], 0, True), (2, ["w0"], 0, False), (2, ["w0", "w1"], 0, True), (1, ["w0"], 1, False)],
        *[(count, [], 0, False) for count in range(3)],  # at first no worker has joined
    ],
)
def test_a_start_ends_with_the_reason_once_no_worker_can_load_version_0(
    workers: int, refused_by: list[str], newest: int, ends: bool
) -> None:
    """A second worker may load it well. Later versions are their trainer's to publish again."""
    refusals = {worker_id: Refusal(1, "logprobs differ by 0.5", 0.5) for worker_id in refused_by}
    state = SimpleNamespace(
        window=SimpleNamespace(newest=newest),
        suspects={newest: SuspectVersion(refusals)} if refusals else {},
        rejected={},
        workers=dict.fromkeys(f"w{number}" for number in range(workers)),
    )
    reason = unreproduced(cast(Runtime, SimpleNamespace(core=SimpleNamespace(state=state))))
    assert (reason is not None) == ends
    assert not ends or "logprobs differ by 0.5" in str(reason)
