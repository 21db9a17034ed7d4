"""One rank of an engine: what it does beside vLLM's own work, in its own process where the engine has several.

The engine calls these methods by name, through vLLM's ``collective_rpc``. Small values alone travel that way: KV lies
in memory that the engine's process has mapped, and weights are read from their files.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker

from dora.engine_patches import registry
from dora.engine_patches.patch import PatchFailed
from dora.worker import vllm_environment, vllm_groups, vllm_weights
from dora.worker.vllm_blocks import LayerBlocks, span_of
from dora.worker.vllm_connector import SnapshotConnector

WORKER_CLASS: Final = f"{__name__}.CpuRank"  # as vLLM's ``worker_cls`` names it
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class RankKv:
    """Where the KV of one rank lies: in a file without a name, open in its process as ``descriptor``."""

    pid: int
    descriptor: int  # -1: in this process's own memory
    size_bytes: int
    layers: tuple[LayerBlocks, ...]
    kinds: frozenset[str]  # attention backends and instruction sets of its layers: what shapes the inside of a block


class CpuRank(CPUWorker):
    """vLLM's CPU worker, patched before it makes its model runner."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if multiprocessing.parent_process() is not None:
            _end_with_parent()
            vllm_environment.prepare()
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one host: nobody else can reach them
        registry.apply()
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            self._make_room_between_stages()

    def unproven_patch(self) -> str:
        """Why a patch did not take effect on this rank; empty: all did."""
        try:
            registry.verify(self.model_runner)
        except PatchFailed as error:
            return str(error)
        return ""

    def shown_kv(self) -> RankKv:
        """Where this rank's KV lies."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, SnapshotConnector)
        config, memory = connector.kv_cache_config, connector.memory
        context, specs = self.vllm_config.compilation_config.static_forward_context, vllm_groups.layer_specs(config)
        kinds = {name: vllm_groups.kind_of(context[name]) for name in specs}
        layers = tuple(
            LayerBlocks(
                name,
                number,
                group.window_tokens,
                vllm_groups.interior_of(specs[name], *kinds[name]),
                span_of(connector.tensors[name], config.num_blocks),
            )
            for number, group in enumerate(vllm_groups.groups_of(config))
            for name in group.layers
        )
        named = frozenset("/".join(kind) for kind in kinds.values())
        return RankKv(os.getpid(), memory.descriptor, memory.size_bytes, layers, named)

    def replace_weights(self, files: Sequence[str]) -> None:
        """Loads this rank's part of checked files into the running model."""
        with set_current_vllm_config(self.vllm_config):
            vllm_weights.replace(self.model_runner, files)

    def _make_room_between_stages(self) -> None:
        """Memory for what the stage before sends: vLLM makes it in the warm-up run, which eager CPU engines skip."""
        runner = self.model_runner
        runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _end_with_parent() -> None:
    """Lets the kernel end this process with the thread that started it, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it has ended meanwhile
        os._exit(1)
