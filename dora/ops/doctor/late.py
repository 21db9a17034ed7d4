"""An engine whose copies into the KV-cache are late, as over a busy bus: on a CPU, and on a GPU."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dora.kvtransfer.snapshot import Pieces
from dora.worker.reservation import KvStore
from dora.worker.vllm.blocks import BlockStore
from dora.worker.vllm.device.cpu import Cpu

if TYPE_CHECKING:
    from dora.worker.vllm.engine import VllmEngine

LATE_CYCLES: Final = 200_000_000  # of a GPU: about 0.1 s, many times a step of a small model


class LateBlocks(BlockStore):
    """Blocks in host memory that are written no earlier than a step or a reader asks for them."""

    def __init__(self, layers: Mapping[str, Sequence[np.ndarray]], groups: Mapping[str, int]) -> None:
        super().__init__(layers, groups)
        self._late: list[tuple[list[list[int]], dict[str, Pieces]]] = []
        self._order = threading.RLock()

    def show(self, block_ids: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        self.join()
        return super().show(block_ids)

    lend = show

    def write(self, block_ids: Sequence[Sequence[int]], blocks: Mapping[str, Pieces]) -> None:
        copied: dict[str, Pieces] = {name: [np.array(piece) for piece in pieces] for name, pieces in blocks.items()}
        with self._order:
            self._late.append(([list(ids) for ids in block_ids], copied))

    def join(self) -> None:
        with self._order:
            for block_ids, blocks in self._late:
                super().write(block_ids, blocks)
            self._late.clear()


class LateCpu(Cpu):
    """A CPU whose engines have this store."""

    def kv_store(self, rows: Callable[[], Any], tensors: Any, groups: Mapping[str, int], block_count: int) -> KvStore:
        return LateBlocks(rows(), groups)


def delay(engine: "VllmEngine") -> None:
    """Delays the next copies into a GPU's KV-cache."""
    import torch

    store = engine.core.scheduler.connector.store
    store.queue(lambda: torch.cuda._sleep(LATE_CYCLES))
