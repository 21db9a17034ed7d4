"""The ranks of one engine as seen by its process: their joint KV-cache, and their ends.

An engine of one rank has it in its own process. With several, vLLM's executor starts a process for each and steps them
together. They end with the engine's process, and the loss of one is the loss of the worker.
"""

import logging
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.engine.core import EngineCore

from dora.data.types import RoutingShape
from dora.engine_patches.patch import PatchFailed
from dora.errors import Conflict, DeadlineExceeded, InvalidValue
from dora.kvtransfer.reslice import shard_name
from dora.worker.reservation import KvStore
from dora.worker.vllm.blocks import LayerBlocks, mapped, memory_of, rows_of, shard_of
from dora.worker.vllm.connector import SnapshotConnector
from dora.worker.vllm.device.port import Device
from dora.worker.vllm.device.rank import OUT_OF_MEMORY, RankKv, RankRouting
from dora.worker.vllm.routing import RoutingRows

log = logging.getLogger("dora.worker")

EXIT_CODE_S: Final = 1.0
RANK_LOST: Final = 4  # exit status of a worker that has lost a rank

Lost = Callable[[str], None]  # called with the ended rank, in a separate thread


def end_process(reason: str) -> None:
    """Ends this process at once: an engine without one of its ranks cannot continue, and a step may hang."""
    log.error("%s; the worker ends with it", reason)
    os._exit(RANK_LOST)


