"""TCP between any two workers: chunks follow their frames on the pair's own stream.

The kernel copies them from the engine's blocks to their destination, with no copy in between. Other threads compute the
checksums meanwhile.
"""

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, ClassVar

from dora.errors import TransferFailed
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.device import DeviceMemory
from dora.kvtransfer.memory import Memory
from dora.kvtransfer.transports.transport import Landing, Receiver, Sender, Sum, pool_landing, send_chunk
from dora.kvtransfer.wire import Frame, Stream


class TcpSender(Sender):
    name = "tcp"
    chunk_bytes: ClassVar = 8 << 20

    def __init__(self, helpers: Executor) -> None:
        self._helpers = helpers

    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> Sum:
        summing = self._helpers.submit(digest, parts)
        send_chunk(stream, head, parts)
        return summing.result


class TcpReceiver(Receiver):
    def __init__(self, helpers: Executor) -> None:
        self._helpers = helpers

    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Memory | DeviceMemory) -> Landing:
        return Landing(pool_landing(body_bytes, pool), {})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        if frame.body_bytes != len(target):
            raise TransferFailed(f"a chunk has {frame.body_bytes} bytes, but its head says {len(target)}")
        stream.read_into(target)
        return self._helpers.submit(digest, [target]).result
