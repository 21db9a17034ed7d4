"""Sizes of workers on GPUs, from data sheets, a model's config.json and the headers of its weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dora.config import Config, load_config
from dora.errors import InvalidValue, LimitExceeded
from dora.host.placement import Gpu, Placement
from dora.models import kv_token_bytes
from dora.orchestrator.device_sizes import (
    DeviceSizes,
    device_sizes,
    on_paper,
    placement_for,
    trainer_command,
    with_sizes,
    write_gpus,
)
from dora.trainers.start import gpu_of
from dora.weights.holds import GPUS_FILE
from dora.weights.reference import Reference, TensorHeader
from tests.refusals import refused

QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
}
LATENT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "hidden_size": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def folder(tmp_path: Path, **fields: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def configured(device: str, *overrides: str) -> Config:
    config = load_config(None, [f"workers.device={device}", "rollout.max_tokens=8192", *overrides])
    workers = config.workers.model_copy(update={"max_model_len_tokens": 40960})
    return config.model_copy(update={"workers": workers})


def sizes(tmp_path: Path, config: Config, placement: Placement | None = None) -> DeviceSizes | None:
    reference = Reference(tmp_path, (), (TensorHeader("all", "BF16", (8_190_735_360,)),), 151_936)
    model = folder(tmp_path, **QWEN3_8B)
    return device_sizes(config, model, reference, placement or placement_for(config.workers))


def test_kv_of_a_token_follows_from_the_model(tmp_path: Path) -> None:
    assert kv_token_bytes(folder(tmp_path, **QWEN3_8B)) == 36 * 2 * 8 * 128 * 2
    assert kv_token_bytes(folder(tmp_path, **LATENT)) == 2 * 576 * 2
    assert kv_token_bytes(folder(tmp_path, num_hidden_layers=2)) == 0
    kinds = [*["linear_attention"] * 27, *["full_attention"] * 9]
    assert kv_token_bytes(folder(tmp_path, **QWEN3_8B, layer_types=kinds)) == 9 * 2 * 8 * 128 * 2, "others keep a state"


def test_slots_and_memory_follow_from_gpu_model_and_context(tmp_path: Path) -> None:
    found = sizes(tmp_path, configured("cuda:H100x8"))
    assert found is not None and found.kv_tokens == 343_278
    assert (found.slots, found.kv_mb) == (80, 6039), "343,278 tokens by half of 8,192, in eights; 40,960 tokens of KV"
    larger = sizes(tmp_path, configured("cuda:h200x1"))
    assert larger is not None and larger.slots == 168
    config = with_sizes(configured("cuda:H100x8"), found)
    assert (config.workers.slots, config.kv.memory_bytes) == (80, 6039 * 10**6)


def test_what_is_set_stays(tmp_path: Path) -> None:
    found = sizes(tmp_path, configured("cuda:H100x8", "workers.slots=48", "kv.memory_mb=512"))
    assert found is not None and (found.slots, found.kv_mb) == (48, 512)
    on_cpu = configured("cpu", "workers.kv_tokens=65536")
    assert sizes(tmp_path, on_cpu) is None and with_sizes(on_cpu, None) is on_cpu
    assert (on_cpu.workers.slots, on_cpu.kv.memory_bytes) == (16, 1024 * 10**6)


def test_a_gpu_without_a_data_sheet_needs_slots(tmp_path: Path) -> None:
    placement = Placement((Gpu("NVIDIA L4", "GPU-1", "1"),))
    with refused(InvalidValue, field="workers.slots", value=0):
        sizes(tmp_path, configured("cuda"), placement)
    found = sizes(tmp_path, configured("cuda", "workers.slots=32"), placement)
    assert found is not None and found.slots == 32 and "no data sheet" in str(found)


def test_weights_without_room_for_a_context_are_warned_of(tmp_path: Path) -> None:
    found = sizes(tmp_path, configured("cuda:H100x1", "workers.gpu_memory_utilisation=0.3"))
    assert found is not None and "warning" in str(found) and "workers.max_model_len_tokens" in str(found)


def test_a_draft_model_takes_its_part_of_a_gpu_or_is_refused(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    weights = draft / "model.safetensors"
    weights.touch()
    chosen = [f"workers.speculation=model:{draft}", "workers.history_mb=1000"]
    token_bytes = kv_token_bytes(folder(tmp_path, **QWEN3_8B))
    for weights_bytes in (0, 3 * 10**9):
        os.truncate(weights, weights_bytes)
        found = sizes(tmp_path, configured("cuda:H100x8", *chosen))
        assert found is not None and found.kv_tokens == 343_278 - (weights_bytes + 10**9) // token_bytes
    os.truncate(weights, 60 * 10**9)
    with refused(LimitExceeded, field="workers.speculation", value=f"model:{draft}"):
        sizes(tmp_path, configured("cuda:H100x8", *chosen))


def test_gpus_on_paper_keep_some_for_a_trainer() -> None:
    workers = configured("cuda:H100x8", "workers.gpus_for_trainer=2").workers
    placement = placement_for(workers)
    assert on_paper(workers) and len(placement.gpus) == 6 and len(placement.all_gpus) == 8
    assert not on_paper(configured("cuda:0,1").workers) and not on_paper(configured("cuda:GPU-0a1b").workers)


@pytest.mark.parametrize("name", ["H10", "L40"])
def test_a_name_without_a_data_sheet_is_refused(name: str) -> None:
    with refused(InvalidValue, field="workers.device", value=name):
        placement_for(configured(f"cuda:{name}x8").workers)


@pytest.mark.parametrize(("setting", "value"), [("workers.slots", 0), ("kv.memory_mb", 8)])
def test_sizes_that_nothing_chooses_are_refused(setting: str, value: int) -> None:
    with refused(InvalidValue, field=setting, value=value):
        load_config(None, [f"{setting}={value}"])


def test_the_trainers_command_names_the_gpus_that_no_worker_gets() -> None:
    placement = placement_for(configured("cuda:H100x8", "workers.gpus_for_trainer=2").workers)
    command = trainer_command(placement, "127.0.0.1:7070")
    assert command.startswith("CUDA_VISIBLE_DEVICES=GPU-6,GPU-7 torchrun --standalone --nproc-per-node 2 -m dora")
    single = placement_for(configured("cuda:H100x2", "workers.gpus_for_trainer=1").workers)
    assert trainer_command(single, "a:1").startswith("CUDA_VISIBLE_DEVICES=GPU-1 python -m dora.trainers.grpo")
    assert trainer_command(placement_for(configured("cpu", "workers.kv_tokens=65536").workers), "a:1") == ""


def test_a_trainer_takes_its_own_gpus_and_is_warned_of_a_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = configured(
        "cuda:H100x8", "workers.gpus_for_trainer=2", "workers.tensor_parallel=2", "workers.count=3"
    ).workers
    write_gpus(tmp_path, placement_for(workers), workers)
    gpus = json.loads((tmp_path / GPUS_FILE).read_text())
    visible = [f"GPU-{number}" for number in range(8)]
    assert [gpu_of(visible, rank, gpus) for rank in range(2)] == [6, 7], "of all GPUs of the host"
    assert [gpu_of(visible[6:], rank, gpus) for rank in range(2)] == [0, 1], "by CUDA_VISIBLE_DEVICES"
    assert gpu_of(["GPU-a", "GPU-b"], 1, {}) == 1, "on another host"
    assert not caplog.records
    assert gpu_of(visible[3:4], 0, gpus) == 0
    (record,) = caplog.records
    assert "GPU-3" in record.getMessage() and "worker 1" in record.getMessage()
