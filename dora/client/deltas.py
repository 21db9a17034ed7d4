"""Uploads of a delta: the difference from the version uploaded last, if that is faster than a full upload."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dora.client.taking import Taken
from dora.weights.delta import element_bytes_at, element_bytes_of, encode
from dora.weights.files import WeightFile
from dora.weights.reference import read_layout

_SAMPLES: Final = 4  # pieces sampled to estimate a delta's size
_GAIN: Final = 0.9  # maximum time of a delta, relative to a full upload


@dataclass(slots=True)
class Uploaded:
    """A version that this client uploaded: its copied weights, and the speed of the upload."""

    version: int
    taken: Taken
    bytes_per_s: float

    def file(self, name: str) -> WeightFile | None:
        return next((file for file in self.taken.identities if file.name == name), None)


class Delta:
    """The pieces of one file, each as the difference from the base."""

    def __init__(self, taken: Taken, base: Uploaded, file: WeightFile, piece_bytes: int) -> None:
        self.file, self.base, self.piece_bytes = file, base, piece_bytes
        self._new, self._old = taken.descriptor(file.name), base.taken.descriptor(file.name)
        tensors_at, tensors = read_layout(taken.paths()[file.name])
        self._elements: list[tuple[int, int]] = []  # a tensor's end offset, and the bytes of its elements
        for tensor in tensors:
            tensors_at += tensor.content_bytes
            self._elements.append((tensors_at, element_bytes_of(tensor)))

    def pays(self) -> bool:
        """Whether the delta is faster than the whole file, estimated from some of its pieces. Blocks."""
        offsets = range(0, self.file.file_bytes, self.piece_bytes)
        sample = offsets[:: max(1, len(offsets) // _SAMPLES)]
        began_s = time.perf_counter()
        encoded = [len(self._piece(offset)) for offset in sample]
        took_s = time.perf_counter() - began_s
        whole_bytes = sum(min(self.piece_bytes, self.file.file_bytes - offset) for offset in sample)
        whole_s = whole_bytes / self.base.bytes_per_s
        return max(took_s, sum(encoded) / self.base.bytes_per_s) < _GAIN * whole_s

    def pieces(self) -> Iterator[bytes]:
        for offset in range(0, self.file.file_bytes, self.piece_bytes):
            yield self._piece(offset)

    def _piece(self, offset: int) -> bytes:
        new = os.pread(self._new, self.piece_bytes, offset)
        return encode(new, os.pread(self._old, len(new), offset), element_bytes_at(self._elements, offset))
