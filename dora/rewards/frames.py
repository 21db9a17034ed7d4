"""The wire between service, supervisors and user processes: a length (4 bytes, little-endian) and one msgpack map."""

import asyncio
import struct
from typing import Any, BinaryIO, Final

import msgpack

TICKET: Final = "ticket"  # names a call, and is not to be guessed: the answer repeats it
# in a frame to a supervisor: for each call a ticket and the user process's frame, answered in order
CALLS: Final = "calls"
LASTED_S: Final = "lasted_s"  # in an answer of a keeper: how long its call took
ENDED: Final = "ended"  # in a supervisor's last answer: the user process is unusable
START_TIMEOUT_S: Final = 60.0  # for loading the function, which the first answer reports

_LENGTH = struct.Struct("<I")
# of a call, which the service writes: a larger frame is a broken stream, not a long response
FRAME_MAX_BYTES: Final = 256 << 20
ANSWER_MAX_BYTES: Final = 128 << 10  # of a user process's answer: twice the largest verdict


def encode(message: dict[str, Any]) -> bytes:
    body = msgpack.packb(message, unicode_errors="surrogatepass")  # a prompt in JSON may hold half a character
    return _LENGTH.pack(len(body)) + body


def first(received: bytes | bytearray, most_bytes: int) -> dict[str, Any] | None:
    """Decodes the frame at the beginning of ``received``. Returns None while it is incomplete.

    Raises ValueError if it is longer than ``most_bytes``, is followed by other bytes, or holds no map.
    """
    if len(received) < _LENGTH.size:
        return None
    length = _checked_length(received[: _LENGTH.size], most_bytes)
    if len(received) > _LENGTH.size + length:
        raise ValueError("more than one frame")
    return _decoded(bytes(received[_LENGTH.size :])) if len(received) == _LENGTH.size + length else None


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """Returns the next message of a blocking stream, or None at its end, even within a frame."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    length = _checked_length(head, FRAME_MAX_BYTES)
    body = stream.read(length)
    return _decoded(body) if len(body) == length else None


async def read_async(stream: asyncio.StreamReader, most_bytes: int) -> dict[str, Any] | None:
    """Returns the next message of an asyncio stream, or None at its end, even within a frame."""
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
    except (msgpack.UnpackException, TypeError, OverflowError) as error:  # other errors of msgpack are ValueErrors
        raise ValueError(f"no msgpack ({error})") from error
    if not isinstance(message, dict):
        raise ValueError("no map")
    return message
