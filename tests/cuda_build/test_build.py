"""Imports, classes, signatures and configuration of DORA's engine on vLLM's CUDA build."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dora.data.limits import DRAFT_TOKENS_MAX
from dora.errors import InvalidValue
from dora.system.environment import BATCH_INVARIANT
from dora.worker.vllm.device.cuda import CHUNK_TOKENS, Cuda
from dora.worker.vllm.device.port import EngineSettings
from tests.refusals import refused

SETTINGS = EngineSettings(slots=16, kv_tokens=0, block_tokens=0, max_model_len_tokens=512, dtype="bfloat16")
DEVICE = Cuda()
REPLACED = ("vllm.v1.worker.cpu", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")


def config_of(model: Path, settings: EngineSettings = SETTINGS) -> Any:
    from dora.worker.vllm import core as vllm_core

    return vllm_core.arguments(model, settings, DEVICE).create_engine_config()


def test_the_build_is_the_one_for_cuda_and_its_platform_is_asked() -> None:
    import vllm
    from vllm.platforms import current_platform

    assert "cpu" not in vllm.__version__ and current_platform.device_type == "cuda"
    DEVICE.check_platform(SETTINGS)


SPLITS = [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2}]


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_are_refused_by_name_until_this_machine_has_a_proof(
    split: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora.host.proof import write_proof

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = replace(SETTINGS, **split)
    name, *_ = split
    with refused(InvalidValue, field=f"workers.{name}", value=2):
        DEVICE.check_platform(settings)
    Cuda(proves_ranks=True).check_platform(settings)
    write_proof("ranks", {})
    DEVICE.check_platform(settings)


def test_stages_of_the_builds_runner_take_tokens_from_a_queue_that_is_as_long_as_they_are_many() -> None:
    """``stages_in_turn`` replaces the queue."""
    from vllm.v1.worker.gpu import pp_utils

    assert "deque([None] * ring_depth)" in inspect.getsource(pp_utils.PPHandler)


def test_drafts_are_verified_where_the_builds_runner_samples() -> None:
    """``own_noise_v2`` wraps these, and gives them drafts and rows."""
    from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    assert [*inspect.signature(Sampler.__call__).parameters] == ["self", "logits", "input_batch"]
    assert [*inspect.signature(GPUModelRunner.prepare_inputs).parameters][:2] == ["self", "scheduler_output"]
    assert [*inspect.signature(get_num_sampled_and_rejected).parameters] == [
        "num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len",
    ]  # fmt: skip
    fields = {"input_ids", "logits_indices", "cu_num_logits", "cu_num_logits_np", "idx_mapping", "num_draft_tokens"}
    assert fields <= InputBatch.__dataclass_fields__.keys()
    assert {"sampled_token_ids", "num_sampled", "num_rejected"} <= SamplerOutput.__dataclass_fields__.keys()
    sampling = inspect.getsource(GPUModelRunner.sample)
    assert "num_draft_tokens == 0 or self.rejection_sampler is None" in sampling
    assert "self.req_states.draft_tokens" in inspect.getsource(GPUModelRunner.prepare_inputs)


def test_a_draft_model_samples_with_the_noise_of_the_builds_sampler() -> None:
    """By the position of the token before; its own speculators would salt it."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    parameters = [*inspect.signature(gumbel_sample).parameters]
    assert parameters[:7] == [
        "logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting",
    ]  # fmt: skip
    assert "use_fp64" in parameters
    assert "pos = input_batch.positions[input_batch.logits_indices]" in inspect.getsource(Sampler.__call__)
    assert "is_drafting=False" in inspect.getsource(Sampler._sample_random)


@pytest.mark.parametrize("split", SPLITS)
def test_vllm_takes_the_arguments_of_an_engine_of_several_ranks(model: Path, split: dict[str, int]) -> None:
    config = config_of(model, replace(SETTINGS, **split))
    parallel = config.parallel_config
    assert parallel.tensor_parallel_size == split.get("tensor_parallel", 1)
    assert parallel.pipeline_parallel_size == split.get("pipeline_parallel", 1)
    assert parallel.distributed_executor_backend == "mp" and parallel.worker_cls == Cuda.worker_class
    assert config.use_v2_model_runner and not config.scheduler_config.async_scheduling


def test_the_kv_of_a_rank_is_allocated_as_its_memory_expects() -> None:
    """On a device by torch's own allocation, which CUDA IPC can share."""
    from vllm.v1.worker import gpu_worker, utils

    assert "torch.zeros(buf_size, dtype=torch.int8, device=device)" in inspect.getsource(utils)
    assert "get_mem_pool_context" in inspect.getsource(gpu_worker.Worker)


