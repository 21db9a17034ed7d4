"""Brings the tensors of files into a device's memory through a ring of pinned host memory.

    file ──read ahead──▶ page cache ──filler──▶ slot (pinned) ──copy stream──▶ device ──engine's stream──▶ model

Several slots are in work at once. A filler reads the next piece of a file into a slot once the slot's last copy is
complete. The engine's thread queues the copies on a stream of their own, and its own stream waits for a tensor's copies
before it reads the tensor. A tensor occupies memory of its own on the device until its layer has taken it.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch

from dora.errors import InvalidValue
from dora.weights.load_time import LoadDeadline
from dora.weights.reference import TensorHeader, open_regular, read_layout
from dora.worker.copying.streams import DONE, Mark, Streams, streams_of

SLOTS: Final = 8
SLOT_BYTES: Final = 16 << 20  # with the slots: 128 MiB of pinned memory a worker
FILLERS: Final = 4  # threads: one copies slower than the bus
DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes of a file that one slot takes."""

    file: Path
    offset: int
    size_bytes: int


@dataclass(slots=True)
class Slot:
    """Pinned memory, and the point after the last copy from it."""

    memory: np.ndarray
    mark: Mark = DONE


class WeightRing:
    """Used by the engine's thread. All of its host memory is allocated at once, and kept."""

    def __init__(
        self,
        device: torch.device,
        *,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
        streams: Streams | None = None,
        fillers: Executor | None = None,
    ) -> None:
        """``streams`` are by default the device's, ``fillers`` threads. Raises RuntimeError as ``CudaStreams`` does."""
        self._streams = streams_of(device) if streams is None else streams
        self._slot_bytes = slot_bytes
        self._slots = [Slot(self._streams.host_memory(slot_bytes)) for _ in range(slots)]
        self._fillers = fillers or ThreadPoolExecutor(min(slots, FILLERS), "weights")
        self._fills: dict[int, Future[None]] = {}  # by the piece's index, of the present load or one that was given up

    def tensors(self, files: Sequence[Path], deadline: LoadDeadline) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and tensor, on the device. Work that the engine's stream is given later finds its content.

        Raises DeadlineExceeded, and InvalidValue for a file that cannot be read. A load that is given up leaves no copy
        behind that could reach memory of a later one.
        """
        self._finish_earlier(deadline)
        pieces, tensors = self._planned(files)
        for index in range(min(len(self._slots), len(pieces))):
            self._fill_later(index, pieces)
        index = at = 0  # the piece that is being taken, and the byte of it
        try:
            for tensor in tensors:
                memory = self._streams.device_memory(tensor.content_bytes)
                mark, done = DONE, 0
                while done < tensor.content_bytes:
                    if not at:
                        self._await_fill(index, deadline)
                    count = min(tensor.content_bytes - done, pieces[index].size_bytes - at)
                    mark = self._copy_later(memory[done : done + count], index, at)
                    done, at = done + count, at + count
                    if at == pieces[index].size_bytes:
                        self._fill_later(index + len(self._slots), pieces)
                        index, at = index + 1, 0
                self._streams.hold_up(mark)
                deadline.loaded(tensor.content_bytes)
                yield tensor.name, memory.view(DTYPES[tensor.dtype]).view(tensor.shape)
                del memory  # before the next is allocated
        finally:
            for slot in self._slots:  # the memory of a tensor that was not yielded may be used again now
                self._streams.hold_up(slot.mark)

    def _planned(self, files: Sequence[Path]) -> tuple[list[FilePiece], list[TensorHeader]]:
        """Returns the pieces of all files, and the tensors whose bytes they are, one after the other."""
        pieces: list[FilePiece] = []
        tensors: list[TensorHeader] = []
        for file in files:
            begin, found = read_layout(file)
            tensors += found
            end = begin + sum(tensor.content_bytes for tensor in found)
            for offset in range(begin, end, self._slot_bytes):
                pieces.append(FilePiece(file, offset, min(self._slot_bytes, end - offset)))
        return pieces, tensors

    def _finish_earlier(self, deadline: LoadDeadline) -> None:
        """Waits for fillers of a load that was given up, which still write into slots."""
        running = [fill for fill in self._fills.values() if not fill.cancel()]
        if wait(running, deadline.left_s()).not_done:
            raise deadline.exceeded()
        self._fills.clear()

    def _fill_later(self, index: int, pieces: Sequence[FilePiece]) -> None:
        if index < len(pieces):
            ahead_bytes = len(self._slots) * self._slot_bytes
            slot = self._slots[index % len(self._slots)]
            self._fills[index] = self._fillers.submit(self._fill, slot, pieces[index], ahead_bytes)

    def _fill(self, slot: Slot, piece: FilePiece, ahead_bytes: int) -> None:
        slot.mark.synchronize()
        read(piece, slot.memory[: piece.size_bytes], ahead_bytes)

    def _await_fill(self, index: int, deadline: LoadDeadline) -> None:
        """Raises DeadlineExceeded if the piece is not in its slot in time, and what its filler raised."""
        try:
            self._fills[index].result(deadline.left_s())
        except TimeoutError:
            raise deadline.exceeded() from None
        del self._fills[index]

    def _copy_later(self, place: torch.Tensor, index: int, at: int) -> Mark:
        slot = self._slots[index % len(self._slots)]
        with self._streams.entered():
            self._streams.run(partial(_copy, place, slot.memory[at : at + len(place)]))
            slot.mark = self._streams.mark()
        return slot.mark


def _copy(place: torch.Tensor, memory: np.ndarray) -> None:
    place.copy_(torch.from_numpy(memory), non_blocking=True)


def read(piece: FilePiece, memory: np.ndarray, ahead_bytes: int) -> None:
    """Reads a piece of a file, and lets the kernel read the one that lies ``ahead_bytes`` further.

    Raises InvalidValue if the file ends within the piece, or cannot be read.
    """
    place, done = memory.data, 0
    try:
        with open_regular(piece.file) as stream:
            descriptor = stream.fileno()
            os.posix_fadvise(descriptor, piece.offset + ahead_bytes, piece.size_bytes, os.POSIX_FADV_WILLNEED)
            while done < piece.size_bytes:
                count = os.preadv(descriptor, [place[done:]], piece.offset + done)
                if not count:
                    raise InvalidValue("weights file", str(piece.file), f"longer than {piece.offset + done:,} bytes")
                done += count
    except OSError as error:
        raise InvalidValue("weights file", str(piece.file), f"a readable file ({error.strerror})") from error
