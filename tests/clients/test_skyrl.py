"""``examples/skyrl_generator.py`` with SkyRL's own preparation and checks of batches: a batch is a step."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dora
from tests.clients.environments import run_in
from tests.service import configured, running
from tests.snippets import ROOT

SERVICE = {"workers__engine": "fake", "prompts": "none", "reward__function": "tests.clients.graded:score"}


@pytest.mark.full
async def test_skyrl_samples_batches_and_groups_of_the_service_and_commits_its_weights(tiny_dense: Path) -> None:
    async with running(configured(tiny_dense, window__size=1, **SERVICE)) as handle:
        program, variables = ROOT / "tests/clients/skyrl_runs.py", {"DORA_TOKEN": handle.token}
        written = await run_in("skyrl", program, str(tiny_dense), handle.address, variables=variables, has_dora=True)
        async with dora.Trainer(handle.address, token=handle.token, take_over=True) as trainer:
            attachment = await trainer.attach()
        assert attachment.next_step == 3 and attachment.store_folder is not None
        newest = load_file(attachment.store_folder / "versions" / "3" / "model.safetensors")
    found = json.loads(written.splitlines()[-1])
    assert found["is_generator"] and found["is_trainer"] and found["refused"] == "temperature"
    runs = [
        (0, 4, found["steps"][0]),
        (1, 4, found["steps"][1]),
        (2, 2, found["groups"][0]),
        (2, 2, found["groups"][1]),
    ]
    for version, responses, output in [*runs, (3, 4, found["evaluated"])]:
        assert (
            len(output["response_ids"]) == responses and output["trajectory_ids"][::2] == output["trajectory_ids"][1::2]
        )
        assert output["rollout_metrics"]["dora/version_min"] == output["rollout_metrics"]["dora/version_max"] == version
        assert output["rollout_metrics"]["dora/staleness"] == 0
        lengths = [len(tokens) for tokens in output["response_ids"]]
        assert all(0 < length <= 8 for length in lengths)
        assert [len(each) for each in output["loss_masks"]] == lengths
        assert [len(each) for each in output["rollout_logprobs"]] == lengths
        assert all(value < 0 for each in output["rollout_logprobs"] for value in each)
        assert output["rewards"] == pytest.approx([length / 100 for length in lengths])
        assert output["score"] == pytest.approx(sum(lengths) / 100 / responses)
    base = load_file(tiny_dense / "model.safetensors")
    assert base.keys() == newest.keys()
    assert all(torch.allclose(newest[name].float(), base[name].float() * 1.375, rtol=1e-2) for name in base)
