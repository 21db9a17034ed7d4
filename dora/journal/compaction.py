"""Chooses log segments to delete. A segment with little live data is first copied forward.

Data is live if it belongs to a group that was neither trained on nor cancelled, or to a queued prompt. Everything else
in the log is repeated by the first record of each later segment (records.Standing). All segments together have at most
twice the live bytes, plus two segments.

The log holds the prompt of each live group under its present number. If only the ledger does, as after a group was
renumbered, the prompt is written to the log again before any segment is deleted.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from dora.journal import frames, records
from dora.journal.records import Column, LogRecord

PART_BYTES: Final = 4 << 20  # live data copied at once
TOKEN_BYTES: Final = 8
SPAN_BYTES: Final = 16  # about


@dataclass(slots=True)
class Share:
    """The bytes of a segment by owner. An owner is a request's number, or below 0 a prompt's arrival."""

    path: Path
    base: int
    end: int = -1  # position; -1: it is being written
    size_bytes: int = frames.HEADER_BYTES
    holes: int = 0  # found at a start, and reported
    missing: int = 0  # bytes at its end; the same
    owners: list[Column] = field(default_factory=list)
    owned_bytes: list[Column] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)  # owners of which it says what was asked for

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

    def live_bytes(self, live: "LiveOwners") -> int:
        self.gather()
        return int(self.owned_bytes[0][live.has(self.owners[0])].sum()) if self.owners else 0


class LiveOwners:
    """The live owners: requests by number, queued prompts by arrival."""

    def __init__(self, numbers: list[int], sizes: list[int], arrivals: list[int]) -> None:
        self._firsts = np.array(numbers, np.int64)
        self._ends = self._firsts + np.array(sizes, np.int64)
        self._arrivals = np.array(arrivals, np.int64)

    def has(self, owners: Column) -> Column:
        """Returns which owners are live: bool, one for each."""
        alive = np.isin(-owners, self._arrivals)
        if len(self._firsts):
            positions = np.searchsorted(self._firsts, owners, "right") - 1
            alive |= (positions >= 0) & (owners < self._ends[positions])
        return alive


class Compaction:
    """The compaction of one log; used by its thread only."""

    def __init__(self, segment_bytes: int, shares: dict[int, Share] | None = None) -> None:
        """``shares``: of the existing segments, by number."""
        self._segment_bytes = segment_bytes
        self._shares = shares or {}
        self._live = LiveOwners([], [], [])
        self.unasked: set[int] = set()  # owners that are alive, and of which no segment says what was asked for
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
        """Returns each segment's number and end. ``position``: the end of the last write."""
        known = [(number, share) for number, share in self._shares.items() if share.base >= 0]
        return [[number, position if number == self._writing else share.end] for number, share in known]

    def begun(self, number: int, path: Path, base: int) -> None:
        """Enters a new segment, which gets all further records."""
        if self._writing in self._shares:
            self._shares[self._writing].end = base
        self._shares[number] = Share(path, base)
        self._writing = number

    def count(self, record: LogRecord, size_bytes: int) -> None:
        count(self._shares[self._writing], record, size_bytes)
        self.unasked -= asked_by(record)

    def changed(self, numbers: list[int], sizes: list[int], arrivals: list[int]) -> None:
        """Updates the set of live owners with the result of ``Ledger.live_numbers``."""
        self._live = LiveOwners(numbers, sizes, arrivals)
        alive = {*numbers, *(-arrival for arrival in arrivals)}
        for share in self._shares.values():
            share.asked &= alive
        self.unasked = alive.difference(*(share.asked for share in self._shares.values()))
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
        """Returns the next records to copy from the chosen segment; empty: it can be deleted.

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
        tokens: list[records.Tokens] = []
        others: list[LogRecord] = []
        held = 0
        for _, body in frames.records(segment, share.end):
            record = self._alive(records.decoded(body))
            if record is None:
                continue
            held += len(body)
            if isinstance(record, records.Tokens):
                tokens.append(record)
            else:
                others.append(record)
            if held >= PART_BYTES:
                yield _part(others, tokens)
                tokens, others, held = [], [], 0
        if held:
            yield _part(others, tokens)
        if len(segment.holes) > share.holes:
            raise self._rotten(number, f"{segment.holes[-1]}, are damaged")
        if (missing := share.end - segment.end) > share.missing:
            raise self._rotten(number, f"{share.path}: {missing} bytes at its end are missing")

    def _rotten(self, number: int, why: str) -> OSError:
        self._damaged.add(number)
        return OSError(errno.EIO, why)

    def _alive(self, record: LogRecord) -> LogRecord | None:
        owners = owners_of(record)
        if owners is None:
            return None
        alive = self._live.has(owners[0])
        if alive.all():
            return record
        if not alive.any():
            return None
        if isinstance(record, records.Tokens):
            return records.only(record, alive)
        assert isinstance(record, records.Submitted)
        kept = [position for position, stays in enumerate(alive.tolist()) if stays]
        return replace(record, arrivals=[record.arrivals[k] for k in kept], prompts=[record.prompts[k] for k in kept])


def count(share: Share, record: LogRecord, size_bytes: int) -> None:
    """Counts a record of ``size_bytes`` to the segment's owners."""
    owners = owners_of(record)
    if owners is None:
        share.size_bytes += size_bytes
    else:
        share.add(*owners, size_bytes)
    share.asked |= asked_by(record)


def asked_by(record: LogRecord) -> set[int]:
    """Returns the owners whose prompt the record holds."""
    if isinstance(record, records.Admitted):
        return {record.number}
    if isinstance(record, records.Submitted):
        return {-arrival for arrival in record.arrivals}
    return set()


def owners_of(record: LogRecord) -> tuple[Column, Column] | None:
    """Returns the owners of a record's bytes and the bytes of each; None if it has none."""
    if isinstance(record, records.Tokens):
        owned = record.counts.astype(np.int64) * TOKEN_BYTES + SPAN_BYTES
        return record.numbers, owned + record.routed_bytes if len(record.routed_bytes) else owned
    if isinstance(record, records.Verdict):
        return np.array([record.number]), np.array([64 + len(record.log)])
    if isinstance(record, records.Admitted):
        return np.array([record.number]), np.array([_prompt_bytes(record.prompt)])
    if isinstance(record, records.Submitted):
        return -np.array(record.arrivals, np.int64), np.array([_prompt_bytes(each) for each in record.prompts])
    return None


def _prompt_bytes(prompt: list[object]) -> int:
    return 64 + sum(len(part) for part in prompt if isinstance(part, str | bytes))


def _part(others: list[LogRecord], tokens: list[records.Tokens]) -> list[LogRecord]:
    return [*others, records.joined(tokens)] if tokens else others
