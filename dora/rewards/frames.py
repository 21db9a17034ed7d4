"""The wire between the service, its keepers and user processes: a length (4 bytes, little-endian), one msgpack map."""

import asyncio
import struct
from typing import Any, BinaryIO, Final

import msgpack

TICKET: Final = "ticket"  # names a call, and is not to be guessed: the answer repeats it
CALLS: Final = "calls"  # of one frame to a keeper: a ticket and the user process's own frame each, answered in order
LASTED_S: Final = "lasted_s"  # in an answer of a keeper: how long its call took
ENDED: Final = "ended"  # in the answer that is a keeper's last: the user process is of no more use
START_TIMEOUT_S: Final = 60.0  # of loading the function, which the first answer tells of

_LENGTH = struct.Struct("<I")
FRAME_MAX_BYTES: Final = 256 << 20  # of a call, which we write: more is a broken stream, not a long response
ANSWER_MAX_BYTES: Final = 128 << 10  # of what a user process writes: twice what the largest verdict takes


def encode(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = msgpack.packb(message, unicode_errors="surrogatepass")  # a prompt in JSON may hold half a character
    return _LENGTH.pack(len(body)) + body


def first(received: bytes | bytearray, most_bytes: int) -> dict[str, Any] | None:
    """The frame that ``received`` begins with; None while it is not complete.

    Raises ValueError where it is longer than ``most_bytes``, is followed by anything, or holds no map.
    """
    if len(received) < _LENGTH.size:
        return None
    length = _checked_length(received[: _LENGTH.size], most_bytes)
    if len(received) > _LENGTH.size + length:
        raise ValueError("more than one frame")
    return _decoded(bytes(received[_LENGTH.size :])) if len(received) == _LENGTH.size + length else None


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message of a blocking stream; None where the stream has ended, in the middle of a frame too."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    length = _checked_length(head, FRAME_MAX_BYTES)
    body = stream.read(length)
    return _decoded(body) if len(body) == length else None


async def read_async(stream: asyncio.StreamReader, most_bytes: int) -> dict[str, Any] | None:
    """The next message of an asyncio stream; None where the stream has ended, in the middle of a frame too."""
    try:
        head = await stream.readexactly(_LENGTH.size)
        body = await stream.readexactly(_checked_length(head, most_bytes))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return _decoded(body)


def _checked_length(head: bytes | bytearray, most_bytes: int) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > most_bytes:
        raise ValueError(f"a frame of {length} bytes, more than {most_bytes}")
    return int(length)


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, TypeError, OverflowError) as error:  # its other errors are ValueErrors
        raise ValueError(f"no msgpack ({error})") from error
    if not isinstance(message, dict):
        raise ValueError("no map")
    return message
