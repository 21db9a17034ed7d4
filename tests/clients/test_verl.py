"""``examples/verl_rollout.py`` with verl's own registries, managers, TransferQueue and replay buffer."""

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import dora
from tests.clients.environments import run_in
from tests.service import configured, running
from tests.snippets import ROOT, snippet

SERVICE = {"workers__engine": "fake", "prompts": "none", "reward__function": "tests.clients.graded:score"}


def page_settings(address: str) -> list[str]:
    """verl's settings as the page has them."""
    page = snippet("examples/README.md", "verl_rollout.Rollouts", "sh")
    settings = [each.replace("127.0.0.1:7070", address) for each in re.findall(r"\S+\.\S+=\S+", page)]
    return [each for each in settings if "placement" not in each]  # which is SkyRL's


@pytest.mark.full
async def test_verl_samples_batches_of_the_service_and_commits_its_weights(tiny_dense: Path) -> None:
    async with running(configured(tiny_dense, window__size=1, **SERVICE)) as handle:
        variables = {"DORA_TOKEN": handle.token, "VERL_USE_EXTERNAL_MODULES": "verl_rollout"}
        arguments = [str(tiny_dense), *page_settings(handle.address)]
        program = ROOT / "tests/clients/verl_runs.py"
        written = await run_in("verl", program, *arguments, variables=variables, has_dora=True)
        async with dora.Trainer(handle.address, token=handle.token, take_over=True) as trainer:
            attachment = await trainer.attach()
        assert attachment.next_step == 2 and attachment.store_folder is not None
        newest = load_file(attachment.store_folder / "versions" / "2" / "model.safetensors")
    found = json.loads(written.splitlines()[-1])
    assert found["is_engine"] and found["are_replicas"] and found["is_manager"]
    for number, rows in enumerate([*found["steps"], found["evaluated"]]):
        kind, step = ("val", 2) if number == 2 else ("train", number + 1)
        assert {row["key"] for row in rows} == {
            f"{kind}{step}g{group}_{member}_0" for group in (0, 1) for member in (0, 1)
        }
        for row in rows:
            tokens = len(row["responses"])
            assert 0 < tokens <= 8 and tokens == len(row["response_mask"]) == len(row["rollout_log_probs"])
            assert all(value < 0 for value in row["rollout_log_probs"]) and row["response_mask"] == [1] * tokens
            assert row["rm_scores"] == pytest.approx([0.0] * (tokens - 1) + [tokens / 100])
            assert row["position_ids"] == list(range(len(row["prompts"]) + tokens))
            assert row["tag"]["min_global_steps"] == row["tag"]["max_global_steps"] == number
            assert row["extra_fields"]["min_global_steps"] == number, "verl's global step is the version"
    base = load_file(tiny_dense / "model.safetensors")
    assert base.keys() == newest.keys()
    assert all(torch.allclose(newest[name].float(), base[name].float() * 1.25, rtol=1e-2) for name in base)


@pytest.mark.full
@pytest.mark.timeout(600)  # three minutes on a busy machine
async def test_verls_trainer_trains_on_batches_of_the_service(tiny_dense: Path, tmp_path: Path) -> None:
    """verl's own program, with all that it has but GPUs: ``verl_cpu.py`` is a platform of verl for CPUs."""
    rows = [
        {"prompt": [{"role": "user", "content": "LATE"}], "data_source": "letters", "extra_info": {"index": index}}
        for index in range(8)
    ]
    graded = [{**row, "reward_model": {"style": "rule", "ground_truth": "nop"}} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(graded), tmp_path / "rows.parquet")
    async with running(configured(tiny_dense, window__size=2, **SERVICE)) as handle:
        variables = {
            "DORA_TOKEN": handle.token,
            "VERL_USE_EXTERNAL_MODULES": "tests.clients.verl_cpu,verl_rollout",
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # the name under which verl knows its FSDP engine
        }
        settings = [*page_settings(handle.address), *settings_of(tiny_dense, tmp_path)]
        program = ROOT / "tests/clients/verl_main.py"
        written = await run_in("verl", program, *settings, variables=variables, has_dora=True)
        async with dora.Trainer(handle.address, token=handle.token, take_over=True) as trainer:
            attachment = await trainer.attach()
        assert attachment.next_step == 2 and attachment.store_folder is not None
        newest = load_file(attachment.store_folder / "versions" / "2" / "model.safetensors")
    steps = [line for line in written.splitlines() if "training/global_step:" in line]
    assert len(steps) == 2 and all("critic/score/mean:" in line for line in steps)
    base = load_file(tiny_dense / "model.safetensors")
    assert base.keys() == newest.keys() and any(not torch.equal(base[name], newest[name]) for name in base)


def settings_of(model: Path, folder: Path) -> list[str]:
    """Of verl, for two steps of two groups of two on a CPU."""
    rollout = {"n": 2, "log_prob_micro_batch_size_per_gpu": 2, "tensor_model_parallel_size": 1}
    actor = {"strategy": "fsdp2", "ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 2, "optim.lr": 1e-2}
    compiled = {"use_torch_compile": False, "fsdp_config.use_torch_compile": False}
    data = {"train_batch_size": 2, "val_batch_size": 2, "max_prompt_length": 16, "max_response_length": 8}
    loop = {"device": "cpu", "n_gpus_per_node": 1, "nnodes": 1, "total_training_steps": 2, "total_epochs": 1}
    less = {"save_freq": -1, "test_freq": -1, "val_before_train": False, "logger": "[console]"}
    groups = {
        "actor_rollout_ref.model": {"path": model, "use_remove_padding": False, "enable_gradient_checkpointing": False},
        "+actor_rollout_ref.model.override_config": {"attn_implementation": "eager"},
        "actor_rollout_ref.actor": {**actor, **compiled},
        "actor_rollout_ref.rollout": {**rollout, "free_cache_engine": False, "load_format": "auto"},
        "data": {**data, "dataloader_num_workers": 0, "filter_overlong_prompts": False},
        "trainer": {**loop, **less, "default_local_dir": folder / "checkpoints"},
        "ray_kwargs.ray_init": {"num_cpus": 16},
        "+ray_kwargs.ray_init": {"num_gpus": 1, "include_dashboard": False},  # Ray counts what it is told
    }
    found = [f"{group}.{name}={value}" for group, values in groups.items() for name, value in values.items()]
    files = [f"data.{kind}_files={folder / 'rows.parquet'}" for kind in ("train", "val")]
    more = ["algorithm.adv_estimator=grpo", "reward.num_workers=1", f"hydra.run.dir={folder / 'hydra'}"]
    return [*found, *files, *more, "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"]
