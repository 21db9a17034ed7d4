"""Tests that need a real model: agreement with another implementation, and that each patch is needed and proven."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dora.engine_patches.patch import PatchFailed, nothing
from dora.errors import CanaryMismatch
from dora.weights.canary import compute_canary
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import GREEDY, SAMPLED, Driver, VersionFolder, make_request, mixed_requests, run
from tests.refusals import refused

AGREEMENT = 1e-3  # 5e-5 was measured on larger models
PLAIN = [replace(sampling, max_tokens=6) for sampling in (GREEDY, SAMPLED)]  # neither alters logprobs


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
    from dora.worker.vllm import core as vllm_core
    from dora.worker.vllm.device.port import EngineSettings

    capability = engine.capability
    settings = EngineSettings(capability.slots, 0, capability.max_model_len_tokens, 0, capability.dtype)
    prints = [
        vllm_core.layout_of(engine.core, engine._ranks, engine._reference, each).fingerprint
        for each in (
            settings,
            replace(settings, batch_invariant=True),
            replace(settings, quantisation="int8"),
            replace(settings, kv_dtype="fp8"),
            replace(settings, engine_args={"enforce_eager": True}),
        )
    ]
    assert prints[0] == engine.layout.fingerprint and len(set(prints)) == 5
    named = replace(settings, engine_args={"seed": 3})
    same = vllm_core.layout_of(engine.core, engine._ranks, engine._reference, named).fingerprint
    assert same == prints[0], "it changes no KV"


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_reload_is_proven_beside_the_noise_of_equal_scores(
    engine: VllmEngine, version_folder: VersionFolder, monkeypatch: pytest.MonkeyPatch, noise: float
) -> None:
    """A load that leaves all as it was is found, and kernels that sum in no fixed order are not taken for one."""
    found = engine.load_weights(1, version_folder(1), None)
    score, load, turn = engine._score, engine._ranks.replace_weights, itertools.count()
    monkeypatch.setattr(engine, "_score", lambda ids: [each + noise * (next(turn) % 3) for each in score(ids)])
    engine._prove_reloads(version_folder(1), found)
    monkeypatch.setattr(engine._ranks, "replace_weights", lambda files, limit_s, *_: load(files, limit_s))
    with refused(PatchFailed, field="patch", value="reload_proof"):
        engine._prove_reloads(version_folder(1), found)


def test_logprobs_after_a_load_in_place_are_those_of_transformers(
    engine: VllmEngine, version_folder: VersionFolder, reference: torch.nn.Module
) -> None:
    run(engine, [make_request(1)])
    engine.load_weights(2, version_folder(2), compute_canary(reference))
    requests = [replace(request, version=2) for request in mixed_requests(6)]
    responses = run(engine, requests)
    for request in requests:
        response = responses[request.request_id]
        expected = expected_of(reference, request.prompt_token_ids, response.token_ids)
        assert float((torch.tensor(response.logprobs) - expected).abs().max()) < AGREEMENT


def expected_of(reference: torch.nn.Module, prompt: Sequence[int], outputs: Sequence[int]) -> torch.Tensor:
    """The logprobs of the outputs in transformers."""
    tokens = torch.tensor([[*prompt, *outputs]])
    with torch.no_grad():
        logprobs = reference(tokens).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return logprobs[len(prompt) - 1 :]


def test_logprobs_of_a_session_are_those_of_transformers(
    engine: VllmEngine, version_folder: VersionFolder, reference: torch.nn.Module
) -> None:
    """Of four turns, beside another session."""
    engine.load_weights(2, version_folder(2), None)
    driver = Driver(engine)
    requests = [replace(make_request(index, sampling), version=2, keeps=True) for index, sampling in enumerate(PLAIN)]
    for request in requests:
        driver.add(request)
    driver.finish()
    for count in (1, 32, 45):
        for request in requests:
            response, given = driver.responses[request.request_id], tuple(range(3, 3 + count))
            engine.extend(request.request_id, given, replace(request.sampling, max_tokens=6))
            response.token_ids, response.finish_reason = [*response.token_ids, *given], None
            response.logprobs += [0.0] * count
        driver.finish()
    for request in requests:
        session = engine.request(request.request_id)
        expected = expected_of(reference, session.prompt_token_ids, session.output_token_ids)
        for first, end in session.inputs:
            expected[first:end] = 0.0  # nobody sampled them
        assert len(session.inputs) == 3
        assert float((torch.tensor(session.logprobs) - expected).abs().max()) < AGREEMENT
        engine.remove(request.request_id)


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
