"""Moves blocks that several samples of one prompt share at their source to each worker once.

    source                                                  target
    r1: first round ── key K: the prompt's blocks, ... ──▶  reservation of r1, which offers them
    r2: shares 7 blocks with r1 ── "7 of K", the others ─▶  claims them for the reservation of r2

The source names blocks only by a round that carried them: r2 held the same blocks as r1 when that round began, and has
held them since. So a claim is bitwise equal to a transfer. The target offers a round while a request there has its
blocks. A sender that names a round that has ended is told so before it sends, and then sends everything.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol

from dora.errors import SnapshotRefused
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.snapshot import NO_PREFIX, Prefix, SegmentId
from dora.kvtransfer.transfer import Sent

NOTES_MAX: Final = 4096  # requests at a source of which it is known what they share; then the oldest moves whole


@dataclass(frozen=True, slots=True)
class _Note:
    """The blocks that a request shares with another one's round."""

    peer: tuple[str, int]
    segment: SegmentId  # of the sharing request; in another segment it has other blocks
    blocks: int
    first: "Future[Sent]"  # the round's first part, by whose key the target knows it
    done: "Future[Sent]"  # the part that brings the last of these blocks


class SentPrefixes:
    """At the source, in the engine's thread: the targets of first rounds, and the requests that share their blocks."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, _Note] = OrderedDict()

    def note(
        self,
        peer: Peer,
        first: "Future[Sent]",
        done: "Future[Sent]",
        siblings: Mapping[str, tuple[SegmentId, int]],
    ) -> None:
        """Enters a part of a first round that begins now. ``siblings`` are requests that share blocks of it and of the
        parts before it, with their segment and the count.
        """
        for request_id, (segment, blocks) in siblings.items():
            self._notes.pop(request_id, None)
            self._notes[request_id] = _Note((peer.worker_id, peer.epoch), segment, blocks, first, done)
        while len(self._notes) > NOTES_MAX:
            self._notes.popitem(last=False)

    def find(self, peer: Peer, request_id: str, segment: SegmentId) -> Prefix | None:
        """Returns the first blocks of a request that are at this worker, or None while they are being sent."""
        note = self._notes.get(request_id)
        if note is None or note.segment != segment or note.peer != (peer.worker_id, peer.epoch):
            return NO_PREFIX
        if not note.done.done():
            return None
        if note.done.exception() is not None or not note.done.result().is_ahead:
            return NO_PREFIX
        return Prefix(note.first.result().key, note.blocks)


class Blocks(Protocol):
    """An engine's blocks by id. Used by its thread only."""

    def pin(self, block_ids: Sequence[int]) -> None:
        """Adds a holder to each block."""

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Removes a holder from each block; a block without one is free."""

    def holders(self, block_id: int) -> int: ...


@dataclass(slots=True, eq=False)
class _Round:
    block_ids: list[int]
    is_pinned: bool = False  # held here too; before, by the reservation into which it was written
    was_claimed: bool = False
    claims: list[int] = field(default_factory=list)  # how many of its first blocks each


class Prefixes:
    """At the target: first rounds whose blocks are present and may be claimed.

    A claim keeps its blocks until its reservation was taken in or released. Without a claim a round keeps no block
    alone: ``sweep`` drops such rounds before the engine looks for free blocks. So rounds never outnumber blocks.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._rounds: dict[str, _Round] = {}
        self._lock = threading.Lock()

    # Any thread.

    def offer(self, key: str, block_ids: Sequence[int]) -> None:
        """Offers a round that was written into these blocks, which a reservation holds: all of its parts so far."""
        with self._lock:
            found = self._rounds.setdefault(key, _Round([]))
            found.block_ids += block_ids[len(found.block_ids) :]

    def withdraw(self, key: str) -> bool:
        """Withdraws a round whose blocks are to be rewritten. Returns False if they are claimed and must not be."""
        with self._lock:
            found = self._rounds.get(key)
            if found is None or found.was_claimed:
                return found is None
            del self._rounds[key]
            return True

    def claim(self, prefix: Prefix) -> tuple[int, ...]:
        """Claims the blocks of a prefix, which do not change until ``give_up``. Raises SnapshotRefused."""
        with self._lock:
            found = self._rounds.get(prefix.key)
            here = 0 if found is None else len(found.block_ids)
            if found is None or not 0 < prefix.blocks <= here:
                raise SnapshotRefused(f"prefix of {prefix.blocks} blocks: {here} of round {prefix.key} are here")
            found.was_claimed = True
            found.claims.append(prefix.blocks)
            return tuple(found.block_ids[: prefix.blocks])

    def give_up(self, prefix: Prefix) -> None:
        if prefix.blocks:
            with self._lock:
                self._rounds[prefix.key].claims.remove(prefix.blocks)

    # The engine's thread.

    def keep(self, key: str) -> None:
        """Pins a round's blocks before its reservation passes them on or returns them."""
        with self._lock:
            found = self._rounds.get(key)
            if found is not None and not found.is_pinned:
                self._blocks.pin(found.block_ids)
                found.is_pinned = True

    def sweep(self) -> None:
        """Drops rounds whose blocks are neither claimed nor held by a request."""
        if not self._rounds:
            return
        with self._lock:
            for key, found in list(self._rounds.items()):
                end = len(found.block_ids)
                claimed = max(found.claims, default=0)
                while found.is_pinned and end > claimed and self._blocks.holders(found.block_ids[end - 1]) == 1:
                    end -= 1
                if end < len(found.block_ids):
                    self._blocks.unpin(found.block_ids[end:])
                    del found.block_ids[end:]
                if not found.block_ids:
                    del self._rounds[key]
