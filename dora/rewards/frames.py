"""The wire between the service and its reward processes: a length (4 bytes, little-endian), then one msgpack map."""

import asyncio
import struct
from typing import Any, BinaryIO

import msgpack

_LENGTH = struct.Struct("<I")
FRAME_MAX_BYTES = 256 << 20  # both ends are ours: more than this is a broken stream, not a long response


def encode(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message of a blocking stream; None where the stream has ended, in the middle of a frame too."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    length = _checked_length(head)
    body = stream.read(length)
    return msgpack.unpackb(body) if len(body) == length else None


async def read_async(stream: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message of an asyncio stream; None where the stream has ended, in the middle of a frame too."""
    try:
        head = await stream.readexactly(_LENGTH.size)
        body = await stream.readexactly(_checked_length(head))
    except asyncio.IncompleteReadError:
        return None
    return msgpack.unpackb(body)


def _checked_length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > FRAME_MAX_BYTES:
        raise ValueError(f"a frame of {length} bytes, more than {FRAME_MAX_BYTES}: the stream is broken")
    return length
