"""Shared memory between workers of one host: one copy, from the engine's blocks into memory that both have mapped.

The memory is a segment of the source, which the target returns, or the arena of a pool, which stores received bodies.
The checksum of a chunk is computed right after its copy, while the copy is in the cache.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dora.errors import SnapshotRefused, TransferFailed
from dora.kvtransfer.checksum import Digest
from dora.kvtransfer.device import DeviceMemory
from dora.kvtransfer.memory import Memory
from dora.kvtransfer.transports.arena import Arena, MappedArena
from dora.kvtransfer.transports.segments import MappedFile, MappedSegments, SegmentPool
from dora.kvtransfer.transports.transport import Landing, Receiver, Sender, Sum, copied, pool_landing, send_chunk
from dora.kvtransfer.wire import Frame, Stream


class ShmSender(Sender):
    name = "shm"
    chunk_bytes: ClassVar = 4 << 20

    def __init__(self, segments: SegmentPool, folder: Path, target: str) -> None:
        """``target`` is the owner of an arena that this pair may write to, if any."""
        self._segments = segments
        self._folder, self._target = folder, target
        self._arena: MappedArena | None = None
        self._place: np.ndarray | None = None
        self._at = 0  # offset in the arena
        self._lent: list[tuple[MappedFile, int]] = []  # segments believed to be lent to this pair, each with its turn
        self._current: MappedFile | None = None

    def attach(self, ask: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        answer = ask({})
        if "arena" in answer:
            mark = answer.get("mark")
            self._arena = MappedArena(self._folder, self._target, str(answer["arena"]), bytes(mark or b""))

    def begin(self, body_bytes: int) -> dict[str, Any]:
        if self._arena is not None:
            return {}
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

    def begun(self, answer: dict[str, Any]) -> None:
        if self._arena is not None:
            at, size_bytes = answer.get("at"), answer.get("size")
            if not isinstance(at, int) or not isinstance(size_bytes, int):
                raise TransferFailed("arena: no offset is named")
            self._at, self._place = at, self._arena.array(at, size_bytes)

    def chunk(self, stream: Stream, head: dict[str, Any], parts: Sequence[memoryview], digest: Digest) -> Sum:
        if self._arena is not None and self._place is not None:
            self._arena.touch(self._at + head["at"], head["size"])
            memory = self._place
        else:
            assert self._current is not None
            memory = self._current.raw
        target = memory[head["at"] : head["at"] + head["size"]]
        found = digest(copied(target, parts))
        send_chunk(stream, head)
        return found

    def finish(self) -> None:
        self._current = self._place = None

    def if_refused(self) -> Callable[[], object]:
        """A target that refuses may never return the segment."""
        return super().if_refused() if self._current is None else partial(self._segments.discard, *self._lent[-1])

    def abandon(self) -> None:
        """The target may have mapped the segment and still read it."""
        self._place = None
        if self._current is not None:
            self._segments.discard(*self._lent.pop())
            self._current = None

    def close(self) -> None:
        """Removes the lent segments, which nobody will return now; the target's mappings stay valid."""
        for segment, turn in self._lent:
            self._segments.discard(segment, turn)
        self._lent.clear()


class ShmReceiver(Receiver):
    def __init__(self, folder: Path, owner: str) -> None:
        self._segments = MappedSegments(folder, owner)

    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Memory | DeviceMemory) -> Landing:
        name, mark = opening.get("segment"), opening.get("mark")
        if not isinstance(name, str) or not isinstance(mark, bytes):
            raise SnapshotRefused("segment: no segment is named")
        return Landing(self._segments.array(name, mark, body_bytes), {})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        """The chunk was written before it was announced."""
        stream.drain(frame.body_bytes)
        return digest([target])


class ShmArenaReceiver(Receiver):
    """Receives each body of a pool at an offset of its arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def attach(self, offer: dict[str, Any]) -> dict[str, Any]:
        return {"arena": self._arena.name, "mark": self._arena.mark}

    def begin(self, opening: dict[str, Any], body_bytes: int, pool: Memory | DeviceMemory) -> Landing:
        body = pool_landing(body_bytes, pool)
        return Landing(body, {"at": self._arena.place(body), "size": body_bytes})

    def chunk(self, stream: Stream, frame: Frame, target: memoryview, digest: Digest) -> Sum:
        """The chunk was written before it was announced."""
        stream.drain(frame.body_bytes)
        return digest([target])
