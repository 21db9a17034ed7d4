"""vLLM's own reload, with weights that come through the ring of a GPU."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora.errors import Conflict, DeadlineExceeded
from dora.models.tiny import TinyKind, make_tiny
from dora.weights.canary import compute_canary
from dora.worker.vllm_engine import VllmEngine
from tests.contract.driver import KV_TOKENS, MAX_MODEL_LEN_TOKENS, SAMPLED, SLOTS, make_request
from tests.refusals import refused

pytestmark = pytest.mark.xdist_group("vllm-moe")  # a process imports vLLM for many tests

KINDS = ["dense", pytest.param("moe", marks=pytest.mark.full), pytest.param("mla", marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=KINDS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    kind: TinyKind = request.param
    base = tmp_path_factory.mktemp(kind)
    return {
        version: make_tiny(kind, base / f"v{version}", seed=version, kv_heads=2, tied=kind != "mla")
        for version in (1, 2)
    }


@pytest.fixture
def engine(folders: dict[int, Path]) -> Iterator[VllmEngine]:
    from tests.ring_rank import RingOnCpu

    found = VllmEngine(
        folders[1], slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, device=RingOnCpu()
    )
    yield found
    RingOnCpu.slow_from = None
    found.close()


class FullDevice:
    """A core whose ranks find no memory for a layer that arrives."""

    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(gpu_memory_utilization=0.97))

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[None]:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_device_without_room_for_a_layer_is_refused_by_name() -> None:
    from dora.worker.vllm_ranks import Ranks

    ranks = object.__new__(Ranks)
    ranks._core = cast(Any, FullDevice())
    with refused(Conflict, field="workers.gpu_memory_utilisation", value=0.97):
        ranks.replace_weights(["model.safetensors"], 1.0)


def addresses(engine: VllmEngine) -> dict[str, int]:
    """Of all tensors but experts, which the CPU's patch packs anew (``engine_patches/cpu/moe_experts.py``)."""
    model = engine.core.model_executor.driver_worker.worker.model_runner.get_model()
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters() if "experts" not in name}


def test_a_reload_is_exact_and_one_that_is_too_slow_leaves_no_version(
    engine: VllmEngine, folders: dict[int, Path]
) -> None:
    from tests.ring_rank import RingOnCpu

    canaries = {
        version: compute_canary(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
        for version, folder in folders.items()
    }
    first = engine.load_weights(1, folders[1], canaries[1])
    before = addresses(engine)
    engine.load_weights(2, folders[2], canaries[2])
    for slow_from in (1, 5, 9):
        RingOnCpu.slow_from = slow_from
        with refused(DeadlineExceeded, field="load_s"):
            engine.load_weights(1, folders[1], canaries[1])
        assert engine.version is None
        with refused(Conflict, field="request.version"):
            engine.add(make_request(1, SAMPLED))
    RingOnCpu.slow_from = None
    assert engine.load_weights(1, folders[1], canaries[1]) == first
    assert addresses(engine) == before
