"""Engines that start in a process without another: vLLM's groups of ranks are those of the first."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dora.models.tiny import make_tiny
from dora.ops.doctor import engine_checks
from dora.ops.doctor.verdict import Failed, Subject
from dora.worker.vllm.device.cpu import FEATURES
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import GREEDY, KV_TOKENS, MAX_MODEL_LEN_TOKENS, SLOTS, make_request, run

JOIN = "dora.worker.vllm.connector.SnapshotConnector.join"  # imported by the tests alone: it imports vLLM
pytestmark = pytest.mark.xdist_group("vllm-alone")  # the group before has closed its engines


@pytest.mark.parametrize(
    "features",
    [
        pytest.param(("avx2", "avx512", "amx_tile"), id="amx"),
        pytest.param(("avx2",), marks=pytest.mark.full, id="no avx512"),
    ],
)
def test_latent_attention_starts_whatever_instructions_the_cpu_has(
    features: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM is told what the CPU has. It would choose a backend for AMX, which takes no float32."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # those that this CPU can run; others would end the process
    monkeypatch.setattr(current_platform, "import_kernels", lambda: None)
    for name in FEATURES:
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name in features)
    model = make_tiny("mla", tmp_path / "model", seed=1)
    engine = VllmEngine(model, EngineSettings(SLOTS, KV_TOKENS, MAX_MODEL_LEN_TOKENS))
    try:
        engine.load_weights(1, model, None)
        assert "CPU_MLA" in engine.layout.backend
        assert len(run(engine, [make_request(1, GREEDY, 20, max_tokens=4)])["r1"].token_ids) == 4
    finally:
        engine.close()


def test_the_doctors_stage_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's engine is closed here, since the stage leaves that to the end of its process."""
    engines: list[VllmEngine] = []
    start = engine_checks.engine_of

    def kept(*args: Any, **kwargs: Any) -> VllmEngine:
        engines.append(start(*args, **kwargs))
        return engines[-1]

    monkeypatch.setattr(engine_checks, "engine_of", kept)
    monkeypatch.setattr(JOIN, lambda self: None)
    try:
        with pytest.raises(Failed) as found:
            engine_checks.late_copies(Subject("cpu", make_tiny("dense", tmp_path / "model", seed=1), tmp_path))
        assert "moved after 1 tokens" in str(found.value)
    finally:
        engines[0].close()
