"""Starts vLLM in this process, patched and verified, and identifies the engine."""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from blake3 import blake3
from vllm.config import KVTransferConfig, WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from dora.data.engine_args import OWNED, check_known, check_owned, identifying
from dora.engine_patches import mapped_weights, quantised, registry
from dora.errors import InvalidValue, LimitExceeded
from dora.kvtransfer.snapshot import STATE, KvLayout
from dora.weights.reference import Reference
from dora.worker.drafting.drafter import Drafter
from dora.worker.vllm.connector import SnapshotConnector
from dora.worker.vllm.device.port import Device, EngineSettings
from dora.worker.vllm.groups import groups_of, unmovable
from dora.worker.vllm.ranks import EngineRanks
from dora.worker.vllm.scheduler import HoldingScheduler

_INCIDENTAL: Final = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")  # config.json: not the model's
_WITHOUT_KERNEL: Final = {
    "MambaForCausalLM": "Mamba-1 layers",
    "JambaForCausalLM": "Mamba-1 layers",
    "KimiLinearForCausalLM": "Kimi delta attention",
    "DeepseekV32ForCausalLM": "sparse attention",
}
_RPC_FOLDER: Final = "VLLM_RPC_BASE_PATH"


class _Core(EngineCore):
    """A core whose KV-cache holds ``kv_tokens`` tokens for any model: each group of layers has separate blocks.

    A window needs one block more than its tokens, because it may begin within a block. A group of layers with a state
    has a block for each slot; kept requests have theirs at the cost of tokens. If ``kv_tokens`` is 0, it holds as many
    as vLLM finds room for.

    ``make_drafter`` is called when the weights have their memory, before vLLM measures the room that is left.
    """

    def __init__(
        self, vllm_config: Any, executor_class: Any, kv_tokens: int, make_drafter: Callable[[], Drafter | None]
    ) -> None:
        self._kv_tokens, self._make_drafter = kv_tokens, make_drafter
        super().__init__(vllm_config, executor_class, log_stats=False)

    def _initialize_kv_caches(self, vllm_config: Any) -> Any:
        register_all_kvcache_specs(vllm_config)
        specs = {name: spec for each in self.model_executor.get_kv_cache_specs() for name, spec in each.items()}
        layouts = self.model_executor.get_supported_kv_cache_layouts()
        resolve_kv_cache_layout(vllm_config, layouts, list(specs.values()))  # which groups there are depends on it
        groups = get_kv_cache_groups(vllm_config, specs)
        if self._kv_tokens:
            limited = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
            windows = sum(isinstance(group.kv_cache_spec, limited) for group in groups)
            states = sum(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
            blocks = self._kv_tokens // vllm_config.cache_config.block_size * (len(groups) - states)
            blocks += states * vllm_config.scheduler_config.max_num_seqs + windows
            vllm_config.cache_config.num_gpu_blocks_override = blocks + 1  # vLLM keeps one
        self.drafter = self._make_drafter()
        return super()._initialize_kv_caches(vllm_config)


def start(
    model: Path, settings: EngineSettings, device: Device, make_drafter: Callable[[], Drafter | None] = lambda: None
) -> EngineCore:
    """Starts an engine with random weights and patches each rank. Its ``drafter`` is that of ``make_drafter``.

    Raises InvalidValue with vLLM's reason if it refuses, and LimitExceeded if the device has too little memory.
    """
    device.check_platform(settings)
    registry.apply(device.patches())
    # torch may have been imported before the environment was set. More threads than one split a matrix product by its
    # rows, so that a request's last bits depend on its neighbours (measured: 2e-6).
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kinds = ("is_hybrid", "is_attention_free")
    if device.kind == "cpu":
        check_kernels(model)
    has_state = any(getattr(each, kind, False) for each in _architectures(model) for kind in kinds)
    try:
        vllm_config = arguments(model, settings, device, has_state=has_state).create_engine_config()
        if settings.kv_dtype and device.kind == "cpu" and vllm_config.model_config.use_mla:
            raise InvalidValue("workers.kv_dtype", settings.kv_dtype, "empty: latent attention on CPUs has no other")
        with _meeting_place():
            core = _Core(vllm_config, Executor.get_class(vllm_config), settings.kv_tokens, make_drafter)
    except torch.OutOfMemoryError as error:
        allowed = f"fewer (0: as many as fit), with memory for {settings.slots} slots beside the weights ({error})"
        raise LimitExceeded("workers.kv_tokens", settings.kv_tokens, allowed) from error
    except (ValueError, RuntimeError, AssertionError) as error:
        if settings.batch_invariant and names_batch_invariance(error):
            allowed = f"false: vLLM has this mode in no kernel for this model, dtype and block size ({error})"
            raise InvalidValue("workers.batch_invariant", True, allowed) from error
        if settings.kv_dtype and re.search(r"kv.cache", str(error), re.IGNORECASE):
            allowed = f"empty, or one that vLLM has for this model on this device ({error})"
            raise InvalidValue("workers.kv_dtype", settings.kv_dtype, allowed) from error
        if not isinstance(error, ValueError):
            raise
        raise InvalidValue("engine settings", settings, f"what vLLM takes ({error})") from error
    return core


def check_kernels(model: Path) -> None:
    """Raises InvalidValue for a model with layers that vLLM's CPU build cannot compute."""
    for architecture in _model_config(model).get("architectures") or ():
        if layers := _WITHOUT_KERNEL.get(architecture):
            raise InvalidValue("model", str(model), f"one without {layers}: vLLM has no kernel for them on a CPU")


def names_batch_invariance(error: Exception) -> bool:
    """Returns whether this is vLLM's refusal of attention backends or experts without the batch-invariant mode.

    The names of vLLM's own settings in a message (``use_batch_invariant=True``) are no reason.
    """
    return re.search(r"(?<!use.)batch.invarian", str(error), re.IGNORECASE) is not None


def arguments(model: Path, settings: EngineSettings, device: Device, *, has_state: bool = False) -> EngineArgs:
    """Returns vLLM's arguments of an engine. Raises InvalidValue for a user's that is unknown or DORA's own.

    With ``has_state`` layers keep a state, of which vLLM's prefix cache would keep several for each request.
    """
    known = [each.name for each in dataclasses.fields(EngineArgs)]
    check_known(settings.engine_args, known)
    check_owned(settings.engine_args, {**OWNED, **device.fixed_arguments})
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="dummy",  # weights arrive with their version
        dtype=settings.dtype,
        distributed_executor_backend="uni" if settings.ranks == 1 else "mp",
        tensor_parallel_size=settings.tensor_parallel,
        pipeline_parallel_size=settings.pipeline_parallel,
        worker_cls=device.worker_class,
        max_model_len=settings.max_model_len_tokens,
        max_num_seqs=settings.slots,
        # Nothing may be in flight between steps. With asynchronous scheduling the next step starts before this step's
        # tokens are known: a frozen request would have KV of one token too many, and its blocks would still be written.
        async_scheduling=False,
        enable_prefix_caching=not has_state,
        logprobs_mode="raw_logprobs",
        scheduler_cls=HoldingScheduler,
        kv_transfer_config=KVTransferConfig(
            kv_connector=SnapshotConnector.__name__,
            kv_connector_module_path=SnapshotConnector.__module__,
            kv_role="kv_consumer",
        ),
        hf_overrides=_overrides(settings),
        kv_cache_dtype=settings.kv_dtype or "auto",
        weight_transfer_config=WeightTransferConfig(backend=mapped_weights.BACKEND),
        disable_log_stats=True,
        **{**device.arguments(settings), **settings.engine_args},
    )


