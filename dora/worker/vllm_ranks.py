"""The ranks of one engine, seen from the engine's process: their KV-cache as one, and their ends.

An engine of one rank has it in its own process. One of several has a process for each, started by vLLM's executor, and
steps them all: they live and end with the engine's process, and the loss of one is the loss of the worker.
"""

import logging
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.engine.core import EngineCore

from dora.engine_patches.patch import PatchFailed
from dora.kvtransfer.reslice import shard_name
from dora.worker.cuda_blocks import DeviceStore
from dora.worker.vllm_blocks import BlockStore, mapped, memory_of, rows_of
from dora.worker.vllm_connector import SnapshotConnector
from dora.worker.vllm_rank import RankKv

log = logging.getLogger("dora.worker")

RANK_LOST: Final = 4  # exit status of a worker that has lost a rank

Lost = Callable[[str], None]  # is told which rank has ended, in a thread of its own


def end_process(reason: str) -> None:
    """Ends this process at once: nothing of an engine without one of its ranks can go on, and a step may hang."""
    log.error("%s; the worker ends with it", reason)
    os._exit(RANK_LOST)


class Ranks:
    """For the engine's thread alone."""

    def __init__(self, core: EngineCore, lost: Lost = end_process) -> None:
        """Raises PatchFailed where a patch did not take effect on a rank."""
        parallel = core.vllm_config.parallel_config
        self._core = core
        self._processes = [handle.proc for handle in getattr(core.model_executor, "workers", ())]
        self._stopping, self._stop = multiprocessing.connection.Pipe(duplex=False)
        self._watch: threading.Thread | None = None
        if self._processes:
            self._watch = threading.Thread(target=self._look, args=(lost,), name="ranks", daemon=True)
            self._watch.start()
        for rank, finding in enumerate(core.collective_rpc("unproven_patch")):
            if finding:
                raise PatchFailed(f"rank {rank}", finding)
        shown: list[RankKv] = core.collective_rpc("shown_kv")
        self.kinds = sorted({kind for each in shown for kind in each.kinds})  # as ``RankKv`` has them
        self.shards = 1 if core.vllm_config.model_config.use_mla else _shards(core, parallel.tensor_parallel_size)
        named = {
            shard_name(layer.name, self._shard(rank, parallel.tensor_parallel_size), self.shards): layer
            for rank, kv in enumerate(shown)
            for layer in kv.layers
        }
        self.layers = dict(sorted(named.items()))  # each shard of each layer
        self.store = self._store(shown, parallel.tensor_parallel_size, core.scheduler.kv_cache_config.num_blocks)

    def replace_weights(self, files: Sequence[str]) -> None:
        """Each rank loads its part of checked files into the running model."""
        self._core.collective_rpc("replace_weights", args=(files,))

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks' processes; empty where the only rank is in this one."""
        return tuple(process.pid for process in self._processes)

    def close(self) -> None:
        """Ends the ranks, which have nothing to tidy up, and tells nobody. May be repeated."""
        if self._watch is None:
            return
        self._stop.close()
        self._watch.join()
        self._watch = None
        self._core.model_executor.shutting_down = True  # else vLLM takes their end for a fault
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _shard(self, rank: int, tensor_parallel: int) -> int:
        """Which shard of its layers a rank holds; neighbours may hold the same (vLLM's ``QKVParallelLinear``)."""
        return rank % tensor_parallel * self.shards // tensor_parallel

    def _store(self, shown: Sequence[RankKv], tensor_parallel: int, block_count: int) -> BlockStore | DeviceStore:
        """The KV-cache of all ranks, each shard of a layer as often as ranks hold it."""
        groups = {name: layer.group for name, layer in self.layers.items()}
        if any(layer.span is None for layer in self.layers.values()):
            own = _own_connector()
            own.store = DeviceStore(own.tensors, groups, block_count)
            return own.store
        held: dict[str, list[np.ndarray]] = {name: [] for name in self.layers}
        for rank, kv in enumerate(shown):
            memory = _memory(kv)
            for layer in kv.layers:
                name = shard_name(layer.name, self._shard(rank, tensor_parallel), self.shards)
                held[name].append(rows_of(memory, layer, block_count))
        return BlockStore(held, groups)

    def _look(self, lost: Lost) -> None:
        """Until this end is closed, or a rank has ended."""
        sentinels = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        ended = multiprocessing.connection.wait([*sentinels, self._stopping])
        if self._stopping in ended:
            return
        rank = min(sentinels[each] for each in ended if isinstance(each, int))
        process = self._processes[rank]
        process.join()
        lost(f"rank {rank} of {len(self._processes)} (process {process.pid}) has ended with {process.exitcode}")


def _shards(core: EngineCore, tensor_parallel: int) -> int:
    """Parts that tensor parallelism splits a layer's KV heads into."""
    return min(tensor_parallel, core.vllm_config.model_config.get_total_num_kv_heads())


def _memory(kv: RankKv) -> np.ndarray:
    if kv.descriptor >= 0:
        return mapped(kv.pid, kv.descriptor, kv.size_bytes)
    return memory_of(next(iter(_own_connector().tensors.values())))


def _own_connector() -> SnapshotConnector:
    """The runner's half in this process, where the only rank is."""
    connector = get_kv_transfer_group()
    assert isinstance(connector, SnapshotConnector)
    return connector
