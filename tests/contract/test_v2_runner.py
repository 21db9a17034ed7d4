"""Tests of Model Runner V2 alone: proofs that hold on any device. Runs by ``make test-v2``.

``test_v2_short.py`` runs ``test_requests_hold_move_and_go_on`` in every ``make test``.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from dora.engine_patches.patch import PatchFailed, nothing
from dora.models.tiny import make_tiny
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests import v2_runner
from tests.contract.driver import (
    EVERYTHING,
    KV_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    ROUNDING,
    SAMPLED,
    SLOTS,
    Driver,
    VersionFolder,
    farthest,
    make_request,
    run,
)
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not v2_runner.IS_CHOSEN, reason="needs DORA_TEST_RUNNER=v2 and Triton")


def test_requests_hold_move_and_go_on(engine: VllmEngine, driver: Driver, version_folder: VersionFolder) -> None:
    """One holds, one moves with its KV, one goes on beside them, and they all end as if alone; then other weights."""
    samplings = (SAMPLED, replace(EVERYTHING, stop_token_ids=(), ignore_eos=True), SAMPLED)
    requests = [make_request(index, replace(each, max_tokens=12)) for index, each in enumerate(samplings)]
    alone = run(engine, requests)
    for request in requests:
        driver.add(request)
    driver.step(4)
    engine.freeze("r0")
    moved = driver.take_out("r1")
    driver.step(2)
    engine.thaw("r0")
    engine.take_in(moved)
    assert driver.finish() == alone
    driver.clear()
    driver.responses.clear()
    engine.load_weights(2, version_folder(2), None)
    assert run(engine, [replace(requests[0], version=2)]) != {"r0": alone["r0"]}


def test_a_reload_that_leaves_a_tensor_stale_is_found(
    engine: VllmEngine, version_folder: VersionFolder, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without the repairs of CPU kernels a tied head keeps earlier weights."""
    if kind.endswith(("moe", "hybrid")):
        pytest.skip("its head has weights of its own")
    from dora.engine_patches import registry

    engine._is_reload_proven = False
    with monkeypatch.context() as unrepaired:
        unrepaired.setattr(registry, "after_reload", nothing)
        with refused(PatchFailed, field="patch", value="reload_proof"):
            engine.load_weights(1, version_folder(1), None)
    assert engine.version is None
    engine.load_weights(1, version_folder(1), None)
    assert engine.version == 1


@pytest.mark.parametrize("split", ["tensor_parallel", "pipeline_parallel"])
def test_a_request_leaves_and_returns_to_an_engine_of_two_ranks(split: str, tmp_path: Path) -> None:
    """Each rank is a process with this runner. Two ranks sample what one samples."""
    model = make_tiny("dense", tmp_path / "model", seed=1, kv_heads=2)
    v2_runner.prepare()
    requests = [make_request(number) for number in (1, 2)]

    def started(**split: int) -> VllmEngine:
        engine = VllmEngine(
            model,
            EngineSettings(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, **split),
            device=v2_runner.V2OnCpu(),
            lost=lambda reason: None,
        )
        engine.load_weights(1, model, None)
        return engine

    one = started()
    alone = run(one, requests)
    one.close()
    engine = started(**{split: 2})
    try:
        stayed = run(engine, requests)
        assert farthest(stayed, alone) < ROUNDING
        driver = Driver(engine)
        for request in requests:
            driver.add(request)
        driver.step(10)
        engine.take_in(driver.take_out(requests[0].request_id))
        assert driver.finish() == stayed
        assert len(engine.ranks) == 2 and engine.load().reprefilled_tokens == 0
    finally:
        engine.close()
