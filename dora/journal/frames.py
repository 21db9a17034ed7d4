"""A segment: one file of the log. It has whole records, each with a header of checksums.

    b"DORA-SEG", schema version (u16), 0 (u16), number (u64), position of its first byte behind the header (u64),
    CRC-32 of all that (u32)

    record:  mark (4 bytes), body_bytes (u32), bytes from the beginning of its write (u32), CRC-32 of the body (u32),
             kind (u8), CRC-32 of these bytes (u32), body

All integers are little-endian. A position counts the bytes of records since the log began, over all segments. One write
carries several records, and the next write starts once it is durable. A damaged record was therefore acknowledged
unless it belongs to the last write, which distinguishes a crash from a disk fault. The mark lets a reader find the next
record after a damaged one; the kind says what a damaged body has held.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from zlib import crc32

from dora.errors import InvalidValue

OTHER_RELEASE: Final = "finish the run under the release that began it, with `dora serve --state DIR`"
SCHEMA_VERSION: Final = 8  # of the records' fields (records.py)
SUFFIX: Final = ".seg"

_MAGIC: Final = b"DORA-SEG"
_HEADER: Final = struct.Struct("<8sHHQQ")
_HEADER_SUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _HEADER_SUM.size
_MARK: Final = b"\xd0\x0a\xa7\x1e"
_HEAD: Final = struct.Struct("<4sIIIB")
_HEAD_SUM: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _HEAD_SUM.size


@dataclass(frozen=True, slots=True)
class Hole:
    """Bytes of a segment that differ from those written. ``code`` is the kind of their record, or None if unknown."""

    path: Path
    offset: int
    size_bytes: int
    code: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.size_bytes} bytes at byte {self.offset}"


@dataclass(slots=True)
class LogSegment:
    """A segment as it was read. ``base`` is the position of its first record."""

    path: Path
    number: int
    base: int
    size_bytes: int = 0
    holes: list[Hole] = field(default_factory=list)  # known once its records were read
    last_write: int = HEADER_BYTES  # offset of the last visible write

    def position(self, offset: int) -> int:
        """Returns the log position of a byte of the file."""
        return self.base + offset - HEADER_BYTES

    @property
    def end(self) -> int:
        return self.position(max(self.size_bytes, HEADER_BYTES))


def path_of(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}{SUFFIX}"


def header(number: int, base: int) -> bytes:
    body = _HEADER.pack(_MAGIC, SCHEMA_VERSION, 0, number, base)
    return body + _HEADER_SUM.pack(crc32(body))


def head(code: int, body: bytes, since_write: int) -> bytes:
    head = _HEAD.pack(_MARK, len(body), since_write, crc32(body), code)
    return head + _HEAD_SUM.pack(crc32(head))


def opened(path: Path) -> LogSegment | None:
    """Opens a segment by its header. Returns None if the header is damaged.

    Raises InvalidValue for a file that is not a segment or has another schema; OSError.
    """
    with path.open("rb") as stream:
        head = stream.read(HEADER_BYTES)
        size_bytes = os.fstat(stream.fileno()).st_size
    if len(head) < HEADER_BYTES or _HEADER_SUM.unpack_from(head, _HEADER.size)[0] != crc32(head[: _HEADER.size]):
        return None
    magic, schema, _, number, base = _HEADER.unpack_from(head)
    if magic != _MAGIC:
        raise InvalidValue("log", str(path), "a segment, as service.state keeps them")
    if schema != SCHEMA_VERSION:
        raise InvalidValue(f"{path}: schema version", schema, f"{SCHEMA_VERSION}: {OTHER_RELEASE}")
    return LogSegment(path, number, base, size_bytes)


def records(segment: LogSegment, end: int | None = None) -> Iterator[tuple[int, int, memoryview]]:
    """Yields offset, code and body of each whole record in order; ``segment.holes`` has the gaps.

    ``end`` is the position of the next segment; bytes behind it belong to an abandoned write.
    """
    content = segment.path.read_bytes()
    size = len(content) if end is None else min(len(content), HEADER_BYTES + max(0, end - segment.base))
    segment.size_bytes = size
    view = memoryview(content)
    offset = HEADER_BYTES
    while offset < size:
        found = _head_at(view, offset, size)
        if found is None:
            behind = _next_head(content, view, offset + 1, size)
            segment.holes.append(Hole(segment.path, offset, behind - offset))
            offset = behind
            continue
        body_bytes, since_write, body_sum, code = found
        segment.last_write = offset - since_write
        body_at = offset + HEAD_BYTES
        behind = min(body_at + body_bytes, size)
        body = view[body_at:behind]
        if len(body) == body_bytes and crc32(body) == body_sum:
            yield offset, code, body
        else:
            segment.holes.append(Hole(segment.path, offset, behind - offset, code))
        offset = behind


def _head_at(view: memoryview, offset: int, size: int) -> tuple[int, int, int, int] | None:
    """Returns a record's body size, the bytes since its write began, the body's checksum and the code, or None."""
    if offset + HEAD_BYTES > size:
        return None
    mark, *found = _HEAD.unpack_from(view, offset)
    if mark != _MARK or _HEAD_SUM.unpack_from(view, offset + _HEAD.size)[0] != crc32(
        view[offset : offset + _HEAD.size]
    ):
        return None
    body_bytes, since_write, body_sum, code = found
    return body_bytes, since_write, body_sum, code


def _next_head(content: bytes, view: memoryview, offset: int, size: int) -> int:
    while (offset := content.find(_MARK, offset, size)) >= 0:
        if _head_at(view, offset, size) is not None:
            return offset
        offset += 1
    return size
