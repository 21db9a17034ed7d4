"""Blocks that several samples of one prompt share at their source move once to each worker.

    source                                                  target
    r1: first round ── key K: the prompt's blocks, ... ──▶  reservation of r1, which offers them
    r2: shares 7 blocks with r1 ── "7 of K", the others ─▶  claims them for the reservation of r2

The source names blocks only by a round that brought them: r2 held the very blocks of r1 when that round began, and has
held them since. So what is claimed is bitwise what would have come. The target offers a round for as long as a request
there has its blocks. Whoever names one that is there no more is told so before anything is sent, and sends it all.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol

from dora.errors import SnapshotRefused
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.snapshot import NO_PREFIX, Prefix, Stay
from dora.kvtransfer.transfer import Sent

NOTES_MAX: Final = 4096  # requests at a source of which it is known what they share; then the oldest moves whole


@dataclass(frozen=True, slots=True)
class _Note:
    """What a request shares with the round of another one."""

    peer: tuple[str, int]
    stay: Stay  # of the request that shares; in another one it has other blocks
    blocks: int
    done: "Future[Sent]"


class SentPrefixes:
    """At the source, in the engine's thread: which first rounds went where, and who else has their blocks."""

    def __init__(self) -> None:
        self._notes: OrderedDict[str, _Note] = OrderedDict()

    def note(self, peer: Peer, done: "Future[Sent]", siblings: Mapping[str, tuple[Stay, int]]) -> None:
        """A round begins now; ``siblings``: requests that have its first blocks too, their stay, and how many."""
        for request_id, (stay, blocks) in siblings.items():
            self._notes.pop(request_id, None)
            self._notes[request_id] = _Note((peer.worker_id, peer.epoch), stay, blocks, done)
        while len(self._notes) > NOTES_MAX:
            self._notes.popitem(last=False)

    def find(self, peer: Peer, request_id: str, stay: Stay) -> Prefix | None:
        """The first blocks of a request that are at this worker; None while they are on their way there."""
        note = self._notes.get(request_id)
        if note is None or note.stay != stay or note.peer != (peer.worker_id, peer.epoch):
            return NO_PREFIX
        if not note.done.done():
            return None
        if note.done.exception() is not None or not note.done.result().is_ahead:
            return NO_PREFIX
        return Prefix(note.done.result().key, note.blocks)


class Blocks(Protocol):
    """An engine's blocks, by their ids. Its thread alone uses it."""

    def pin(self, block_ids: Sequence[int]) -> None:
        """Each has one holder more."""

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Each has one holder less; one that has none left is free."""

    def holders(self, block_id: int) -> int: ...


@dataclass(slots=True, eq=False)
class _Round:
    block_ids: list[int]
    is_pinned: bool = False  # held here too; before, by the reservation into which it was written
    was_claimed: bool = False
    claims: list[int] = field(default_factory=list)  # how many of its first blocks each


class Prefixes:
    """At the target: first rounds whose blocks are there, and may be claimed.

    A claim keeps its blocks until the reservation that made it has been taken in or released. Without one a round keeps
    no block that nobody else has: ``sweep`` lets those go, before the engine looks for free ones. So there are never
    more rounds than blocks.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._rounds: dict[str, _Round] = {}
        self._lock = threading.Lock()

    # Any thread.

    def offer(self, key: str, block_ids: Sequence[int]) -> None:
        """A round has been written into these blocks, which a reservation holds."""
        with self._lock:
            self._rounds[key] = _Round(list(block_ids))

    def withdraw(self, key: str) -> bool:
        """The blocks of this round are to be written anew. False: somebody has claimed them, so they must not be."""
        with self._lock:
            found = self._rounds.get(key)
            if found is None or found.was_claimed:
                return found is None
            del self._rounds[key]
            return True

    def claim(self, prefix: Prefix) -> tuple[int, ...]:
        """The blocks of a prefix, which stay as they are until it is given up. Raises SnapshotRefused."""
        with self._lock:
            found = self._rounds.get(prefix.key)
            here = 0 if found is None else len(found.block_ids)
            if found is None or not 0 < prefix.blocks <= here:
                raise SnapshotRefused(f"prefix of {prefix.blocks} blocks: {here} of round {prefix.key} are here")
            found.was_claimed = True
            found.claims.append(prefix.blocks)
            return tuple(found.block_ids[: prefix.blocks])

    def give_up(self, prefix: Prefix) -> None:
        """Undoes ``claim``."""
        if prefix.blocks:
            with self._lock:
                self._rounds[prefix.key].claims.remove(prefix.blocks)

    # The engine's thread.

    def keep(self, key: str) -> None:
        """The reservation that has the blocks of this round is about to pass them on, or back."""
        with self._lock:
            found = self._rounds.get(key)
            if found is not None and not found.is_pinned:
                self._blocks.pin(found.block_ids)
                found.is_pinned = True

    def sweep(self) -> None:
        """Lets go what is neither claimed nor held by a request."""
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
