"""Shared memory, between workers of one host: one copy, out of the engine's blocks into a segment both have mapped.

The checksum of a chunk is made right after its copy, from the copy and out of the cache.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from dora.errors import SnapshotRefused, TransferFailed
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.memory import Pool
from dora.kvtransfer.segments import MappedSegments, Segment, SegmentPool
from dora.kvtransfer.transport import Landing, Receiver, Sender, Sum, copied, send_chunk
from dora.kvtransfer.wire import Frame, Stream


class ShmSender(Sender):
    name = "shm"
    chunk_bytes: ClassVar = 4 << 20

    def __init__(self, segments: SegmentPool) -> None:
        self._segments = segments
        self._lent: list[tuple[Segment, int]] = []  # to this pair, as far as is known; and its turn
        self._current: Segment | None = None

    def begin(self, body_bytes: int) -> dict[str, Any]:
        try:
            segment = self._segments.lend(body_bytes)
        except SnapshotRefused as error:
            raise TransferFailed(str(error)) from error
        if segment is None:
            lent = self._segments.lent_bytes()
            raise TransferFailed(f"body bytes = {body_bytes}: too much is in flight, {lent} bytes")
        self._lent = [(each, turn) for each, turn in self._lent if each.lent and each.turn == turn]
        self._lent.append((segment, segment.turn))
        self._current = segment
        return {"segment": segment.name, "mark": segment.mark}

    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> Sum:
        assert self._current is not None
        target = self._current.raw[head["at"] : head["at"] + head["size"]]
        found = digest(copied(target, parts))
        send_chunk(stream, head)
        return found

    def finish(self) -> None:
        self._current = None

    def abandon(self) -> None:
        """The target may have mapped the segment, and still look at it."""
        if self._current is not None:
            self._segments.discard(*self._lent.pop())
            self._current = None

    def close(self) -> None:
        """Nobody says any more when the target needs them no longer; it keeps what it has mapped."""
        for segment, turn in self._lent:
            self._segments.discard(segment, turn)
        self._lent.clear()


class ShmReceiver(Receiver):
    def __init__(self, folder: Path, owner: str) -> None:
        self._segments = MappedSegments(folder, owner)

    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Pool) -> Landing:
        name, mark = opening.get("segment"), opening.get("mark")
        if not isinstance(name, str) or not isinstance(mark, bytes):
            raise SnapshotRefused("segment: none is named")
        return Landing(self._segments.array(name, mark, body_bytes), {})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        """It is there already."""
        stream.drain(frame.body_bytes)
        return digest([target])
