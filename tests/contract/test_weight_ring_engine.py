"""vLLM's own reload, with weights that come through the ring of a GPU, or from an image in the trainer's memory."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dora.client.device_image import Images
from dora.client.taking import take_tensors
from dora.errors import Conflict, DeadlineExceeded
from dora.models.tiny import TinyKind, make_tiny
from dora.weights.canary import compute_canary
from dora.weights.files import header_of
from dora.weights.reference import WEIGHTS_FILE
from dora.weights.store import WeightStore
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests import host_images
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


@pytest.fixture(scope="module")
def engine(folders: dict[int, Path]) -> Iterator[VllmEngine]:
    from tests.ring_rank import RingOnCpu

    found = VllmEngine(
        folders[1],
        EngineSettings(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS),
        device=RingOnCpu(),
    )
    yield found
    RingOnCpu.slow_from = None
    found.close()


class FullDevice:
    """A core of two ranks, the second of which finds no memory for a layer that arrives. Their answers are plain."""

    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(gpu_memory_utilization=0.97))

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        from dora.worker.vllm.device.rank import Rank

        def full(found: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        rank = cast(Any, object.__new__(Rank))
        rank.rank, rank._files, rank.weight_transfer_engine = 1, None, SimpleNamespace()
        rank.start_weight_update, rank.update_weights = lambda: None, full
        return [None, json.loads(json.dumps(rank.replace_weights((), *args[1:])))]


def test_a_device_without_room_for_a_layer_is_refused_by_name() -> None:
    from dora.worker.vllm.ranks import EngineRanks

    ranks = object.__new__(EngineRanks)
    ranks._core = cast(Any, FullDevice())
    with refused(Conflict, field="workers.gpu_memory_utilisation", value=0.97, names=("rank 1",)):
        ranks.replace_weights(["model.safetensors"], 1.0)


def addresses(engine: VllmEngine) -> dict[str, int]:
    """Returns the addresses of all tensors but experts, which the CPU's patch packs anew (``cpu/moe_experts.py``)."""
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


def test_a_version_is_read_from_its_image_and_from_its_file_if_the_image_is_refused(
    engine: VllmEngine, folders: dict[int, Path], tmp_path: Path
) -> None:
    from tests.ring_rank import RingOnCpu

    store, images = WeightStore(tmp_path, folders[1]), Images(host_images.made)
    expected = {version: engine.load_weights(version, folder, None) for version, folder in folders.items()}
    read = RingOnCpu.images_read

    def published(version: int) -> Path:
        tensors = load_file(folders[version] / WEIGHTS_FILE)
        headers = {name: header_of(name, tensor) for name, tensor in tensors.items()}
        incoming = store.begin(1, version)
        with closing(take_tensors(tensors.items(), headers, incoming, WEIGHTS_FILE, images=images)) as taken:
            taken.examine()
            taken.bring(incoming)
            return store.publish(1, version, taken.identities, None)

    before = addresses(engine)
    first = published(1)
    assert engine.load_weights(1, first, expected[1]) == expected[1]
    assert RingOnCpu.images_read == read + 1
    second = published(2)  # the image of version 1 is overwritten
    assert engine.load_weights(2, second, expected[2]) == expected[2]
    assert engine.load_weights(1, first, expected[1]) == expected[1]
    assert RingOnCpu.images_read == read + 2
    memory = host_images.MEMORY[max(host_images.MEMORY)]
    for at in (0, len(memory) // 2, len(memory) - 1):  # found after some layers were loaded
        memory[at] ^= 1
        assert engine.load_weights(2, second, expected[2]) == expected[2]
        memory[at] ^= 1
    assert RingOnCpu.images_read == read + 2
    del host_images.MEMORY[max(host_images.MEMORY)]  # its trainer has ended
    assert engine.load_weights(2, second, expected[2]) == expected[2]
    assert addresses(engine) == before
    images.close()
