"""KV on a device that travels as it is: blocks that an engine lends, and memory for those that arrive."""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch

from dora.kvtransfer.device import OnDevice, Whole
from dora.weights.words import checksum

LANDING_BYTES: Final = 512 << 20  # of a device for bodies that arrive there; a larger body passes through host memory


class BlockGathering(Protocol):
    """A store that can read scattered blocks."""

    def gather(self, name: str, block_ids: Sequence[int], begin: int, end: int, place: torch.Tensor) -> None:
        """Copies bytes of a layer's blocks, counted from the first of ``block_ids``. Returns once they are there."""

    def gathered(self, name: str, block_ids: Sequence[int], begin: int, end: int) -> np.ndarray:
        """Returns the same in host memory. Raises TransferFailed if too much of it is in use."""


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """A region: blocks of one layer where the engine has them. They must not change while they are read."""

    store: BlockGathering
    name: str
    block_ids: Sequence[int]
    device: torch.device

    def tensor(self, begin: int, end: int) -> Any:
        place = self.room(end - begin)
        self.fill(place, begin, end)
        return place

    def room(self, size_bytes: int) -> Any:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def fill(self, place: Any, begin: int, end: int) -> None:
        self.store.gather(self.name, self.block_ids, begin, end, place)

    def host(self, begin: int, end: int) -> np.ndarray:
        return self.store.gathered(self.name, self.block_ids, begin, end)


class Landings:
    """A ``DeviceMemory``. Memory is free again when an array and all its slices are gone. Thread-safe."""

    def __init__(self, kind: str, most_bytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        """``allocate`` returns memory that nothing reads or writes. It raises RuntimeError if there is none."""
        self.kind: Final = kind
        self._most_bytes = most_bytes
        self._allocate = allocate
        self._lent_bytes = 0
        self._lock = threading.RLock()  # a finalizer may run while it is held

    def array(self, size_bytes: int) -> OnDevice | None:
        with self._lock:
            if self._lent_bytes + size_bytes > self._most_bytes:
                return None
            self._lent_bytes += size_bytes
        try:
            region = Whole(self._allocate(size_bytes))
        except RuntimeError:  # torch's error for memory that is exhausted
            self._give_back(size_bytes)
            return None
        weakref.finalize(region, self._give_back, size_bytes).atexit = False
        return OnDevice(region, 0, (size_bytes,))

    def lent_bytes(self) -> int:
        return self._lent_bytes

    def digest(self, parts: Iterable[OnDevice]) -> bytes:
        return b"".join(checksum(part.tensor()) for part in parts)

    def _give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._lent_bytes -= size_bytes
