"""What differs from the version that was uploaded last, instead of all, where that takes less time on this link."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dora.client.taking import Taken
from dora.weights.delta import element_bytes_of, encode
from dora.weights.files import WeightFile
from dora.weights.reference import read_layout

_SAMPLES: Final = 4  # pieces by which a delta is judged before it is sent
_GAIN: Final = 0.9  # of the time that all of it takes, what a delta may take


@dataclass(slots=True)
class Uploaded:
    """A version that the service has from here, as it was taken, and how fast it went there."""

    version: int
    taken: Taken
    bytes_per_s: float

    def file(self, name: str) -> WeightFile | None:
        return next((file for file in self.taken.identities if file.name == name), None)


class Delta:
    """One file's pieces, each as it differs from the base's."""

    def __init__(self, taken: Taken, base: Uploaded, file: WeightFile, piece_bytes: int) -> None:
        self.file, self.base, self.piece_bytes = file, base, piece_bytes
        self._new, self._old = taken.descriptor(file.name), base.taken.descriptor(file.name)
        tensors_at, tensors = read_layout(taken.paths()[file.name])
        self._elements: list[tuple[int, int]] = []  # where a tensor ends, and the bytes of its elements
        for tensor in tensors:
            tensors_at += tensor.content_bytes
            self._elements.append((tensors_at, element_bytes_of(tensor)))

    def pays(self) -> bool:
        """Whether it takes less time than all of the file: judged by some of its pieces. It blocks."""
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
        element_bytes = next((size for end, size in self._elements if end > offset), 1)
        return encode(new, os.pread(self._old, len(new), offset), element_bytes)
