"""``examples/trl_grpo.py`` with TRL itself: its weights become versions, whole or merged with an adapter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.clients.environments import run_in
from tests.contract.trainer_service import TOKEN, Running, StartService
from tests.snippets import ROOT, snippet

CHANGED_LINES_MAX = 15  # of a program with TRL's trainer, as issue 56 limits them


async def ran(program: Path, *arguments: str) -> dict[str, Any]:
    """What the program writes as its last line."""
    variables = {"DORA_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    written = await run_in("trl", program, *arguments, variables=variables, has_dora=True)
    return json.loads(written.splitlines()[-1])


def weights_of(service: Running, version: int) -> dict[str, torch.Tensor]:
    return load_file(service.service.store.folder(version) / "model.safetensors")


@pytest.mark.full
async def test_trl_trains_whole_models_and_adapters(
    start_service: StartService, tmp_path: Path, tiny_dense: Path
) -> None:
    """Five groups: the third step of two is short."""
    full, lora = [await start_service(tmp_path / name, tiny_dense, total_groups=5) for name in ("full", "lora")]
    found = await ran(ROOT / "tests/clients/trl_runs.py", str(tiny_dense), full.address, lora.address)
    assert found["merging"] and found["refused_adapter"].startswith("peft_config")
    assert found["refused"] == "args.num_generations"
    base = load_file(tiny_dense / "model.safetensors")
    for name, service in (("full", full), ("lora", lora)):
        assert [commit.version for commit in service.service.commits] == [1, 2, 3], name
        assert [commit.metrics["reward"] for commit in service.service.commits] == [0.5] * 3
        steps = [line for line in found[name] if "loss" in line]
        assert [line["reward"] for line in steps] == [0.5] * 3, "TRL sees the service's rewards"
        versions = [weights_of(service, version) for version in (1, 2, 3)]
        for before, after in zip([base, *versions], versions, strict=False):
            assert before.keys() == after.keys()
            assert any(not torch.equal(before[each], after[each]) for each in before)
    assert torch.equal(weights_of(lora, 3)["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert [bool(each.canary.ByteSize()) for each in (full.service.commits[0], lora.service.commits[0])] == [
        True,
        False,
    ]


async def test_the_page_changes_few_lines_of_a_program_with_trl() -> None:
    changes = snippet("examples/README.md", "GRPOTrainer", "diff")
    added = [line[1:].strip() for line in changes.splitlines() if line.startswith("+")]
    assert 0 < len(added) <= CHANGED_LINES_MAX
    example = (ROOT / "examples" / "trl_grpo.py").read_text()
    for line in added:
        assert line in example, "each is a line of the example, which runs"
