"""Opens the log of an earlier incarnation, and finds its damage.

    FOLDER/log/NNNNNNNN.seg   the log (frames.py)

The durable state is folded from the newest whole checkpoint on; then the live content is read from all segments. Data
cut short by a crash, at the end of the log, was never acknowledged: it is removed and reported. Other damage is
reported by file and offset. If it cost tokens and verdicts alone, their groups are generated again. Otherwise the start
is refused.
"""

import logging
import os
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final

from dora.data.types import Prompt
from dora.errors import InvalidValue
from dora.journal import frames, records
from dora.journal.compaction import Compaction, Share
from dora.journal.content import Content, LiveGroup, Requests
from dora.journal.durable import Durable
from dora.journal.frames import LogSegment
from dora.journal.log import DEFAULT_SIZES, LOG_FOLDER, Sizes
from dora.journal.records import CODE, LogRecord

log = logging.getLogger("dora.journal")

CHECKPOINT: Final = CODE[records.Checkpoint]
EVENT: Final = CODE[records.Event]
# whose loss leaves the fold as it is
UNFOLDED: Final = frozenset(CODE[kind] for kind in (records.Checkpoint, records.Event, records.Tokens, records.Verdict))


@dataclass(slots=True)
class Found:
    """The content of a state folder. ``said`` has a message for each thing that was cut off or damaged."""

    durable: Durable
    groups: list[LiveGroup]  # by their numbers
    queued: list[tuple[int, Prompt]]  # by arrival
    requests: Requests
    compaction: Compaction
    number: int  # of the last segment
    position: int  # behind it
    said: list[str]

    @property
    def is_new(self) -> bool:
        """Returns whether no service has used the folder."""
        return self.durable.incarnation < 0


@dataclass(slots=True)
class _Segment:
    of: LogSegment
    following: LogSegment | None  # None: it is the last
    raw: list[tuple[int, int, memoryview]] = field(default_factory=list)  # offset, code and body of whole records
    torn_bytes: int = 0  # at its end, which a crash has cut short
    is_read: bool = False

    @property
    def is_lost(self) -> bool:
        """Returns whether its header is damaged: its records can be read, but not placed."""
        return self.of.base < 0

    def read(self) -> None:
        """Reads the records, once."""
        if self.is_read:
            return
        self.is_read, of, following = True, self.of, self.following
        end = following.base if following is not None and following.base >= 0 and not self.is_lost else None
        self.raw = list(frames.records(of, end))
        torn = next((hole.offset for hole in of.holes if hole.offset >= of.last_write), None)
        if following is None and torn is not None:
            self.torn_bytes, of.size_bytes = of.size_bytes - torn, torn
            self.raw = [each for each in self.raw if each[0] < torn]
            of.holes = [hole for hole in of.holes if hole.offset < torn]

    def decoded(self, offset: int, code: int, body: memoryview) -> LogRecord:
        try:
            return records.decoded(code, body)
        except InvalidValue as error:
            raise error.within(f"{self.of.path}: byte {offset}") from error


def find(folder: Path, sizes: Sizes = DEFAULT_SIZES, *, repairs: bool = True) -> Found:
    """Opens ``folder``, which is created if absent, for a service to continue. Without ``repairs`` nothing changes.

    Raises InvalidValue if that would lose acknowledged data; OSError.
    """
    log_folder, said = folder / LOG_FOLDER, list[str]()
    if repairs:
        log_folder.mkdir(parents=True, exist_ok=True)
    segments = _segments(log_folder, said, repairs)
    durable, ends = _folded(segments, folder, said)
    content, compaction = Content(durable), Compaction(sizes.segment_bytes)
    for segment in segments:
        segment.read()
        _report(segment, said)
        _take(segment, content, compaction, ends.get(segment.of.number, -1), said)
        segment.raw.clear()
    if lacking := content.lacking():
        raise _lost(folder, f"of {', '.join(lacking[:8])}, the prompt is lost", said)
    last = segments[-1] if segments else None
    if last is not None and last.torn_bytes:
        said.append(f"{last.of.path}: the last {last.torn_bytes} bytes were cut short by a crash")
        if repairs:
            _cut(last.of)
    for line in said:
        log.warning("%s", line)
    compaction.changed(durable)
    groups = content.groups()
    position = last.of.end if last is not None else 0
    number = last.of.number if last is not None else 0
    return Found(durable, groups, content.queued(), content.requests(groups), compaction, number, position, said)