@contextlib.contextmanager
def _meeting_place() -> Iterator[None]:
    """Yields a folder for files and sockets of the ranks' rendezvous, which vLLM would leave in the system's."""
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


def _overrides(settings: EngineSettings) -> dict[str, Any]:
    quantisation = quantised.settings(settings.quantisation)
    return {} if quantisation is None else {"quantization_config": quantisation}


def _architectures(model: Path) -> list[Any]:
    """Imports the model's classes in this process, which needs them in any case, and returns them.

    vLLM would first import it in a separate process, to keep CUDA out of one that may fork. At the first start on a
    machine that costs each engine about ten seconds of CPU time. Here engine and registry share a process.
    """
    found = []
    for architecture in _model_config(model).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            found.append(known.load_model_cls())
            ModelRegistry.register_model(architecture, found[-1])
    return found


def why_unmovable(core: EngineCore) -> str:
    """Returns why no request can move with its KV, or an empty text if each can."""
    ranks = core.vllm_config.parallel_config.tensor_parallel_size
    kv_heads = core.vllm_config.model_config.get_total_num_kv_heads()
    return unmovable(core.scheduler.kv_cache_config, block_tokens_of(core), ranks, kv_heads)


def takes_ahead(core: EngineCore) -> bool:
    """Returns whether blocks can be written before their request arrives: vLLM treats them as a cached prefix."""
    groups = groups_of(core.scheduler.kv_cache_config)
    has_one = len(groups) == 1 and not groups[0].window_tokens and not why_unmovable(core)
    return has_one and bool(core.vllm_config.cache_config.enable_prefix_caching)


