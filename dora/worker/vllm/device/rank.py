"""One rank of an engine beyond vLLM's own work, in a separate process if the engine has several.

The engine calls these methods by name, through vLLM's ``collective_rpc``. Only small values travel this way: the
engine's process has opened the memory of the KV, and weights are read from files.
"""

import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group

from dora.data.types import RoutingShape
from dora.engine_patches import registry
from dora.engine_patches.mapped_weights import Source
from dora.engine_patches.patch import PatchFailed
from dora.errors import DeadlineExceeded
from dora.system.process_tree import die_with
from dora.weights.image import ImageRefused, noted
from dora.worker.vllm import environment as vllm_environment
from dora.worker.vllm import groups as vllm_groups
from dora.worker.vllm import routing as vllm_routing
from dora.worker.vllm.blocks import LayerBlocks, shard_of, span_of
from dora.worker.vllm.connector import SnapshotConnector
from dora.worker.vllm.device.port import Device

log = logging.getLogger("dora.worker")

OUT_OF_MEMORY: Final = "device memory"


@dataclass(frozen=True, slots=True)
class RankKv:
    """The place of one rank's KV.

    It is an unnamed file, open in the rank's process as ``descriptor``, or on a device, where ``handles`` has what
    ``Device.opened`` needs, by layer. With neither it lies in the engine's own process.
    """

    pid: int
    descriptor: int  # -1: none
    size_bytes: int
    layers: tuple[LayerBlocks, ...]
    kinds: frozenset[str]  # attention backends and instruction sets of its layers: what shapes the inside of a block
    handles: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankRouting:
    """The place of one rank's routed experts."""

    kv: RankKv  # one layer more for each that has experts
    found: tuple[tuple[int, int], ...]  # top_k and experts of each of these
    refusal: str = ""  # why vLLM cannot say it; empty: it can


class Rank:
    """A mixin over a device's class of vLLM's workers: patches it before it creates its model runner."""

    device_port: ClassVar[Device]
    device: Any
    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any
    _files: Source
    rank: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with(parent.pid)
            vllm_environment.prepare(self.device_port.environment)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one host: nobody else can reach them
        registry.apply(self.device_port.patches())
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._files = self.device_port.weight_source(self.device, self.vllm_config.parallel_config.world_size)

    def unproven_patch(self) -> str:
        """Returns why this rank must not serve, such as a patch without effect, or an empty text."""
        try:
            registry.verify(self.model_runner, self.device_port.patches())
        except PatchFailed as error:
            return str(error)
        return self.device_port.check_runner(self.model_runner)

    def shown_kv(self) -> RankKv:
        connector = get_kv_transfer_group()
        assert isinstance(connector, SnapshotConnector)
        config, memory = connector.kv_cache_config, connector.memory
        context, specs = self.vllm_config.compilation_config.static_forward_context, vllm_groups.layer_specs(config)
        kinds = {"/".join(vllm_groups.kind_of(context[name])) for name in specs}
        layers = tuple(
            LayerBlocks(
                name,
                number,
                group.window_tokens,
                vllm_groups.interior_of(specs[name], context[name], connector.tensors[name]),
                span_of(connector.tensors[name], config.num_blocks),
            )
            for number, group in enumerate(vllm_groups.groups_of(config))
            for name in group.layers
        )
        handles = {}
        if not connector.is_alone and memory.descriptor < 0:
            handles = {name: self.device_port.handle(tensor) for name, tensor in connector.tensors.items()}
        return RankKv(os.getpid(), memory.descriptor, memory.size_bytes, layers, frozenset(kinds), handles)

    def keep_routing(self, shape: RoutingShape, shards: int) -> RankRouting:
        """Starts to record each token's experts beside its KV. ``shards`` are the shards of a layer's KV."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, SnapshotConnector)
        tensor_parallel = self.vllm_config.parallel_config.tensor_parallel_size
        try:
            routed = vllm_routing.bind(
                self.model_runner.get_model(),
                connector.kv_cache_config,
                shape,
                shard_of(self.rank, tensor_parallel, shards),
                shards,
            )
        except ValueError as error:  # vLLM has no hook for these routers
            return RankRouting(RankKv(os.getpid(), -1, 0, (), frozenset()), (), str(error))
        kv = RankKv(os.getpid(), routed.descriptor, routed.size_bytes, routed.layers, frozenset())
        return RankRouting(kv, routed.found)

    def replace_weights(
        self, files: Sequence[str], limit_s: float, changed: str = "", token_ids: Sequence[int] = ()
    ) -> tuple[str, Any, str] | None:
        """Loads this rank's part of verified files into the running model through vLLM's weight transfer.

        ``limit_s`` is the time for their bytes. ``changed`` and ``token_ids`` name tensors to change
        (``dora.engine_patches.reload_proof``). Returns the parts of a DeadlineExceeded, which another process cannot
        raise here, or ``OUT_OF_MEMORY`` as its field, or None if the weights are loaded.
        """
        found = {"files": list(files), "limit_s": limit_s, "changed": changed, "token_ids": list(token_ids)}
        began_s = time.monotonic()
        if files and not changed and self._is_loaded_from_image(found):
            return None
        found["limit_s"] = limit_s - (time.monotonic() - began_s)
        return self._load(self._files, found)

    def _is_loaded_from_image(self, found: dict[str, Any]) -> bool:
        """Loads a version from its image in the trainer's memory. Returns False if it has none, or refuses it."""
        try:
            with noted(Path(found["files"][0]).parent) as note:
                source = self.device_port.image_source(note, self.device) if note is not None else None
                if source is None:
                    return False
                late = self._load(source, found)
        except ImageRefused as refused:
            late = (refused.field, refused.value, refused.allowed)
        if late is not None:
            log.warning("weights are read from the file, not from the trainer's memory: %s = %s; allowed: %s", *late)
        return late is None

    def _load(self, source: Source, found: dict[str, Any]) -> tuple[str, Any, str] | None:
        self.weight_transfer_engine.source = source
        self.start_weight_update()  # type: ignore[attr-defined]
        try:
            self.update_weights(found)  # type: ignore[attr-defined]
        except DeadlineExceeded as error:
            return error.field, error.value, error.allowed
        except torch.OutOfMemoryError as error:
            return OUT_OF_MEMORY, self.rank, str(error)
        self.finish_weight_update()  # type: ignore[attr-defined]
        with set_current_vllm_config(self.vllm_config):
            registry.after_reload(self.model_runner.get_model(), self.device_port.patches())
        return None