def _segments(folder: Path, said: list[str], repairs: bool) -> list[_Segment]:
    """Returns the segments by number. A last segment without a whole record is left out."""
    paths = sorted(folder.glob(f"[0-9]*{frames.SUFFIX}"))
    found = [frames.opened(path) or LogSegment(path, int(path.stem), -1, path.stat().st_size) for path in paths]
    segments = [_Segment(*each) for each in zip_longest(found, found[1:])]
    if segments:
        segments[-1].read()
    if segments and not segments[-1].raw:
        empty = segments.pop().of.path
        said.append(f"{empty}: cut short by a crash before anything was in it")
        if repairs:
            empty.unlink()
        if segments:
            segments[-1].following = None
    return segments


def _folded(segments: list[_Segment], folder: Path, said: list[str]) -> tuple[Durable, dict[int, int]]:
    """Returns the state at the end of the log, and the ends of segments by number, as later ones record them."""
    durable, ends, first = Durable(), dict[int, int](), (0, 0)
    for index, segment in reversed(list(enumerate(segments))):
        if segment.is_lost:
            raise _lost(folder, f"{segment.of.path}: its header is damaged, and no later checkpoint repeats it", said)
        segment.read()
        newest = next((each for each in reversed(segment.raw) if each[1] == CHECKPOINT), None)
        if newest is not None:
            checkpoint = segment.decoded(*newest)
            assert isinstance(checkpoint, records.Checkpoint)
            try:
                durable = Durable.from_checkpoint(checkpoint.durable)
            except InvalidValue as error:
                raise error.within(f"{segment.of.path}: byte {newest[0]}") from error
            ends |= dict(checkpoint.ends)  # type: ignore[arg-type]
            first = (index, newest[0])
            break
    for segment in segments:
        if not segment.is_lost:
            ends[segment.of.number - 1] = max(segment.of.base, ends.get(segment.of.number - 1, -1))
    if segments and not first[1] and segments[0].of.base:
        raise _lost(folder, f"{segments[0].of.path} has no whole checkpoint, and the log before it is gone", said)
    for index, segment in enumerate(segments[first[0] :], first[0]):
        _fold(durable, segment, first[1] if index == first[0] else 0, folder, said)
    return durable, ends


def _fold(durable: Durable, segment: _Segment, after: int, folder: Path, said: list[str]) -> None:
    """Applies the records behind the offset ``after``. Raises InvalidValue if one of them is lost."""
    for hole in segment.of.holes:
        if hole.offset > after and hole.code not in UNFOLDED:
            raise _lost(folder, f"{hole}, are damaged, and no later checkpoint repeats what they said", said)
    if segment.following is not None and segment.following.base > segment.of.end:
        missing = segment.following.base - segment.of.end
        raise _lost(folder, f"{missing} bytes of the log are missing behind {segment.of.path}", said)
    for offset, code, body in segment.raw:
        if offset > after and code not in UNFOLDED:
            durable.apply(segment.decoded(offset, code, body))


def _report(segment: _Segment, said: list[str]) -> None:
    if segment.is_lost:
        said.append(f"{segment.of.path}: its header is damaged")
    said.extend(f"{hole}, are damaged" for hole in segment.of.holes)


def _take(segment: _Segment, content: Content, compaction: Compaction, end: int, said: list[str]) -> None:
    """Takes a segment's live content, and counts its bytes. ``end`` is its end as later segments record it."""
    of = segment.of
    share = Share(of.path, of.base, of.end, holes=len(of.holes))
    compaction.enter(of.number, share)
    found: list[LogRecord] = []
    for offset, code, body in segment.raw:
        size_bytes = frames.HEAD_BYTES + len(body)
        if code == EVENT:
            share.size_bytes += size_bytes
            continue
        record = segment.decoded(offset, code, body)
        compaction.count(record, size_bytes, of.number)
        found.append(record)
    share.gather()
    content.add(found)
    if of.base >= 0 and of.end < end:  # cut between two records, it looks whole
        share.missing, share.end = end - of.end, end
        said.append(f"{of.path}: {share.missing} bytes at its end are missing")


def _cut(segment: LogSegment) -> None:
    descriptor = os.open(segment.path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, segment.size_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lost(folder: Path, why: str, said: list[str]) -> InvalidValue:
    allowed = "a folder of which nothing that was acknowledged is lost; restore it from a copy, or begin in a new one"
    return InvalidValue("service.state", str(folder), allowed, why=f"cannot be carried on ({'; '.join([*said, why])})")
