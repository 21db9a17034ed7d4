"""Differences of engines on CPU and GPU that can be seen without vLLM."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dora.config import KvConfig
from dora.data.types import RequestSpec, SamplingParams
from dora.errors import Conflict, InvalidValue
from dora.worker.vllm.device.choice import device_named
from dora.worker.vllm.device.cpu import FEATURES, Cpu, latent_backend
from dora.worker.vllm.device.cpu import features as cpu_features
from dora.worker.vllm.device.cuda import Cuda
from dora.worker.vllm.device.port import KINDS, EngineSettings, Kind, check_installed
from dora.worker.vllm.engine import VllmEngine
from dora.worker.vllm.views import EngineRequest, KvViews
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
SETTINGS = EngineSettings(slots=16, kv_tokens=4096, block_tokens=32, max_model_len_tokens=512, dtype="bfloat16")


@pytest.mark.parametrize("has_amx", [False, True])
def test_the_arguments_of_both_devices_are_as_recorded(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert Cpu().arguments(SETTINGS) == {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 528,
        "attention_backend": "AMX_MLA" if has_amx else "CPU_MLA",
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 20,
    }
    of_gpu = {
        "enforce_eager": False,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 8192,
        "block_size": 32,
        "gpu_memory_utilization": 0.9,
    }
    assert of_gpu.items() <= Cuda().arguments(SETTINGS).items()
    assert Cuda().arguments(replace(SETTINGS, block_tokens=0))["block_size"] is None, "the backend's own"


@pytest.mark.parametrize("features", [(), ("avx2",), ("avx2", "avx512", "amx_tile")])
def test_latent_attention_in_float32_takes_no_backend_for_amx(
    features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FEATURES:
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name in features)
    assert cpu_features() == [*features]
    assert latent_backend("float32") == "CPU_MLA"
    assert latent_backend("bfloat16") == ("AMX_MLA" if "amx_tile" in features else "CPU_MLA")


def test_a_gpu_computes_in_bfloat16_unless_it_is_told_otherwise_and_float32_is_not_tf32() -> None:
    assert (Cpu().default_dtype, Cuda().default_dtype) == ("float32", "bfloat16")
    assert Cuda().environment["TRITON_F32_DEFAULT"] == "ieee"
    assert Cuda().environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert Cuda().environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize("kind", KINDS)
def test_a_vllm_for_another_device_is_refused(kind: Kind) -> None:
    assert device_named(kind).kind == kind
    check_installed(kind, kind)
    for other in {*KINDS, "rocm"} - {kind}:
        with refused(InvalidValue, field="device", value=kind):
            check_installed(kind, other)


def test_one_function_gives_workers_their_gpus() -> None:
    """The service and the agents of hosts call it; nothing else writes the variable."""
    writers, callers = [], []
    for file in (ROOT / "dora").rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                keys = {each.value for each in node.keys if isinstance(each, ast.Constant)}
                names = {each.id for each in node.keys if isinstance(each, ast.Name)}
                writers += [name] if "CUDA_VISIBLE_DEVICES" in keys or "VISIBLE" in names else []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "environment":
                value = ast.unparse(node.func.value)
                callers += [name] if value.endswith("placement") else []
    assert set(writers) == {"dora/host/placement.py", "dora/orchestrator/first_canary.py"}, "the canary uses no GPU"
    assert set(callers) == {"dora/host/runtime.py", "dora/orchestrator/starting.py"}


class _Recorded(list[str]):
    def join(self) -> None:
        self.append("join")

    def step(self) -> Any:
        self.append("step")
        return {}, True


def test_a_step_joins_the_copies_of_kv_before_it_runs() -> None:
    engine = object.__new__(VllmEngine)
    engine._store = engine._core = recorded = _Recorded()
    engine._step()
    assert recorded == ["join", "step"]


@pytest.mark.parametrize(("computed", "moves"), [(0, False), (8, False), (11, True)])
def test_a_request_in_mid_prefill_does_not_move(computed: int, moves: bool) -> None:
    """With chunked prefill a step may compute a part of a prompt, of one that was preempted too."""
    request = RequestSpec("r", 0, tuple(range(10)), SamplingParams(temperature=1.0, seed=1, max_tokens=9))
    live = EngineRequest(request, "r-1", None, outputs=[5, 6], logprobs=[-1.0, -1.0])
    state = SimpleNamespace(num_computed_tokens=computed, num_preemptions=0)
    connector = SimpleNamespace(is_offered=lambda _: False, offered=lambda _: None)
    scheduler = SimpleNamespace(requests={"r-1": state}, connector=connector, held={"r-1"})
    layout: Any = SimpleNamespace(block_tokens=4)
    views = KvViews(scheduler, Any, layout, (), "", takes_ahead=False)
    if moves:
        assert views.final_blocks(live)[0]
        return
    assert views.export(live, 0) is None
    with refused(Conflict, field="request_id", value="r"):
        views.final_blocks(live)


def test_nccl_is_used_only_if_it_is_named() -> None:
    """It passes host memory on both sides, so within a host it is slower than shared memory."""
    names = KvConfig().transports.split(",")
    assert names[0] == "shm" and "nccl" not in names
