"""Bounded memory that is used again: pages that were touched once are not cleared by the kernel a second time.

A first touch of a page costs several times a copy into it (measured: 1 GB/s against 10).
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import numpy as np

STEP_BYTES: Final = 64 << 10  # capacities are multiples of it
WASTE_MAX: Final = 4  # a buffer is not used for what is smaller than its capacity by this factor


class Memory(Protocol):
    """Where what arrives is put."""

    def array(self, size_bytes: int) -> np.ndarray | None:
        """An array of so many bytes; None where too much is in use. Raises SnapshotRefused where none can be had."""

    def lent_bytes(self) -> int:
        """In use now."""


class Sized(ABC):
    """Something that holds ``capacity_bytes``."""

    capacity_bytes: int

    def destroy(self) -> None:
        """Gives its memory back to the system."""
        return  # what is mere memory ends with its object


Item = TypeVar("Item", bound=Sized)


class Shelf(Generic[Item], ABC):
    """Items of at most ``most_bytes`` together, those that are lent included. Any thread may use it.

    ``take`` lends an item that lies here free, or makes one; free ones are destroyed where there is no room otherwise.
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
        """An item of at least this capacity; None where too much is lent."""
        wanted = max(STEP_BYTES, -(-size_bytes // STEP_BYTES) * STEP_BYTES)
        with self._lock:
            self._free.extend(self._returned())
            fitting = [item for item in self._free if wanted <= item.capacity_bytes <= WASTE_MAX * wanted]
            if fitting:
                chosen = min(fitting, key=lambda item: item.capacity_bytes)
                self._free.remove(chosen)
                return chosen
            while self._free and self._held_bytes + wanted > self._most_bytes:
                self._forget(self._free.pop(0))
            if self._held_bytes + wanted > self._most_bytes:
                return None
            made = self._make(wanted)
            self._held_bytes += made.capacity_bytes
            return made

    def lent_bytes(self) -> int:
        """Of items in use now."""
        with self._lock:
            self._free.extend(self._returned())
            return self._held_bytes - sum(item.capacity_bytes for item in self._free)

    @abstractmethod
    def _make(self, capacity_bytes: int) -> Item: ...

    @abstractmethod
    def _returned(self) -> list[Item]:
        """Lent items that are free again since the last call."""

    def _forget(self, item: Item) -> None:
        self._held_bytes -= item.capacity_bytes
        item.destroy()


class _Buffer(Sized):
    def __init__(self, raw: np.ndarray) -> None:
        self.capacity_bytes = raw.nbytes
        self.raw = raw


def _private(size_bytes: int) -> np.ndarray:
    return np.empty(size_bytes, np.uint8)


class Pool(Shelf[_Buffer]):
    """Host memory for what arrives. An array comes back by itself once nobody holds it or a view of it."""

    def __init__(self, most_bytes: int, allocate: Callable[[int], np.ndarray] = _private) -> None:
        """``allocate``: makes uint8 of so many bytes."""
        super().__init__(most_bytes)
        self._allocate = allocate
        self._back: deque[_Buffer] = deque()  # filled wherever the collector happens to run: it takes no lock

    def array(self, size_bytes: int) -> np.ndarray | None:
        """An array of so many bytes; None where too much is in use."""
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
