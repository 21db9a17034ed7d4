"""What a transport is: a way for the bytes of one worker to reach the memory of another.

A transport has two halves, made anew for each pair of workers and gone with it. The pair's stream (``wire``) carries
what both say, so a transport only brings chunks across; it knows nothing of requests, snapshots or checksums' meaning.
A pair's halves are each used by one thread, which is none of the engine's.

    sending half                        receiving half
    attach: its offer       ─ATTACH──▶  attach: its answer          once a pair
    begin: a body begins    ─OPEN────▶  begin: memory for it        once a snapshot
    chunk: bytes            ─CHUNK───▶  chunk: bytes are there      many times
    finish: all have left   ─COMMIT──▶                              once a snapshot
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from dora.errors import SnapshotRefused
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.memory import Memory
from dora.kvtransfer.wire import Frame, Kind, Stream

CHUNK_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 1 << 20  # is still in the cache when its checksum is made, and costs little of Python
SMALL_BYTES: Final = 32 << 10
CHUNK_MAX: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Landing:
    """Memory in which a body arrives: an array of its bytes, and what the sending half has to know of it."""

    body: np.ndarray
    answer: dict[str, Any]


class NoRoom(SnapshotRefused):
    """Too much is in flight just now."""


Sum = bytes | Callable[[], bytes]  # of a chunk; or what waits for it


class Sender(ABC):
    """The sending half. Its methods raise TransferFailed where this transport cannot go on; another one may."""

    name: str
    chunk_bytes: ClassVar[int] = CHUNK_BYTES

    def attach(self, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Once, before anything else. ``ask`` shows the other half an offer and returns its answer."""
        ask({})

    def begin(self, body_bytes: int) -> dict[str, Any]:
        """A body of at most so many bytes is to begin; what the other half has to know."""
        return {}

    def begun(self, answer: dict[str, Any]) -> None:
        """The other half is ready."""
        return  # most have nothing to do here

    @abstractmethod
    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> Sum:
        """Brings one chunk across, or begins to, and announces it with ``head``. Returns its checksum.

        ``head["at"]`` is where in the body the chunk begins, ``head["size"]`` its bytes: those of ``parts``, in a row.
        """

    def finish(self) -> None:
        """Returns once no chunk needs ``parts`` or own memory any more."""
        return  # most have nothing to do here

    def if_refused(self) -> Callable[[], object]:
        """What is to be done where the body that was just sent is refused. Any thread may do it."""
        return lambda: None

    def abandon(self) -> None:
        """The body is void: refused, cancelled, or broken off."""
        return  # most have nothing to do here

    def close(self) -> None:
        """Gives everything back."""
        return  # most have nothing to do here


class Receiver(ABC):
    """The receiving half. Its methods raise SnapshotRefused for what it cannot take, and TransferFailed."""

    def attach(self, offer: dict[str, Any]) -> dict[str, Any]:
        """The answer to the sending half's offer."""
        return {}

    @abstractmethod
    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Memory) -> Landing:
        """Memory for a body. ``opening``: what the sending half said."""

    @abstractmethod
    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        """Takes one chunk, or begins to. Returns the checksum of what has come."""

    def skip(self, stream: Stream, frame: Frame) -> None:
        """A chunk that nobody wants any more."""
        stream.drain(frame.body_bytes)

    def end(self, body: np.ndarray) -> None:
        """A body that ``begin`` gave memory for is complete, or void: nothing more is written to it."""
        return  # most have nothing to do here

    def close(self) -> None:
        """Gives everything back."""
        return  # most have nothing to do here


def pool_landing(body_bytes: int, pool: Memory) -> np.ndarray:
    """Memory of the pool. Raises NoRoom, and SnapshotRefused where none can be had."""
    array = pool.array(body_bytes)
    if array is None:
        raise NoRoom(f"body bytes = {body_bytes}: too much is in flight, {pool.lent_bytes()} bytes")
    return array


def send_chunk(stream: Stream, head: dict[str, Any], parts: Sequence[memoryview] = ()) -> None:
    stream.send(Kind.CHUNK, head, parts)


def copied(target: np.ndarray, parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """Writes buffers in a row, and shows each piece as soon as it is written: its checksum is made out of the cache.

    Large copies let other threads run; to wait for one's turn again costs more than a small one.
    """
    at = 0
    shown = target.data
    for row in cut(parts, PIECE_BYTES):
        begin = at
        for part in row:
            end = at + part.nbytes
            if part.nbytes < SMALL_BYTES:
                shown[at:end] = part
            else:
                np.copyto(target[at:end], np.frombuffer(part, np.uint8))
            at = end
        yield shown[begin:at]


def cut(parts: Iterable[memoryview], most_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes in rows of at most ``most_bytes``, each but the last of exactly that."""
    row: list[memoryview] = []
    room = most_bytes
    for part in parts:
        rest = part.cast("B")
        while rest:
            row.append(rest[:room])
            room -= row[-1].nbytes
            rest = rest[row[-1].nbytes :]
            if not room:
                yield row
                row, room = [], most_bytes
    if row:
        yield row


def summed(found: Sum) -> bytes:
    """The checksum itself."""
    return found if isinstance(found, bytes) else found()