class EngineRanks:
    """Used by the engine's thread only."""

    def __init__(
        self, core: EngineCore, device: Device, lost: Lost = end_process, routing: RoutingShape | None = None
    ) -> None:
        """``routing`` is the shape of routed experts to record beside the KV, or None to record none.

        Raises PatchFailed if a patch did not take effect on a rank, InvalidValue if vLLM's routing is unknown or has
        another shape.
        """
        parallel = core.vllm_config.parallel_config
        self._core = core
        self._device = device
        self._processes = [handle.proc for handle in getattr(core.model_executor, "workers", ())]
        self._stopping, self._stop = multiprocessing.connection.Pipe(duplex=False)
        self._watch: threading.Thread | None = None
        if self._processes:
            self._watch = threading.Thread(target=self._look, args=(lost,), name="ranks", daemon=True)
            self._watch.start()
        for rank, finding in enumerate(core.collective_rpc("unproven_patch")):
            if finding:
                raise PatchFailed(f"rank {rank}", finding)
        shown = list(enumerate(core.collective_rpc("shown_kv")))
        self.kinds = sorted({kind for _, each in shown for kind in each.kinds})  # as in ``RankKv``
        self.shards = 1 if core.vllm_config.model_config.use_mla else _shards(core, parallel.tensor_parallel_size)
        self._tensor_parallel = parallel.tensor_parallel_size
        self._block_count = core.scheduler.kv_cache_config.num_blocks
        self._block_tokens = int(core.vllm_config.cache_config.block_size)
        self.routing: RoutingRows | None = None
        if routing is not None:
            routed: list[RankRouting] = core.collective_rpc("keep_routing", args=(routing, self.shards))
            check_routing([each for at, each in enumerate(routed) if not at % self._tensor_parallel], routing)
            kept = [(rank, each.kv) for rank, each in enumerate(routed) if each.kv.layers]
            self.routing = self._rows(kept, routing)
            shown += kept
        named = {self._name(rank, layer): layer for rank, kv in shown for layer in kv.layers}
        self.layers = dict(sorted(named.items()))  # each shard of each layer
        self.store = self._store(shown)

    def replace_weights(
        self, files: Sequence[str], limit_s: float, changed: str = "", token_ids: Sequence[int] = ()
    ) -> None:
        """Makes each rank load its part of verified files into the running model.

        ``Rank.replace_weights`` describes the arguments. Raises DeadlineExceeded, and Conflict if the device lacks
        memory for a layer that arrives. Either way the weights then belong to no version.
        """
        for refusal in self._core.collective_rpc("replace_weights", args=(files, limit_s, changed, token_ids)):
            if refusal is not None and refusal[0] == OUT_OF_MEMORY:
                share = self._core.vllm_config.cache_config.gpu_memory_utilization
                allowed = f"less: a reload holds a model's largest layer twice (rank {refusal[1]}: {refusal[2]})"
                raise Conflict("workers.gpu_memory_utilisation", share, allowed, why="leaves no room to load")
            if refusal is not None:
                raise DeadlineExceeded(*refusal)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' processes, or none if the only rank is in this one."""
        return tuple(process.pid for process in self._processes)

    def close(self) -> None:
        """Ends the ranks, which need no cleanup, without a report. May be repeated."""
        if self._watch is None:
            return
        self._stop.close()
        self._watch.join()
        self._watch = None
        self._core.model_executor.shutting_down = True  # otherwise vLLM treats their end as a fault
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _shard(self, rank: int) -> int:
        return shard_of(rank, self._tensor_parallel, self.shards)

    def _name(self, rank: int, layer: LayerBlocks) -> str:
        return shard_name(layer.name, self._shard(rank), self.shards)

    def _store(self, shown: Sequence[tuple[int, RankKv]]) -> KvStore:
        """Returns the KV-cache of all ranks, with each shard of a layer once for each rank that holds it."""
        groups = {name: layer.group for name, layer in self.layers.items()}
        if self.routing is not None and any(layer.span is None for layer in self.layers.values()):
            raise InvalidValue("workers.router_replay", True, "false where KV is on a device")
        return self._device.kv_store(
            lambda: self._host_rows(shown), lambda: self._tensors(shown), groups, self._block_count
        )

    def _tensors(self, shown: Sequence[tuple[int, RankKv]]) -> list[dict[str, torch.Tensor]]:
        if not self._processes:
            return [dict(_own_connector().tensors)]
        return [
            {self._name(rank, layer): self._device.opened(kv.handles[layer.name]) for layer in kv.layers}
            for rank, kv in shown
        ]

    def _host_rows(self, shown: Sequence[tuple[int, RankKv]]) -> dict[str, list[np.ndarray]]:
        held: dict[str, list[np.ndarray]] = {name: [] for name in self.layers}
        for rank, kv in shown:
            memory = _memory(kv)
            for layer in kv.layers:
                held[self._name(rank, layer)].append(rows_of(memory, layer, self._block_count))
        return held

    def _rows(self, kept: Sequence[tuple[int, RankKv]], shape: RoutingShape) -> RoutingRows:
        """Returns the ranks' routed experts; of ranks with the same shard, the first one's."""
        stages: dict[int, dict[int, np.ndarray]] = {}
        for rank, kv in kept:
            ids = _memory(kv).view(f"<u{shape.id_bytes}")
            held_ids, block_tokens = kv.layers[0].interior[0], self._block_tokens
            of_layers = ids.reshape(len(kv.layers), self._block_count, held_ids, block_tokens)
            stages.setdefault(rank // self._tensor_parallel, {}).setdefault(self._shard(rank), of_layers)
        group = kept[0][1].layers[0].group
        return RoutingRows(shape, group, self._block_tokens, [[*shards.values()] for shards in stages.values()])

    def _look(self, lost: Lost) -> None:
        sentinels = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        ended = multiprocessing.connection.wait([*sentinels, self._stopping])
        if self._stopping in ended:
            return
        rank = min(sentinels[each] for each in ended if isinstance(each, int))
        process = self._processes[rank]
        lost(f"rank {rank} of {len(self._processes)} (process {process.pid}) has ended with {_exit_code(process)}")


def _exit_code(process: Any) -> int | None:
    """Returns the exit code of an ended process, or None if unknown.

    A thread of vLLM waits for the process too. If it is first, ``exitcode`` is None until that thread has stored it.
    """
    process.join()
    deadline_s = time.monotonic() + EXIT_CODE_S
    while process.exitcode is None and time.monotonic() < deadline_s:
        time.sleep(EXIT_CODE_S / 100)
    code: int | None = process.exitcode
    return code


def check_routing(stages: Sequence[RankRouting], shape: RoutingShape) -> None:
    """Raises InvalidValue unless all layers together route as the model's config states."""
    for stage in stages:
        if stage.refusal:
            raise InvalidValue("workers.router_replay", True, f"false: {stage.refusal}")
    found = [layer for stage in stages for layer in stage.found]
    if found != [(shape.top_k, shape.experts)] * shape.layers:
        kinds = sorted(set(found))
        allowed = f"false: vLLM routes in {len(found)} layers, (top_k, experts) {kinds}, config.json says {shape}"
        raise InvalidValue("workers.router_replay", True, allowed)


def _shards(core: EngineCore, tensor_parallel: int) -> int:
    return min(tensor_parallel, core.vllm_config.model_config.get_total_num_kv_heads())


def _memory(kv: RankKv) -> np.ndarray:
    if kv.descriptor >= 0:
        return mapped(kv.pid, kv.descriptor, kv.size_bytes)
    return memory_of(next(iter(_own_connector().tensors.values())))


def _own_connector() -> SnapshotConnector:
    """Returns the runner's half in this process, which has the only rank."""
    connector = get_kv_transfer_group()
    assert isinstance(connector, SnapshotConnector)
    return connector
