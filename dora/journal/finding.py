"""Opens the state folder of an earlier incarnation and finds its damage.

    FOLDER/log/NNNNNNNN.seg   the log (frames.py)
    FOLDER/ledger.db          the ledger (ledger.py)

Data cut short by a crash, at the end of the log, was never acknowledged: it is removed and reported. Other damage is
reported by file and offset. If the ledger has what the damaged records held, only tokens are lost, and their groups are
generated again. Otherwise the start is refused.
"""

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from dora.errors import InvalidValue
from dora.journal import frames, records
from dora.journal.compaction import Compaction, LiveOwners, Share, count
from dora.journal.content import Content, LiveContent, Requests
from dora.journal.frames import Hole, LogSegment
from dora.journal.ledger import LEDGER_VERSION, Ledger, LiveGroup, disk_fault
from dora.journal.log import DEFAULT_SIZES, LOG_FOLDER, Sizes
from dora.journal.records import LogRecord

log = logging.getLogger("dora.journal")

LEDGER_FILE: Final = "ledger.db"


@dataclass(slots=True)
class Found:
    """The content of a state folder. ``said``: a message for each thing that was cut off, damaged or rebuilt."""

    ledger: Ledger
    groups: list[LiveGroup]  # by their numbers
    requests: Requests
    compaction: Compaction
    number: int  # of the last segment
    position: int  # behind it
    said: list[str]

    @property
    def is_new(self) -> bool:
        """Returns whether no service has used the folder."""
        return bool(self.ledger.values["life"] < 0)


@dataclass(slots=True)
class _Read:
    """The live data of the segments that the ledger does not have."""

    kept: LiveContent = field(default_factory=LiveContent)
    shares: dict[int, Share] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)  # of segments by number, as later segments record them
    end: int = 0

    def says_end(self, number: int, end: int) -> None:
        """Enters the end of a segment that a later segment records."""
        self.ends[number] = max(end, self.ends.get(number, end))


