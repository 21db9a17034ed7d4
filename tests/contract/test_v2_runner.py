"""What only an engine on Model Runner V2 shows: proofs that hold on any device. Runs by ``make test-v2``."""

import pytest

from dora.engine_patches.patch import PatchFailed, nothing
from dora.worker.vllm_engine import VllmEngine
from tests import v2_runner
from tests.contract.driver import VersionFolder
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not v2_runner.IS_CHOSEN, reason="needs DORA_TEST_RUNNER=v2 and Triton")


def test_a_reload_that_leaves_a_tensor_stale_is_found(
    engine: VllmEngine, version_folder: VersionFolder, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without the repairs of CPU kernels a tied head keeps earlier weights."""
    if kind.endswith("moe"):
        pytest.skip("its head has weights of its own")
    from dora.engine_patches import registry

    engine._is_reload_proven = False
    with monkeypatch.context() as unrepaired:
        unrepaired.setattr(registry, "after_reload", nothing)
        with refused(PatchFailed, field="patch", value="tied_head"):
            engine.load_weights(1, version_folder(1), None)
    assert engine.version is None
    engine.load_weights(1, version_folder(1), None)
    assert engine.version == 1
