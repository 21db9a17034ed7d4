"""Examines a weights file in one reading: its identity, the checksums of its chunks, and whether it is finite.

    file ──pread──▶ chunk: checksum, finite check ──in file order──▶ BLAKE3

Machines with many cores examine several chunks at once, and BLAKE3 divides each of them among as many threads.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from dora.errors import InvalidValue
from dora.weights import files
from dora.weights.files import Examined, WeightFile, sum_of
from dora.weights.finite import FiniteCheck, not_finite
from dora.weights.reference import DTYPE_BYTES, HEADER_BYTES_MAX, TensorHeader, open_regular, read_layout

THREADS_MAX: Final = 8
CORES_PER_THREAD: Final = 8  # the others are for training and engines
_ELEMENT_BYTES_MAX: Final = 8


def threads_here() -> int:
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // CORES_PER_THREAD))


def examine_file(
    file: Path,
    announced: WeightFile | None = None,
    header_bytes_max: int = HEADER_BYTES_MAX,
    threads: int | None = None,
) -> Examined:
    """Reads a safetensors file once: its identity, its chunks' checksums, and its tensors.

    The file is read, not mapped: if a writer truncated a mapped file, the process would be killed. ``threads`` is by
    default this machine's. Raises InvalidValue for a file that cannot be read, is invalid, differs from ``announced``,
    or holds a non-finite tensor; the first in the file is named.
    """
    tensors_at, tensors = read_layout(file, header_bytes_max)
    total_bytes = tensors_at + sum(tensor.content_bytes for tensor in tensors)
    if announced is not None and total_bytes != announced.file_bytes:
        raise InvalidValue(f"{file.name}: bytes", total_bytes, f"as announced, {announced.file_bytes}")
    threads = threads_here() if threads is None else threads
    digest, sums = blake3(max_threads=threads), []
    infinite: TensorHeader | None = None
    try:
        with open_regular(file) as stream:
            chunks = _Chunks(file.name, stream.fileno(), total_bytes, _placed(tensors_at, tensors))
            for chunk in chunks.in_order(threads):
                digest.update(chunk.content)
                sums.append(chunk.sum)
                infinite = infinite or chunk.infinite
    except OSError as error:
        raise InvalidValue("weights file", str(file), f"a readable file ({error.strerror})") from error
    found = WeightFile(file.name, total_bytes, digest.digest())
    if announced is not None and found.blake3 != announced.blake3:
        raise InvalidValue(f"{file.name}: blake3", found.blake3.hex(), f"as announced, {announced.blake3.hex()}")
    if infinite is not None:
        raise not_finite(infinite.name, infinite.dtype)
    return Examined(found, tuple(sums), tensors_at, tensors)


@dataclass(frozen=True, slots=True)
class _Placed:
    tensor: TensorHeader
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk. Its ``content`` is valid until the next chunk is asked for."""

    content: memoryview
    sum: bytes
    infinite: TensorHeader | None  # the first tensor with a number that is not finite and begins here


def _placed(tensors_at: int, tensors: tuple[TensorHeader, ...]) -> list[_Placed]:
    placed, begin = [], tensors_at
    for tensor in tensors:
        placed.append(_Placed(tensor, begin, begin + tensor.content_bytes))
        begin += tensor.content_bytes
    return placed


class _Room:
    def __init__(self) -> None:
        self.content = memoryview(bytearray(files.CHUNK_BYTES + _ELEMENT_BYTES_MAX))
        self.check = FiniteCheck()


class _Chunks:
    def __init__(self, name: str, descriptor: int, total_bytes: int, placed: list[_Placed]) -> None:
        self._name = name
        self._descriptor = descriptor
        self._total_bytes = total_bytes
        self._placed = placed

    def in_order(self, threads: int) -> Iterator[_Chunk]:
        """Yields the chunks in file order. Raises OSError, and InvalidValue if the file ends early."""
        work, first = [], 0
        for begin in range(0, self._total_bytes, files.CHUNK_BYTES):
            while first < len(self._placed) and self._placed[first].end <= begin:
                first += 1
            work.append((begin, first))
        if threads == 1:
            room = _Room()
            for begin, first in work:
                yield self._examined(room, begin, first)
            return
        with ThreadPoolExecutor(threads, "examine") as pool:
            running: deque[tuple[_Room, Future[_Chunk]]] = deque()
            free = [_Room() for _ in range(2 * threads)]
            for begin, first in work:
                if not free:
                    room, chunk = running.popleft()
                    yield chunk.result()
                    free.append(room)
                room = free.pop()
                running.append((room, pool.submit(self._examined, room, begin, first)))
            for _, chunk in running:
                yield chunk.result()

    def _examined(self, room: _Room, begin: int, first: int) -> _Chunk:
        """Reads one chunk. ``first`` is the index of the first tensor that ends behind ``begin``."""
        end = min(begin + files.CHUNK_BYTES, self._total_bytes)
        # An element that begins in this chunk may end in the next one.
        read_bytes = min(end + _ELEMENT_BYTES_MAX - 1, self._total_bytes) - begin
        self._read(room.content[:read_bytes], begin)
        infinite = None
        for placed in self._placed[first:]:
            if placed.begin >= end:
                break
            size = DTYPE_BYTES[placed.tensor.dtype]
            start = placed.begin + -(-max(0, begin - placed.begin) // size) * size
            stop = placed.begin + -(-(min(end, placed.end) - placed.begin) // size) * size
            if not room.check.is_finite(room.content[start - begin : stop - begin], placed.tensor.dtype):
                infinite = placed.tensor
                break
        content = room.content[: end - begin]
        return _Chunk(content, sum_of(content), infinite)

    def _read(self, place: memoryview, begin: int) -> None:
        done = 0
        while done < len(place):
            count = os.preadv(self._descriptor, [place[done:]], begin + done)
            if not count:
                raise InvalidValue(f"{self._name}: bytes", "fewer than at opening", "a file that no process writes")
            done += count