def find(folder: Path, sizes: Sizes = DEFAULT_SIZES) -> Found:
    """Opens ``folder``, which is created if absent, and prepares it for a service to continue.

    Raises InvalidValue if that would lose acknowledged data; OSError.
    """
    try:
        (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
        return _found(folder, sizes, folder / LEDGER_FILE, repairs=True)
    except sqlite3.Error as error:
        raise (disk_fault(error) or error) from error


@contextmanager
def finding(folder: Path, sizes: Sizes = DEFAULT_SIZES) -> Iterator[Found]:
    """Finds what ``find`` would, and changes nothing: of the ledger, it reads a copy. Raises as ``find`` does."""
    with TemporaryDirectory(prefix="dora-ledger-") as copies:
        copy = Path(copies) / LEDGER_FILE
        try:
            for file in folder.glob(f"{LEDGER_FILE}*"):
                if file.name in (LEDGER_FILE, f"{LEDGER_FILE}-wal"):
                    shutil.copyfile(file, copy.with_name(file.name))
            found = _found(folder, sizes, copy, repairs=False)
        except sqlite3.Error as error:
            raise (disk_fault(error) or error) from error
        try:
            yield found
        finally:
            found.ledger.close()


def _found(folder: Path, sizes: Sizes, ledger_file: Path, *, repairs: bool) -> Found:
    """``ledger_file``: the ledger or a copy of it. ``repairs``: what a crash has cut short is removed from the log."""
    log_folder = folder / LOG_FOLDER
    said: list[str] = []
    segments = _segments(log_folder, said, repairs)
    ledger = _ledger(ledger_file, folder / LEDGER_FILE, said)
    try:
        if not segments and ledger.values["position"]:
            raise _lost(folder, f"{log_folder} is empty, though the ledger has what it said: it was removed", said)
        read = _read(segments, ledger, said, repairs)
        groups, arrivals = ledger.lacking()
        if groups or arrivals:
            what = ", ".join([*groups[:8], *(f"queued prompt {arrival}" for arrival in arrivals[:8])])
            raise _lost(folder, f"of {what}, what was asked for is lost", said)
        live = ledger.groups()
        requests = Content(live).of(read.kept.tokens, read.kept.verdicts)
    except BaseException:
        ledger.close()
        raise
    compaction = Compaction(sizes.segment_bytes, read.shares)
    compaction.changed(*ledger.live_numbers())
    number = max((segment.number for segment in segments), default=0)
    for line in said:
        log.warning("%s", line)
    return Found(ledger, live, requests, compaction, number, ledger.values["position"], said)


def _segments(folder: Path, said: list[str], repairs: bool) -> list[LogSegment]:
    """Returns the segments by number. A last segment without a record is left out."""
    found = []
    paths = sorted(folder.glob(f"[0-9]*{frames.SUFFIX}"))
    for index, path in enumerate(paths):
        segment = frames.opened(path)
        if segment is not None:
            found.append(segment)
        elif index == len(paths) - 1 and not _has_records(path):
            said.append(f"{path}: cut short by a crash before anything was in it")
            if repairs:
                path.unlink()
        else:
            said.append(f"{path}: its header is damaged, and nothing of it can be read")
            found.append(LogSegment(path, int(path.stem), -1, path.stat().st_size))
    return found


def _has_records(path: Path) -> bool:
    """Returns whether a segment with a damaged header has a whole record, so that it had been written."""
    return next(frames.records(LogSegment(path, 0, 0)), None) is not None


def _ledger(path: Path, named: Path, said: list[str]) -> Ledger:
    """Opens the ledger, or creates a new one if it is damaged or of another release: the log has all of its content.

    ``named``: the path for messages.
    """
    if not path.exists():
        return Ledger(path)
    ledger: Ledger | None = None
    try:
        ledger = Ledger(path, named)
        ledger.check()
        if ledger.version == LEDGER_VERSION:
            return ledger
        why = f"of version {ledger.version}"
    except (sqlite3.Error, ValueError) as error:
        if isinstance(error, sqlite3.Error) and (fault := disk_fault(error)) is not None:
            raise fault from error
        why = f"damaged ({error})"
    if ledger is not None:
        ledger.close()
    said.append(f"{named}: {why}; it is made anew from the log")
    for left in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        with suppress(FileNotFoundError):
            left.rename(left.with_name(f"{left.name}.damaged"))
    return Ledger(path)


def _read(segments: list[LogSegment], ledger: Ledger, said: list[str], repairs: bool) -> _Read:
    """Reads the segments and updates the ledger from them. Works segment by segment, so only live data is held."""
    known = ledger.values["position"]
    read = _Read()
    for index, segment in enumerate(segments):
        following = next((each.base for each in segments[index + 1 :] if each.base >= 0), None)
        if segment.base < 0:
            if following > known if following is not None else _end_of(segments, index) != known:
                raise _lost(segment.path.parent.parent, "and the ledger does not have what it said", said)
            size_bytes = max(segment.size_bytes, frames.HEADER_BYTES)
            read.shares[segment.number] = Share(segment.path, -1, -1, size_bytes)  # nobody's: it can go
            continue
        raw_records = list(frames.records(segment, following))
        cut = _torn_at(segment) if index == len(segments) - 1 else None
        if cut is not None:
            raw_records = [(offset, body) for offset, body in raw_records if offset < cut]
            said.append(f"{segment.path}: the last {segment.size_bytes - cut} bytes were cut short by a crash")
            _cut(segment, cut, repairs)
        share = read.shares[segment.number] = Share(segment.path, segment.base, segment.end)
        read.says_end(segment.number - 1, segment.base)
        for hole in segment.holes:
            if cut is None or hole.offset < cut:
                _damaged(segment, hole, known, following is not None, said)
                share.holes += 1
        _take(read, share, segment, raw_records, ledger, known)
        read.end = segment.end
    for number, share in read.shares.items():
        _look_for_its_end(share, read.ends.get(number, -1), said)
    ledger.apply([], max(read.end, known))
    if read.end < known:
        said.append(f"the log ends {known - read.end} bytes before what the ledger has: tokens are lost")
    return read


def _end_of(segments: list[LogSegment], index: int) -> int | None:
    """Returns the end of the last segment, as the one before it records; None: unknown.

    A complete ledger has the same end. A ledger may be ahead if the log lost data earlier.
    """
    segment, before = segments[index], segments[index - 1] if index else None
    if before is None or before.base < 0 or before.number != segment.number - 1:
        return None
    return before.end + segment.size_bytes - frames.HEADER_BYTES


def _look_for_its_end(share: Share, end: int, said: list[str]) -> None:
    """A segment cut between two records looks whole; later segments record where it ended."""
    if share.base >= 0 and share.end < end:
        share.missing = end - share.end
        said.append(f"{share.path}: {share.missing} bytes at its end are missing")
        share.end = end


def _take(
    read: _Read,
    share: Share,
    segment: LogSegment,
    raw_records: list[tuple[int, memoryview]],
    ledger: Ledger,
    known: int,
) -> None:
    tokens: list[records.Tokens] = []
    verdicts: list[records.Verdict] = []
    following: list[LogRecord] = []
    for offset, body in raw_records:
        size_bytes = frames.HEAD_BYTES + len(body)
        if records.kind_of(body) is records.Event:
            share.size_bytes += size_bytes
            continue
        try:
            record = records.decoded(body)
        except InvalidValue as error:
            raise error.within(f"{segment.path}: byte {offset}") from error
        count(share, record, size_bytes)
        if isinstance(record, records.Standing):
            for number, end in record.ends:
                read.says_end(number, end)
        if isinstance(record, records.Tokens):
            tokens.append(record)
        elif isinstance(record, records.Verdict):
            verdicts.append(record)
        elif segment.position(offset) >= known:
            following.append(record)
    if following:
        ledger.apply(following, segment.end)
    share.gather()
    read.kept.add(tokens, verdicts, LiveOwners(*ledger.live_numbers()))


def _torn_at(segment: LogSegment) -> int | None:
    """Returns the offset from which the last write of the last segment is incomplete; None if it is complete."""
    return next((hole.offset for hole in segment.holes if hole.offset >= segment.last_write), None)


def _cut(segment: LogSegment, offset: int, repairs: bool) -> None:
    segment.size_bytes = offset
    if not repairs:
        return
    descriptor = os.open(segment.path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(segment: LogSegment, hole: Hole, known: int, is_followed: bool, said: list[str]) -> None:
    """Handles bytes on disk that differ from what was written. The next segment starts with the state there."""
    said.append(f"{hole}, are damaged")
    if segment.position(hole.offset + hole.size_bytes) > known and not is_followed:
        raise _lost(segment.path.parent.parent, "and the ledger does not have what they said", said)


def _lost(folder: Path, why: str, said: list[str]) -> InvalidValue:
    allowed = "a folder of which nothing that was acknowledged is lost; restore it from a copy, or begin in a new one"
    return InvalidValue("service.state", str(folder), allowed, why=f"cannot be carried on ({'; '.join([*said, why])})")
