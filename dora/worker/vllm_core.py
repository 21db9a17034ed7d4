"""Starting vLLM in this process, patched and verified, and what identifies the engine that came up."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from blake3 import blake3
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from dora.engine_patches import registry
from dora.errors import InvalidValue
from dora.kvtransfer.snapshot import KvLayout
from dora.weights.reference import Reference
from dora.worker.vllm_connector import SnapshotConnector
from dora.worker.vllm_rank import WORKER_CLASS
from dora.worker.vllm_ranks import Ranks
from dora.worker.vllm_scheduler import HoldingScheduler

_INCIDENTAL: Final = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")  # config.json: not the model's
_RPC_FOLDER: Final = "VLLM_RPC_BASE_PATH"
_PROFILE_BYTES: Final = 1 << 20  # vLLM wants a size here; the number of blocks overrides it


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one engine is made."""

    slots: int
    kv_tokens: int
    block_tokens: int
    max_model_len_tokens: int
    dtype: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


def start(model: Path, settings: EngineSettings) -> EngineCore:
    """An engine with random weights, each rank patched. Raises InvalidValue for what vLLM refuses: it says why."""
    registry.apply()
    # torch may have been imported before the environment was set. More threads than one split a matrix product by its
    # rows, so that a request's last bits depend on its neighbours (measured: 2e-6).
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    blocks = settings.kv_tokens // settings.block_tokens
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",  # weights arrive with their version
        dtype=settings.dtype,
        enforce_eager=True,
        distributed_executor_backend="uni" if settings.ranks == 1 else "mp",
        tensor_parallel_size=settings.tensor_parallel,
        pipeline_parallel_size=settings.pipeline_parallel,
        worker_cls=WORKER_CLASS,
        max_model_len=settings.max_model_len_tokens,
        max_num_seqs=settings.slots,
        # Chunked prefill breaks seeded requests on CPU, so a step must have room for the longest prompt beside decodes.
        enable_chunked_prefill=False,
        max_num_batched_tokens=settings.max_model_len_tokens + settings.slots,
        async_scheduling=False,  # between steps nothing may be in flight
        enable_prefix_caching=True,
        block_size=settings.block_tokens,
        kv_cache_memory_bytes=_PROFILE_BYTES,
        num_gpu_blocks_override=blocks + 1,  # vLLM keeps one block for itself
        logprobs_mode="raw_logprobs",
        scheduler_cls=HoldingScheduler,
        kv_transfer_config=KVTransferConfig(
            kv_connector=SnapshotConnector.__name__,
            kv_connector_module_path=SnapshotConnector.__module__,
            kv_role="kv_consumer",
        ),
        disable_log_stats=True,
    )
    _import_architectures(model)
    try:
        vllm_config = arguments.create_engine_config()
        with _meeting_place():
            core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    except ValueError as error:
        raise InvalidValue("engine settings", settings, f"what vLLM takes ({error})") from error
    return core


@contextlib.contextmanager
def _meeting_place() -> Iterator[None]:
    """A folder for the files and sockets by which ranks find each other: none is needed once they have.

    vLLM would leave them in the folder for temporary files.
    """
    before, rpc_before = tempfile.tempdir, os.environ.get(_RPC_FOLDER)
    with tempfile.TemporaryDirectory(prefix="dora-ranks-") as folder:
        tempfile.tempdir = os.environ[_RPC_FOLDER] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            if rpc_before is None:
                del os.environ[_RPC_FOLDER]
            else:
                os.environ[_RPC_FOLDER] = rpc_before


def _import_architectures(model: Path) -> None:
    """Imports the model's class in this process, where it is needed in any case.

    vLLM would first import it in a process of its own, to keep CUDA out of one that may fork: at the first start on a
    machine that costs each engine some ten seconds of a core. Here engine and registry share a process.
    """
    for architecture in _model_config(model).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


def is_movable(core: EngineCore) -> bool:
    """Whether a request's whole state is its tokens and one list of blocks: full attention, one group."""
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def layout_of(ranks: Ranks, reference: Reference, settings: EngineSettings) -> KvLayout:
    """What must agree for this engine's KV to mean the same in another one."""
    layers, shards = ranks.store.layers, ranks.shards
    backend = f"{ranks.backend},vllm-{vllm.__version__}"
    identity = {
        "config": _model_config(reference.folder),
        "tensors": [(tensor.name, tensor.dtype, tensor.shape) for tensor in reference.tensors],
        "kv": [backend, settings.block_tokens, ranks.whole_layers()],  # however many ranks share it
        "dtype": settings.dtype,
    }
    fingerprint = blake3(json.dumps(identity, sort_keys=True).encode()).hexdigest(32)
    return KvLayout(fingerprint, backend, settings.dtype, settings.block_tokens, layers, shards, ranks.heads())


def _model_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in config.items() if name not in _INCIDENTAL}
