"""The interface of a transport, which carries bytes from one worker's memory to another's.

A transport has two halves, created and closed with each pair of workers. The pair's stream (``wire``) carries the
protocol, so a transport only moves chunks and knows nothing of requests, snapshots or the meaning of checksums. Each
half is used by one thread, never by the engine's.

    sending half                        receiving half
    attach: its offer       ─ATTACH──▶  attach: its answer          once a pair
    begin: a body begins    ─OPEN────▶  begin: memory for it        once a snapshot
    chunk: bytes            ─CHUNK───▶  chunk: bytes are there      many times
    finish: all have left   ─COMMIT──▶                              once a snapshot
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import numpy as np

from dora.errors import SnapshotRefused
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.device import DeviceMemory, OnDevice
from dora.kvtransfer.memory import Memory
from dora.kvtransfer.wire import Frame, Kind, Stream

CHUNK_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 1 << 20  # still in the cache for its checksum, and large enough for Python's overhead
SMALL_BYTES: Final = 32 << 10
CHUNK_MAX: Final = 8 << 20
AnyPart = TypeVar("AnyPart", memoryview, OnDevice)


@dataclass(frozen=True, slots=True)
class Landing:
    """Memory for an arriving body: an array, and the parameters that the sending half needs."""

    body: np.ndarray | OnDevice
    answer: dict[str, Any]


class NoRoom(SnapshotRefused):
    """Too much is in flight now; a later try may succeed."""


DeviceDigest = Callable[[Iterable[OnDevice]], bytes]
Sum = bytes | Callable[[], bytes]  # a chunk's checksum, or a function that waits for it


class Sender(ABC):
    """The sending half. Its methods raise TransferFailed if this transport fails; another one may be tried."""

    name: str
    chunk_bytes: ClassVar[int] = CHUNK_BYTES
    devices: tuple[str, ...] = ()  # kinds of devices whose memory it takes, beside that of the host

    def attach(self, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Called once, first. ``ask`` sends an offer to the other half and returns its answer."""
        ask({})

    def begin(self, body_bytes: int) -> dict[str, Any]:
        """Begins a body of at most this size. Returns parameters for the other half."""
        return {}

    def begun(self, answer: dict[str, Any]) -> None:
        """Accepts the parameters of the other half, which is ready."""
        return  # nothing to do for most transports

    @abstractmethod
    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> Sum:
        """Sends one chunk, or begins to, and announces it with ``head``. Returns its checksum.

        ``head["at"]`` is the chunk's offset in the body, ``head["size"]`` the total size of the consecutive ``parts``.
        """

    def device_chunk(
        self, stream: Stream, head: dict[str, Any], parts: Sequence[OnDevice], digest: DeviceDigest
    ) -> Sum:
        """The same for parts on a device of a kind in ``devices``."""
        raise NotImplementedError(f"{self.name} takes host memory")

    def finish(self) -> None:
        """Returns once no chunk needs ``parts`` or this transport's own memory."""
        return  # nothing to do for most transports

    def if_refused(self) -> Callable[[], object]:
        """Returns the cleanup for the case that the target refuses the body just sent. Any thread may run it."""
        return lambda: None

    def abandon(self) -> None:
        """Ends a void body: refused, cancelled, or aborted."""
        return  # nothing to do for most transports

    def close(self) -> None:
        """Frees everything."""
        return  # nothing to do for most transports


class Receiver(ABC):
    """The receiving half. Its methods raise SnapshotRefused for a body that it cannot accept, and TransferFailed."""

    devices: tuple[str, ...] = ()  # as the sending half's

    def attach(self, offer: dict[str, Any]) -> dict[str, Any]:
        """Answers the sending half's offer."""
        return {}

    @abstractmethod
    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Memory | DeviceMemory) -> Landing:
        """Memory for a body. ``opening`` has the sending half's parameters. ``pool`` is the host's or a device's."""

    @abstractmethod
    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        """Receives one chunk, or begins to. Returns the checksum of the received bytes."""

    def device_chunk(self, stream: Stream, frame: Frame, target: OnDevice, digest: DeviceDigest) -> Sum:
        """The same into a device's memory."""
        raise NotImplementedError("this transport takes host memory")

    def skip(self, stream: Stream, frame: Frame) -> None:
        """Discards a chunk of a void body."""
        stream.drain(frame.body_bytes)

    def end(self, body: np.ndarray | OnDevice) -> None:
        """Ends a body that ``begin`` allocated: it is complete or void, and is not written again."""
        return  # nothing to do for most transports

    def close(self) -> None:
        """Frees everything."""
        return  # nothing to do for most transports


def pool_landing(body_bytes: int, pool: Memory | DeviceMemory) -> Any:
    """Allocates an array, or ``OnDevice`` of a device's pool. Raises NoRoom; SnapshotRefused if allocation fails."""
    array = pool.array(body_bytes)
    if array is None:
        raise NoRoom(f"body bytes = {body_bytes}: too much is in flight, {pool.lent_bytes()} bytes")
    return array


def send_chunk(stream: Stream, head: dict[str, Any], parts: Sequence[memoryview] = ()) -> None:
    stream.send(Kind.CHUNK, head, parts)


def copied(target: np.ndarray, parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """Writes consecutive buffers and yields each piece while it is in the cache, for its checksum.

    Large copies release the GIL; for small ones, waiting to get it back would cost more than the copy.
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


def cut(parts: Iterable[AnyPart], most_bytes: int) -> Iterator[list[AnyPart]]:
    """The same bytes in groups of ``most_bytes``; the last may be smaller."""
    row: list[AnyPart] = []
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
    """The checksum, after waiting for it."""
    return found if isinstance(found, bytes) else found()
