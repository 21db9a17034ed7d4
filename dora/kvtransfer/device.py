"""Bytes in the memory of a device, which travel without a copy in host memory.

``OnDevice`` stands where a numpy array or a memoryview stands for bytes in host memory: it has their shape and slices.
This module imports no torch: a ``Region`` knows its tensors.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np


class Region(Protocol):
    """A run of bytes on a device, as others count them; they may lie scattered there."""

    def tensor(self, begin: int, end: int) -> Any:
        """Returns these bytes as a contiguous uint8 tensor: in place, or a copy if they are scattered."""

    def fill(self, place: Any, begin: int, end: int) -> None:
        """Copies these bytes to a uint8 tensor on the device. Returns once they are there."""

    def room(self, size_bytes: int) -> Any:
        """Returns other memory on the same device, as a uint8 tensor."""

    def host(self, begin: int, end: int) -> np.ndarray:
        """Returns a copy in host memory. Raises TransferFailed if there is no memory for it."""


class OnDevice:
    """Some bytes of a region, in a shape."""

    dtype: Final = np.dtype(np.uint8)

    def __init__(self, region: Region, begin: int, shape: tuple[int, ...]) -> None:
        self.shape: Final = shape
        self.nbytes: Final = math.prod(shape)
        self._region = region
        self._begin = begin

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice) -> "OnDevice":
        first, end, _ = which.indices(len(self))
        begin = self._begin + first * math.prod(self.shape[1:])
        return OnDevice(self._region, begin, (max(0, end - first), *self.shape[1:]))

    def reshape(self, *shape: int) -> "OnDevice":
        """``shape`` is -1, or has the lengths of all axes."""
        return OnDevice(self._region, self._begin, (self.nbytes,) if shape == (-1,) else shape)

    @property
    def data(self) -> "OnDevice":
        return self

    def cast(self, _form: str) -> "OnDevice":
        return self.reshape(-1)

    def setflags(self, write: bool) -> None:
        """Does nothing: tensors cannot be made read-only."""

    def tensor(self) -> Any:
        return self._region.tensor(self._begin, self._begin + self.nbytes)

    def fill(self, place: Any) -> None:
        self._region.fill(place, self._begin, self._begin + self.nbytes)

    def room(self, size_bytes: int) -> Any:
        return self._region.room(size_bytes)

    def host(self) -> np.ndarray:
        return self._region.host(self._begin, self._begin + self.nbytes).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.host()


class Whole:
    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def tensor(self, begin: int, end: int) -> Any:
        return self._tensor[begin:end]

    def fill(self, place: Any, begin: int, end: int) -> None:
        place.copy_(self.tensor(begin, end))

    def room(self, size_bytes: int) -> Any:
        return self._tensor.new_empty(size_bytes)

    def host(self, begin: int, end: int) -> np.ndarray:
        found: np.ndarray = self.tensor(begin, end).cpu().numpy()
        return found


def whole(tensor: Any) -> OnDevice:
    return OnDevice(Whole(tensor), 0, (len(tensor),))


class DeviceMemory(Protocol):
    """Bounded memory of a device for bodies that arrive or leave."""

    @property
    def kind(self) -> str:
        """The type of its torch device."""

    def array(self, size_bytes: int) -> OnDevice | None:
        """Returns memory of this size, or None if too much is in use."""

    def lent_bytes(self) -> int:
        """Bytes in use now."""

    def digest(self, parts: Iterable[OnDevice]) -> bytes:
        """Returns a checksum of 16 bytes, the same on every kind of device. It finds damage, not a forgery."""


Part = memoryview | OnDevice


def is_on_device(parts: Iterable[Any]) -> bool:
    return all(isinstance(part, OnDevice) for part in parts)


def in_host_memory(parts: Sequence[Part]) -> list[memoryview]:
    """Copies the parts that are not in host memory. Raises TransferFailed if there is no memory for it."""
    return [part.host().reshape(-1).data if isinstance(part, OnDevice) else part for part in parts]
