"""Which segments of the log can go: those of which nothing is alive, and those of which little is, once that was
written anew.

Alive is what belongs to a group that was neither trained on nor cancelled, or to a prompt that is queued. Whatever else
a log says, the first record of each later segment says too (facts.Standing). All segments together have at most
twice the bytes that are alive, and two segments more.

Of who is alive the log says what was asked for, under the number that it has now. Where only the ledger does, as of a
group that was renumbered, it is written anew before any segment goes.
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

PART_BYTES: Final = 4 << 20  # of what is alive, written anew at once
TOKEN_BYTES: Final = 8
SPAN_BYTES: Final = 16  # about


@dataclass(slots=True)
class Share:
    """A segment, and whose its bytes are. Owners are numbers of requests, and below 0 arrivals of prompts."""

    path: Path
    base: int
    end: int = -1  # position; -1: it is being written
    size_bytes: int = frames.HEADER_BYTES
    holes: int = 0  # that a start has found in it, and told of
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
        """One cell an owner."""
        if len(self.owners) > 1:
            owners, positions = np.unique(np.concatenate(self.owners), return_inverse=True)
            owned = np.bincount(positions, np.concatenate(self.owned_bytes)).astype(np.int64)
            self.owners, self.owned_bytes = [owners], [owned]

    def live_bytes(self, live: "Live") -> int:
        self.gather()
        return int(self.owned_bytes[0][live.has(self.owners[0])].sum()) if self.owners else 0


class Live:
    """Who is alive: requests by their numbers, queued prompts by their arrivals."""

    def __init__(self, numbers: list[int], sizes: list[int], arrivals: list[int]) -> None:
        self._firsts = np.array(numbers, np.int64)
        self._ends = self._firsts + np.array(sizes, np.int64)
        self._arrivals = np.array(arrivals, np.int64)

    def has(self, owners: Column) -> Column:
        """bool, one an owner."""
        alive = np.isin(-owners, self._arrivals)
        if len(self._firsts):
            positions = np.searchsorted(self._firsts, owners, "right") - 1
            alive |= (positions >= 0) & (owners < self._ends[positions])
        return alive


class Compaction:
    """Of one log; for its thread alone."""

    def __init__(self, segment_bytes: int, shares: dict[int, Share] | None = None) -> None:
        """``shares``: of the segments that are there already, by their numbers."""
        self._segment_bytes = segment_bytes
        self._shares = shares or {}
        self._live = Live([], [], [])
        self.unasked: set[int] = set()  # owners that are alive, and of which no segment says what was asked for
        self._chosen: int | None = None  # the segment that is to go next
        self._parts: Iterator[list[LogRecord]] | None = None
        self._writing = -1
        self._damaged: set[int] = set()  # segments that stay while something is alive: a start tells what is lost

    @property
    def works(self) -> bool:
        """Whether there is something to do."""
        return self._chosen is not None

    @property
    def size_bytes(self) -> int:
        """Of all segments."""
        return sum(share.size_bytes for share in self._shares.values())

    @property
    def live_bytes(self) -> int:
        """Of these, what belongs to somebody who is alive."""
        return sum(share.live_bytes(self._live) for share in self._shares.values())

    @property
    def segments(self) -> int:
        return len(self._shares)

    def ends(self, position: int) -> list[list[int]]:
        """Of each segment its number and the position behind it; ``position``: behind that which was written last."""
        known = [(number, share) for number, share in self._shares.items() if share.base >= 0]
        return [[number, position if number == self._writing else share.end] for number, share in known]

    def begun(self, number: int, path: Path, base: int) -> None:
        """A new segment is written from now on."""
        if self._writing in self._shares:
            self._shares[self._writing].end = base
        self._shares[number] = Share(path, base)
        self._writing = number

    def count(self, record: LogRecord, size_bytes: int) -> None:
        """A fact has been written, into the segment that is written now."""
        count(self._shares[self._writing], record, size_bytes)
        self.unasked -= asked_by(record)

    def changed(self, numbers: list[int], sizes: list[int], arrivals: list[int]) -> None:
        """Who is alive has changed, as ``Ledger.live_numbers`` says."""
        self._live = Live(numbers, sizes, arrivals)
        alive = {*numbers, *(-arrival for arrival in arrivals)}
        for share in self._shares.values():
            share.asked &= alive
        self.unasked = alive.difference(*(share.asked for share in self._shares.values()))
        if self._chosen is None:
            self._choose()

    def _choose(self) -> None:
        """The segment that is to go next, if one is."""
        alive = {number: share.live_bytes(self._live) for number, share in self._shares.items()}
        over = self.size_bytes > 2 * sum(alive.values()) + 2 * self._segment_bytes
        staying = {self._writing} | {number for number in self._damaged if alive.get(number)}
        closed = [number for number in self._shares if number not in staying]
        least = min(closed, key=lambda number: alive[number] / self._shares[number].size_bytes, default=None)
        if least is not None and (over or not alive[least]):
            self._chosen = least
            self._parts = self._moved(least) if alive[least] else iter(())

    def next_part(self) -> list[LogRecord]:
        """What is to be written anew of the chosen segment before it may go; empty: nothing more is.

        Raises OSError where it cannot be read: it stays, and is read from the beginning another time.
        """
        assert self._parts is not None
        try:
            return next(self._parts, [])
        except OSError:
            self.give_up()
            raise

    def remove(self) -> None:
        """All that was alive in the chosen segment is on disk elsewhere: it goes. Raises OSError."""
        assert self._chosen is not None
        with suppress(FileNotFoundError):
            os.unlink(self._shares[self._chosen].path)
        del self._shares[self._chosen]
        self._chosen = self._parts = None
        self._choose()

    def give_up(self) -> None:
        """What was to be written anew could not be: from the beginning, another time."""
        self._chosen = self._parts = None

    def _moved(self, number: int) -> Iterator[list[LogRecord]]:
        """What is alive in a segment, in parts. Raises OSError where it cannot be read, or not all of it."""
        share = self._shares[number]
        segment = frames.opened(share.path)
        if segment is None:
            raise self._rotten(number, f"{share.path}: its header is damaged")
        tokens: list[records.Tokens] = []
        others: list[LogRecord] = []
        held = 0
        for _, body in frames.records(segment, share.end):
            record = self._alive(records.decoded(body, segment.schema))
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
        """What of a fact belongs to somebody who is alive; None: nothing."""
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
    """A fact of so many bytes is in this segment."""
    owners = owners_of(record)
    if owners is None:
        share.size_bytes += size_bytes
    else:
        share.add(*owners, size_bytes)
    share.asked |= asked_by(record)


def asked_by(record: LogRecord) -> set[int]:
    """The owners of which a fact says what was asked for."""
    if isinstance(record, records.Admitted):
        return {record.number}
    if isinstance(record, records.Submitted):
        return {-arrival for arrival in record.arrivals}
    return set()


def owners_of(record: LogRecord) -> tuple[Column, Column] | None:
    """To whom a fact belongs, and how many bytes of it to each; None: to nobody."""
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
    """About what a prompt takes in the log."""
    return 64 + sum(len(part) for part in prompt if isinstance(part, str | bytes))


def _part(others: list[LogRecord], tokens: list[records.Tokens]) -> list[LogRecord]:
    return [*others, records.joined(tokens)] if tokens else others