def test_a_handle_is_what_torch_opens() -> None:
    """``reduce_tensor`` needs a GPU; its result and the argument list of its counterpart are read."""
    from torch.multiprocessing import reductions

    source = inspect.getsource(reductions.reduce_tensor)
    names = [*inspect.signature(reductions.rebuild_cuda_tensor).parameters]
    assert "rebuild_cuda_tensor," in source and names[0] == "tensor_cls" and "storage_handle" in names


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_kv_is_resharded_only_where_heads_lie_in_a_row(layout: str) -> None:
    """Two ranks of one head each have the blocks of one rank of both, cut between the heads."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from dora.kvtransfer.snapshot import UNKNOWN
    from dora.worker.copying.cuda_blocks import DeviceStore
    from dora.worker.vllm.groups import interior_on_device

    blocks, names, chosen = 4, ["layer.0", "layer.1"], KVCacheLayout[layout]

    def views(heads: int) -> tuple[Any, list[torch.Tensor]]:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)
        strides = compute_layout_strides(spec, blocks, len(names), chosen)
        raw = torch.zeros(len(names) * blocks * spec.page_size_bytes, dtype=torch.int8)
        placed = KVCacheTensor(size=len(raw), layers=names, offset=0, layer_stride=strides[0], block_stride=strides[1])
        return spec, create_kv_cache_views(raw, spec, blocks, chosen, placed, None)

    def shown(tensors: list[torch.Tensor]) -> dict[str, Any]:
        store = DeviceStore(dict(zip(names, tensors, strict=True)), dict.fromkeys(names, 0), blocks)
        return {name: np.concatenate(pieces) for name, pieces in store.show([range(blocks)]).items()}

    def orders(tensors: list[torch.Tensor]) -> tuple[str, ...]:
        return DeviceStore({"": tensors[0]}, {"": 0}, blocks).orders

    spec, whole = views(2)
    interior = interior_on_device(spec, whole[0])
    assert interior == ((2, ()) if chosen.name.index("H") < chosen.name.index("N") else UNKNOWN)
    parts = []
    for head in range(2):
        spec, part = views(1)
        assert interior_on_device(spec, part[0])[0] == 1
        for ours, theirs in zip(part, whole, strict=True):
            ours.copy_(torch.randn(ours.shape))
            theirs[:, head : head + 1] = ours
        parts.append(shown(part))
        if interior != UNKNOWN:  # the order is part of the fingerprint
            assert orders(part) == orders(whole)
    joined = shown(whole)
    for name in names:
        is_cut = np.array_equal(joined[name], np.concatenate([part[name] for part in parts], axis=1))
        assert is_cut == (interior != UNKNOWN)


def test_no_module_of_the_engine_imports_vllms_cpu_modules() -> None:
    from dora.worker.copying import weight_sources
    from dora.worker.vllm import core as vllm_core
    from dora.worker.vllm import engine as vllm_engine
    from dora.worker.vllm import ranks as vllm_ranks
    from dora.worker.vllm import requests as vllm_requests
    from dora.worker.vllm import tier as vllm_tier
    from dora.worker.vllm import weights as vllm_weights
    from dora.worker.vllm.device import cuda_rank

    modules = (vllm_core, vllm_engine, vllm_ranks, vllm_requests, vllm_tier, vllm_weights, weight_sources, cuda_rank)
    assert all(modules)
    assert not [name for name in sys.modules if name.startswith(REPLACED)]
    assert torch.cuda.Stream.__module__.startswith("torch.") and torch.cuda.Event.__module__.startswith("torch.")
    assert inspect.ismethoddescriptor(torch.Tensor.pin_memory)


def test_vllm_takes_the_engines_arguments_as_they_are_meant(model: Path) -> None:
    config = config_of(model)
    assert config.use_v2_model_runner
    assert str(config.compilation_config.cudagraph_mode).endswith("FULL_AND_PIECEWISE")
    assert not config.model_config.enforce_eager and str(config.model_config.dtype) == "torch.bfloat16"
    assert config.scheduler_config.enable_chunked_prefill and not config.scheduler_config.async_scheduling
    assert config.scheduler_config.max_num_batched_tokens == CHUNK_TOKENS
    assert config.cache_config.enable_prefix_caching and config.cache_config.block_size > 0
    assert config.cache_config.gpu_memory_utilization == SETTINGS.memory_share
    assert config.parallel_config.worker_cls == Cuda.worker_class
    assert config.model_config.logprobs_mode == "raw_logprobs"


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({"enforce_eager": True}, lambda config: config.model_config.enforce_eager),
        ({"max_num_batched_tokens": 2048}, lambda config: config.scheduler_config.max_num_batched_tokens == 2048),
        ({"attention_backend": "TRITON_ATTN"}, lambda config: config.attention_config.backend.name == "TRITON_ATTN"),
        (
            {"enable_expert_parallel": True},
            lambda config: config.parallel_config.enable_expert_parallel and config.use_v2_model_runner,
        ),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_an_argument_of_the_user_is_taken(tmp_path: Path, chosen: dict[str, Any], found: Callable[[Any], bool]) -> None:
    from dora.models.tiny import make_tiny

    experts = make_tiny("moe", tmp_path / "moe", seed=1)
    split = 2 if "enable_expert_parallel" in chosen else 1
    assert found(config_of(experts, replace(SETTINGS, engine_args=chosen, tensor_parallel=split)))


@pytest.mark.parametrize("quantisation", ["int8", "fp8"])
def test_projections_in_low_precision_get_the_scheme_that_is_meant(model: Path, quantisation: str) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    from dora.engine_patches.quantised import kind_of

    config = config_of(model, replace(SETTINGS, quantisation=quantisation, kv_dtype="fp8"))
    assert config.cache_config.cache_dtype == "fp8" and kind_of(config.model_config.hf_config) == quantisation
    found = config.quant_config
    assert isinstance(found, CompressedTensorsConfig)
    (group,) = found.target_scheme_map.values()
    parts = group["weights"], group["input_activations"]
    assert found._is_fp8_w8a8(*parts) == (quantisation == "fp8")
    assert found._is_dynamic_token_w8a8(*parts), "int8, where it is not fp8, which vLLM asks first"


def test_an_argument_that_the_build_lacks_is_refused_with_the_one_that_was_meant(model: Path) -> None:
    from dora.data.engine_args import IDENTIFYING, OWNED, installed_arguments

    assert {*OWNED, *IDENTIFYING} <= {*installed_arguments()}
    with refused(InvalidValue, field="workers.engine_args", value="enforce_eagr", names=("enforce_eager",)):
        config_of(model, replace(SETTINGS, engine_args={"enforce_eagr": True}))
    with refused(InvalidValue, field="workers.engine_args", value="async_scheduling"):
        config_of(model, replace(SETTINGS, engine_args={"async_scheduling": True}))


def test_a_block_size_of_the_user_is_kept(model: Path) -> None:
    assert config_of(model, replace(SETTINGS, block_tokens=64)).cache_config.block_size == 64


def test_the_rank_is_vllms_worker_with_what_the_engine_calls() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from dora.worker.vllm.device.cuda_rank import CudaRank

    assert issubclass(CudaRank, Worker) and CudaRank.__mro__[1].__name__ == "Rank"
    for name in ("start_weight_update", "update_weights", "finish_weight_update", "unproven_patch", "shown_kv"):
        assert callable(getattr(CudaRank, name))


def test_the_runner_of_the_build_takes_a_requests_outputs_with_it() -> None:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert "prefill_token_ids" in {*NewRequestData.__dataclass_fields__}
    assert "prefill_token_ids" in inspect.getsource(GPUModelRunner.add_requests)


def overridden(kind: type, base: type) -> list[str]:
    return [name for name, value in vars(kind).items() if inspect.isfunction(value) and hasattr(base, name)]


def test_what_is_overridden_is_called_as_vllm_calls_it() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.scheduler import Scheduler

    from dora.worker.vllm.connector import SnapshotConnector
    from dora.worker.vllm.scheduler import HoldingScheduler

    assert not SnapshotConnector.__abstractmethods__
    for kind, base in ((SnapshotConnector, KVConnectorBase_V1), (HoldingScheduler, Scheduler)):
        names = [name for name in overridden(kind, base) if name != "__init__"]
        assert names
        for name in names:
            ours, theirs = (inspect.signature(getattr(each, name)).parameters for each in (kind, base))
            if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in ours.values()):
                continue  # passed on as it came
            given = [each for each in theirs if theirs[each].kind is not inspect.Parameter.VAR_KEYWORD]
            assert [each for each in ours if ours[each].kind is not inspect.Parameter.VAR_KEYWORD] == given, name


def test_the_engine_finds_each_field_that_it_reads() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import KVCacheConfig

    fields = {*KVCacheConfig.__dataclass_fields__}
    assert {"num_blocks", "kv_cache_groups"} <= fields
    for kind, names in {
        EngineCore: ("step", "add_request", "abort_requests", "preprocess_add_request", "reset_prefix_cache"),
        Scheduler: ("schedule", "add_request", "finish_requests", "get_num_unfinished_requests"),
        KVCacheManager: ("get_block_ids",),
        BlockPool: ("get_new_blocks", "free_blocks", "touch", "get_num_free_blocks"),
    }.items():
        for name in names:
            assert callable(getattr(kind, name)), f"{kind.__name__}.{name}"


def test_every_patch_of_the_device_takes_effect() -> None:
    import vllm
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from dora.engine_patches import registry

    for patch in DEVICE.patches():
        patch.check_version(vllm.__version__)
    registry.apply(DEVICE.patches())
    states = SimpleNamespace(draft_tokens=torch.zeros(1, DRAFT_TOKENS_MAX))
    runner = SimpleNamespace(pp_handler=None, sampler=object.__new__(Sampler), req_states=states)
    registry.verify(runner, DEVICE.patches())


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("kernel_block_tokens", [None, 16])
def test_kv_as_the_build_lays_it_out_is_blocks_that_can_be_copied(layout: str, kernel_block_tokens: int | None) -> None:
    """vLLM's own function makes the views of two layers in one buffer; the store moves each block to its copy."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from dora.worker.copying.cuda_blocks import DeviceStore

    blocks, names = 6, ["layer.0", "layer.1"]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    chosen = KVCacheLayout[layout]
    strides = compute_layout_strides(spec, blocks, len(names), chosen)
    raw = torch.randint(0, 127, (len(names) * blocks * spec.page_size_bytes,), dtype=torch.int8)
    placed = KVCacheTensor(size=len(raw), layers=names, offset=0, layer_stride=strides[0], block_stride=strides[1])
    if kernel_block_tokens is not None and not chosen.is_block_compact:
        pytest.skip("vLLM refuses kernel blocks in this layout")
    try:
        views = create_kv_cache_views(raw, spec, blocks, chosen, placed, kernel_block_tokens)
    except ValueError:
        assert kernel_block_tokens is not None
        return
    groups = dict.fromkeys(names, 0)
    store = DeviceStore(dict(zip(names, views, strict=True)), groups, blocks)
    before = [view.clone() for view in views]
    store.write([[0, 1]], store.show([[4, 5]]))
    ratio = len(views[0]) // blocks
    for view, was in zip(views, before, strict=True):
        assert torch.equal(view[: 2 * ratio], was[4 * ratio : 6 * ratio])
        assert torch.equal(view[2 * ratio :], was[2 * ratio :])


