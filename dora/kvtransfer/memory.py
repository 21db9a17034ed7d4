"""Bounded memory that is reused, so the kernel need not clear its pages a second time.

The first touch of a page costs several times a copy into it (measured: 1 GB/s against 10).
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

STEP_BYTES: Final = 64 << 10  # capacities are multiples of it
WASTE_MAX: Final = 4  # a buffer is not used for a size smaller than its capacity by this factor


class Memory(Protocol):
    def array(self, size_bytes: int) -> np.ndarray | None:
        """An array of this size, or None if too much is in use. Raises SnapshotRefused if none can be allocated."""

    def lent_bytes(self) -> int:
        """Bytes in use now."""


class Sized(ABC):
    """An object that holds ``capacity_bytes``."""

    capacity_bytes: int

    def destroy(self) -> None:
        return  # plain memory is freed with its object


Item = TypeVar("Item", bound=Sized)


class Shelf(Generic[Item], ABC):
    """Items of at most ``most_bytes`` together, including those in use. Thread-safe.

    ``take`` returns a free item or makes one; free items are destroyed to make room.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: list[Item] = []
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def take(self, size_bytes: int) -> Item | None:
        """An item of at least this capacity, or None if too much is in use."""
        rounded_bytes = max(STEP_BYTES, -(-size_bytes // STEP_BYTES) * STEP_BYTES)
        with self._lock:
            self._free.extend(self._returned())
            fitting = [item for item in self._free if rounded_bytes <= item.capacity_bytes <= WASTE_MAX * rounded_bytes]
            if fitting:
                chosen = min(fitting, key=lambda item: item.capacity_bytes)
                self._free.remove(chosen)
                return chosen
            while self._free and self._held_bytes + rounded_bytes > self._most_bytes:
                self._forget(self._free.pop(0))
            if self._held_bytes + rounded_bytes > self._most_bytes:
                return None
            made = self._make(rounded_bytes)
            self._held_bytes += made.capacity_bytes
            return made

    def lent_bytes(self) -> int:
        with self._lock:
            self._free.extend(self._returned())
            return self._held_bytes - sum(item.capacity_bytes for item in self._free)

    @abstractmethod
    def _make(self, capacity_bytes: int) -> Item: ...

    @abstractmethod
    def _returned(self) -> list[Item]:
        """Items that became free since the last call."""

    def _forget(self, item: Item) -> None:
        self._held_bytes -= item.capacity_bytes
        item.destroy()


class _Buffer(Sized):
    def __init__(self, raw: np.ndarray) -> None:
        self.capacity_bytes = raw.nbytes
        self.raw = raw


def _private(size_bytes: int) -> np.ndarray:
    return np.empty(size_bytes, np.uint8)


class BufferPool(Shelf[_Buffer]):
    """Host memory for received bytes. An array returns to the pool when it and all its views are gone."""

    def __init__(self, most_bytes: int, allocate: Callable[[int], np.ndarray] = _private) -> None:
        """``allocate`` makes a uint8 array of this size."""
        super().__init__(most_bytes)
        self._allocate = allocate
        self._back: deque[_Buffer] = deque()  # filled by finalizers, which take no lock

    def array(self, size_bytes: int) -> np.ndarray | None:
        """An array of this size, or None if too much is in use."""
        buffer = self.take(size_bytes)
        if buffer is None:
            return None
        root = np.frombuffer(buffer.raw.data, np.uint8)
        weakref.finalize(root, self._back.append, buffer).atexit = False
        return root[:size_bytes]

    def _make(self, capacity_bytes: int) -> _Buffer:
        return _Buffer(self._allocate(capacity_bytes))

    def _returned(self) -> list[_Buffer]:
        return [self._back.popleft() for _ in range(len(self._back))]
