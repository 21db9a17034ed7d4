"""Tests that need a real model: agreement with another implementation, and that each patch is needed and proven."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dora.engine_patches.patch import PatchFailed, nothing
from dora.errors import CanaryMismatch
from dora.weights.canary import compute_canary
from dora.worker.vllm_engine import VllmEngine
from tests.contract.driver import GREEDY, VersionFolder, make_request, mixed_requests, run
from tests.refusals import refused

AGREEMENT = 1e-3  # 5e-5 was measured on larger models


@pytest.fixture(scope="module", params=["vllm-dense", "vllm-moe"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def runner_of(engine: VllmEngine) -> object:
    """The model runner of the engine's only rank."""
    return engine.core.model_executor.driver_worker.worker.model_runner


def verify(engine: VllmEngine) -> None:
    from dora.engine_patches import registry
    from dora.engine_patches.cpu.registry import PATCHES

    registry.verify(runner_of(engine), PATCHES)


@pytest.fixture
def reference(version_folder: VersionFolder) -> Iterator[torch.nn.Module]:
    """Version 2 in transformers."""
    yield AutoModelForCausalLM.from_pretrained(version_folder(2), dtype=torch.float32).eval()


def test_engines_in_another_mode_have_another_fingerprint(engine: VllmEngine) -> None:
    from dora.worker import vllm_core
    from dora.worker.device.port import EngineSettings

    capability = engine.capability
    settings = EngineSettings(capability.slots, 0, 0, capability.max_model_len_tokens, capability.dtype)
    prints = [
        vllm_core.layout_of(engine.core, engine._ranks, engine._reference, each).fingerprint
        for each in (settings, replace(settings, batch_invariant=True), replace(settings, quantisation="int8"))
    ]
    assert prints[0] == engine.layout.fingerprint and len(set(prints)) == 3


def test_logprobs_after_a_load_in_place_are_those_of_transformers(
    engine: VllmEngine, version_folder: VersionFolder, reference: torch.nn.Module
) -> None:
    run(engine, [make_request(1)])
    engine.load_weights(2, version_folder(2), compute_canary(reference))
    requests = [replace(request, version=2) for request in mixed_requests(6)]
    responses = run(engine, requests)
    for request in requests:
        response = responses[request.request_id]
        tokens = torch.tensor([[*request.prompt_token_ids, *response.token_ids]])
        with torch.no_grad():
            logprobs = reference(tokens).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        expected = logprobs[len(request.prompt_token_ids) - 1 :]
        assert float((torch.tensor(response.logprobs) - expected).abs().max()) < AGREEMENT


def test_sharded_weights_are_the_same_weights(
    engine: VllmEngine, version_folder: VersionFolder, tmp_path: Path
) -> None:
    engine.load_weights(2, version_folder(2), None)
    request = replace(make_request(1, GREEDY), version=2)
    whole = run(engine, [request])
    tensors = load_file(version_folder(2) / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    engine.load_weights(1, version_folder(1), None)
    engine.load_weights(2, tmp_path, None)
    assert run(engine, [request]) == whole


def test_without_the_repairs_the_canary_catches_the_load(
    engine: VllmEngine, version_folder: VersionFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora.engine_patches import registry

    canary = engine.load_weights(2, version_folder(2), None)
    engine.load_weights(1, version_folder(1), None)
    with monkeypatch.context() as unrepaired:
        unrepaired.setattr(registry, "after_reload", nothing)
        with pytest.raises(CanaryMismatch):
            engine.load_weights(2, version_folder(2), canary)
    engine.load_weights(2, version_folder(2), canary)


def test_a_patch_that_does_not_take_is_named_at_the_start(
    engine: VllmEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora.engine_patches.cpu import moe_experts, tied_head

    verify(engine)
    with monkeypatch.context() as broken:
        broken.setattr(tied_head, "_repack", nothing)
        with refused(PatchFailed, field="patch", value="tied_head"):
            verify(engine)
    if kind == "vllm-moe":
        with monkeypatch.context() as broken:
            broken.setattr(moe_experts.CPUUnquantizedExperts, "process_weights_after_loading", nothing)
            with refused(PatchFailed, field="patch", value="moe_experts"):
                verify(engine)
    verify(engine)
