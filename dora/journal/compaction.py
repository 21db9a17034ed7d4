"""Chooses log segments to delete. A segment with little live data is first copied forward.

Data is live if it belongs to a group that was neither trained on nor cancelled, or to a queued prompt. Everything else
in the log is repeated by the first record of each later segment (records.Checkpoint). All segments together have at
most twice the live bytes, plus two segments.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from dora.journal import frames, records
from dora.journal.content import LiveOwners, owned_bytes
from dora.journal.durable import Durable
from dora.journal.records import Column, LogRecord

PART_BYTES: Final = 4 << 20  # live data copied at once


@dataclass(slots=True)
class Share:
    """The bytes of a segment by owner."""

    path: Path
    base: int
    end: int = -1  # position; -1: it is being written
    size_bytes: int = frames.HEADER_BYTES
    holes: int = 0  # found at a start, and reported
    missing: int = 0  # bytes at its end; the same
    owners: list[Column] = field(default_factory=list)
    owned_bytes: list[Column] = field(default_factory=list)

    def add(self, owners: Column, owned_bytes: Column, size_bytes: int) -> None:
        self.owners.append(owners)
        self.owned_bytes.append(owned_bytes)
        self.size_bytes += size_bytes
        if len(self.owners) >= 4096:
            self.gather()

    def gather(self) -> None:
        """Merges the cells of each owner."""
        if len(self.owners) > 1:
            owners, positions = np.unique(np.concatenate(self.owners), return_inverse=True)
            owned = np.bincount(positions, np.concatenate(self.owned_bytes)).astype(np.int64)
            self.owners, self.owned_bytes = [owners], [owned]

    def live_bytes(self, live: LiveOwners) -> int:
        self.gather()
        return int(self.owned_bytes[0][live.has(self.owners[0])].sum()) if self.owners else 0


class Compaction:
    """The compaction of one log; used by its thread only."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._shares: dict[int, Share] = {}  # by the number of the segment
        self._live = LiveOwners(Durable())
        self._admitted: dict[int, int] = {}  # by group: the segment with its latest Admitted
        self._chosen: int | None = None  # the segment that is to go next
        self._parts: Iterator[list[LogRecord]] | None = None
        self._writing = -1
        self._damaged: set[int] = set()  # kept while any data is live, because a start reports the losses from them

    @property
    def works(self) -> bool:
        return self._chosen is not None

    @property
    def size_bytes(self) -> int:
        return sum(share.size_bytes for share in self._shares.values())

    @property
    def live_bytes(self) -> int:
        return sum(share.live_bytes(self._live) for share in self._shares.values())

    @property
    def segments(self) -> int:
        return len(self._shares)

    def ends(self, position: int) -> list[list[int]]:
        """Returns each segment's number and end. ``position`` is the end of the last write."""
        known = [(number, share) for number, share in self._shares.items() if share.base >= 0]
        return [[number, position if number == self._writing else share.end] for number, share in known]

    def enter(self, number: int, share: Share) -> None:
        """Enters an existing segment, after those before it."""
        self._shares[number] = share

    def begun(self, number: int, path: Path, base: int) -> None:
        """Enters a new segment, which gets all further records."""
        if self._writing in self._shares:
            self._shares[self._writing].end = base
        self._shares[number] = Share(path, base)
        self._writing = number

    def count(self, record: LogRecord, size_bytes: int, number: int | None = None) -> None:
        """Counts a record of ``size_bytes`` to its owners. ``number`` is its segment's, by default the last."""
        number = self._writing if number is None else number
        share, owned = self._shares[number], owned_bytes(record)
        if owned is None:
            share.size_bytes += size_bytes
        else:
            share.add(*owned, size_bytes)
        if isinstance(record, records.Admitted):
            self._admitted[record.number] = number

    def changed(self, durable: Durable) -> None:
        """Updates the set of live owners."""
        self._live = LiveOwners(durable)
        self._admitted = {group: number for group, number in self._admitted.items() if group in durable.groups}
        if self._chosen is None:
            self._choose()

    def _choose(self) -> None:
        alive = {number: share.live_bytes(self._live) for number, share in self._shares.items()}
        over = self.size_bytes > 2 * sum(alive.values()) + 2 * self._segment_bytes
        staying = {self._writing} | {number for number in self._damaged if alive.get(number)}
        closed = [number for number in self._shares if number not in staying]
        least = min(closed, key=lambda number: alive[number] / self._shares[number].size_bytes, default=None)
        if least is not None and (over or not alive[least]):
            self._chosen = least
            self._parts = self._moved(least) if alive[least] else iter(())

    def next_part(self) -> list[LogRecord]:
        """Returns the next records to copy from the chosen segment, or none if it can be deleted.

        Raises OSError if the segment is unreadable: it is kept, and a later attempt reads it from the beginning.
        """
        assert self._parts is not None
        try:
            return next(self._parts, [])
        except OSError:
            self.give_up()
            raise

    def remove(self) -> None:
        """Deletes the chosen segment, whose live data is durable elsewhere. Raises OSError."""
        assert self._chosen is not None
        with suppress(FileNotFoundError):
            os.unlink(self._shares[self._chosen].path)
        del self._shares[self._chosen]
        self._chosen = self._parts = None
        self._choose()

    def give_up(self) -> None:
        """Abandons a failed copy. A later attempt starts at the beginning."""
        self._chosen = self._parts = None

    def _moved(self, number: int) -> Iterator[list[LogRecord]]:
        share = self._shares[number]
        segment = frames.opened(share.path)
        if segment is None:
            raise self._rotten(number, f"{share.path}: its header is damaged")
        part: list[LogRecord] = []
        held = 0
        for _, code, body in frames.records(segment, share.end):
            record = records.decoded(code, body)
            if owned_bytes(record) is None or not (alive := self._live.of([record])):
                continue
            if isinstance(record, records.Admitted) and self._admitted.get(record.number) != number:
                continue  # a later record has replaced it
            part += alive
            held += len(body)
            if held >= PART_BYTES:
                yield _with_tokens_joined(part)
                part, held = [], 0
        if held:
            yield _with_tokens_joined(part)
        if len(segment.holes) > share.holes:
            raise self._rotten(number, f"{segment.holes[-1]}, are damaged")
        if (missing := share.end - segment.end) > share.missing:
            raise self._rotten(number, f"{share.path}: {missing} bytes at its end are missing")

    def _rotten(self, number: int, why: str) -> OSError:
        self._damaged.add(number)
        return OSError(errno.EIO, why)


def _with_tokens_joined(part: list[LogRecord]) -> list[LogRecord]:
    tokens = [record for record in part if isinstance(record, records.Tokens)]
    others: list[LogRecord] = [record for record in part if not isinstance(record, records.Tokens)]
    return [*others, records.joined(tokens)] if tokens else others