def test_the_batch_invariant_mode_chooses_a_backend_that_has_it_or_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    from dora.worker.vllm.core import names_batch_invariance

    monkeypatch.setenv(BATCH_INVARIANT, "1")
    DEVICE.check_platform(replace(SETTINGS, batch_invariant=True))
    config = config_of(model, replace(SETTINGS, batch_invariant=True))
    with set_current_vllm_config(config):
        for dtype in (torch.bfloat16, torch.float32):
            chosen = get_attn_backend(64, dtype, "auto")
            assert chosen.supports_batch_invariance() and chosen.get_name() in {"FLASH_ATTN", "TRITON_ATTN"}
        with pytest.raises(ValueError) as caught:
            get_attn_backend(576, torch.bfloat16, "auto", use_mla=True, use_sparse=True)
    assert names_batch_invariance(caught.value)


@pytest.mark.parametrize("kind", ["Stream", "Event"])
def test_a_process_whose_torch_was_replaced_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dora.worker.copying.streams import CudaStreams

    class Replaced:
        pass

    monkeypatch.setattr(torch.cuda, kind, Replaced)
    if kind == "Stream":
        with refused(RuntimeError, names=("torch.cuda.Stream",)):
            CudaStreams(torch.device("cuda"))


def test_too_large_a_kv_cache_is_refused_by_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM runs out of memory while it allocates, which is no ValueError."""
    from dora.errors import LimitExceeded
    from dora.worker.vllm import core as vllm_core

    def core(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")

    monkeypatch.setattr(vllm_core, "_Core", core)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with refused(LimitExceeded, field="workers.kv_tokens", value=1 << 31, names=["80.00"]):
        vllm_core.start(model, replace(SETTINGS, kv_tokens=1 << 31), DEVICE)


def test_triton_reads_the_precision_of_float32_where_the_device_sets_it() -> None:
    from triton import knobs

    assert knobs.language.fp32_default == Cuda.environment["TRITON_F32_DEFAULT"] == "ieee"


def test_the_build_joins_a_step_that_loads_no_kv_after_its_forward_pass() -> None:
    """So the scheduler joins by itself, within the step (``HoldingScheduler.schedule``)."""
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    source = inspect.getsource(ActiveKVConnector.pre_forward)
    assert "has_sync_kv_loads" in source