def block_tokens_of(core: EngineCore) -> int:
    """Returns the tokens of a block: as configured, or as the model's attention requires."""
    return int(core.vllm_config.cache_config.block_size)


def kv_tokens_of(core: EngineCore, requested: int) -> int:
    """Returns the tokens of the KV-cache's whole blocks. If ``requested`` is 0, vLLM has chosen them."""
    block_tokens = block_tokens_of(core)
    if requested:
        return requested // block_tokens * block_tokens
    config, groups = core.scheduler.kv_cache_config, groups_of(core.scheduler.kv_cache_config)
    states = sum(group.window_tokens == STATE for group in groups)
    blocks = int(config.num_blocks) - 1 - states * int(core.vllm_config.scheduler_config.max_num_seqs)
    return max(0, blocks) // max(1, len(groups) - states) * block_tokens


def layout_of(core: EngineCore, ranks: EngineRanks, reference: Reference, settings: EngineSettings) -> KvLayout:
    """Returns the layout by which engines decide whether KV of one is valid in, or convertible for, the other.

    The fingerprint has only properties that no conversion can change. Workers with other ranks or block sizes can
    belong to one service.
    """
    block_tokens, layers = block_tokens_of(core), ranks.store.layers
    backend = ",".join([*ranks.kinds, *ranks.store.orders, f"vllm-{vllm.__version__}"])
    whole_bytes: Counter[tuple[str, int]] = Counter()
    for name, size in layers:
        window_tokens = ranks.layers[name].window_tokens
        whole_bytes[ranks.layers[name].name, window_tokens] += size * (block_tokens if window_tokens == STATE else 1)
    identity: dict[str, Any] = {
        "config": _model_config(reference.folder),
        "tensors": [(tensor.name, tensor.dtype, tensor.shape) for tensor in reference.tensors],
        "kv": [backend, [(name, size / block_tokens, window) for (name, window), size in sorted(whole_bytes.items())]],
        "dtype": settings.dtype,
    }
    if settings.quantisation:
        identity["quantisation"] = settings.quantisation
    if settings.kv_dtype:
        identity["kv_dtype"] = settings.kv_dtype
    if settings.batch_invariant:
        identity["batch_invariant"] = True
    if chosen := identifying(settings.engine_args):
        identity["engine_args"] = chosen
    windows = tuple(layer.window_tokens for layer in ranks.layers.values())
    return KvLayout(
        fingerprint=blake3(json.dumps(identity, sort_keys=True).encode()).hexdigest(32),
        backend=backend,
        dtype=settings.dtype,
        block_tokens=block_tokens,
        layers=layers,
        shards=ranks.shards,
        windows=windows if any(windows) else (),
        interiors=tuple(layer.interior for layer in ranks.layers.values()),
    )


def _model_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in config.items() if name not in _INCIDENTAL}
