"""TCP, between any two workers: chunks follow their frames on the pair's own stream.

The kernel takes them from the engine's blocks and puts them where the body belongs, with no copy in between.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from dora.errors import TransferFailed
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.memory import Pool
from dora.kvtransfer.transport import Landing, Receiver, Sender, pool_landing, send_chunk
from dora.kvtransfer.wire import Frame, Stream

PIECE_BYTES: Final = 256 << 10


class TcpSender(Sender):
    name = "tcp"

    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> bytes:
        head["sum"] = digest(parts)
        send_chunk(stream, head, parts)
        return bytes(head["sum"])


class TcpReceiver(Receiver):
    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Pool) -> Landing:
        return Landing(pool_landing(body_bytes, pool), {})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> bytes:
        if frame.body_bytes != len(target):
            raise TransferFailed(f"a chunk of {frame.body_bytes} bytes, its head says {len(target)}")
        return digest(_read(stream, target))


def _read(stream: Stream, target: memoryview) -> Iterator[memoryview]:
    """Each piece as soon as it is there: its checksum is made out of the cache."""
    for at in range(0, len(target), PIECE_BYTES):
        piece = target[at : at + PIECE_BYTES]
        stream.read_into(piece)
        yield piece
