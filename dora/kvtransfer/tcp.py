"""TCP, between any two workers: chunks follow their frames on the pair's own stream.

The kernel takes them from the engine's blocks and puts them where the body belongs, with no copy in between. A chunk's
checksum follows it, so that each piece is read from memory once: to be checked, and out of the cache to be sent.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from dora.errors import TransferFailed
from dora.kvtransfer.checksum import DIGEST_BYTES, Digest
from dora.kvtransfer.memory import Pool
from dora.kvtransfer.transport import Landing, Receiver, Sender, cut, pool_landing
from dora.kvtransfer.wire import Frame, Kind, Stream

PIECE_BYTES: Final = 1 << 20  # smaller ones stay in the cache, and cost more in system calls


class TcpSender(Sender):
    name = "tcp"
    chunk_bytes: ClassVar = 4 << 20

    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> bytes:
        stream.begin(Kind.CHUNK, head, head["size"] + DIGEST_BYTES)
        found = digest(_sent(stream, parts))
        stream.go_on([memoryview(found)])
        return found


class TcpReceiver(Receiver):
    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Pool) -> Landing:
        return Landing(pool_landing(body_bytes, pool), {})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> bytes:
        if frame.body_bytes != len(target) + DIGEST_BYTES:
            raise TransferFailed(f"a chunk of {frame.body_bytes} bytes, its head says {len(target)}")
        found = digest(_read(stream, target))
        frame.head["sum"] = stream.read(DIGEST_BYTES)
        return found


def _sent(stream: Stream, parts: Sequence[memoryview]) -> Iterator[memoryview]:
    """Sends each piece once its checksum is made, which has brought it into the cache."""
    for row in cut(parts, PIECE_BYTES):
        yield from row
        stream.go_on(row)


def _read(stream: Stream, target: memoryview) -> Iterator[memoryview]:
    """Each piece as soon as it is there: its checksum is made out of the cache."""
    for at in range(0, len(target), PIECE_BYTES):
        piece = target[at : at + PIECE_BYTES]
        stream.read_into(piece)
        yield piece
