"""Frames between two workers, or two relays: a small map, and a body that is neither copied nor joined.

All integers are little-endian:

    0   4   magic "DKV2"
    4   2   kind
    6   2   reserved, zero
    8   4   head bytes
    12  8   body bytes
    20  16  tag: keyed BLAKE3 of bytes 0..20, the frame's number in its direction (8 bytes), and the head
    36      head: msgpack map
    ...     body, raw

Until both ends have proved their identity, the key is zero and the tag is only a checksum. After that the key belongs
to the connection (``Stream.authenticate``): changed, omitted, repeated or moved frames are rejected. The tag does not
cover the body: a chunk's checksum travels in the head of a later frame.
"""

import contextlib
import hmac
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any, Final, TypeVar

import msgpack
from blake3 import blake3

from dora.errors import TransferFailed
from dora.tls.contexts import Contexts
from dora.tls.sockets import SecureSocket

MAGIC: Final = b"DKV2"
HEAD_MAX: Final = 64 << 10
BODY_MAX: Final = 64 << 20
BUFFERS_MAX: Final = 512  # per system call; the kernel accepts 1,024
PACED_BYTES: Final = 128 << 10  # sent at once from the body of a paced frame
TAG_BYTES: Final = 16
KEY_BYTES: Final = 32
PREAMBLE: Final = Struct("<4sHHIQ")
_NUMBER: Final = Struct("<Q")
_TIMEVAL: Final = Struct("@ll")
_LOWER_EFFORT: Final = 1 << 2  # DSCP of RFC 8622, in the byte of class and congestion
_DRAIN_BYTES: Final = 256 << 10
PACE_BYTES_PER_S: Final = 1024.0  # of a read or write in progress: the least that counts as progress,
PACE_SHARE: Final = 0.01  # or this share of the stream's own pace so far


Field = TypeVar("Field", str, int, bytes, bool)


class ConnectionClosed(TransferFailed):
    """The other end has closed the connection."""


class Kind(IntEnum):
    """The sender is the sending half (S) or the receiving half (R) of a pair."""

    GREETING = 1  # S: its identity and the wanted peer
    CHALLENGE = 2  # R: its identity and its proof
    PROOF = 3  # S
    WELCOME = 4  # R
    ATTACH = 5  # S: prepare the other end of a transport
    ATTACHED = 6  # R
    OPEN = 7  # S: a snapshot begins
    OPENED = 8  # R
    CHUNK = 9  # S
    COMMIT = 10  # S: the snapshot is complete; its head follows
    ARRIVED = 11  # R: it has arrived, complete and checked
    REFUSED = 12  # R: the request is refused, with the reason
    CANCEL = 13  # S: the snapshot is void
    # Relays of weights (dora/relay/): the follower (F) connects to its upstream (U), which sends bytes in CHUNK frames.
    FETCH = 20  # F: the wanted version
    HELD = 21  # U: has all or some of the version; the body is its manifest
    LACKED = 22  # F: what it still needs; the body lists it
    AWAITED = 23  # U: has no more of it yet
    COMPLETE = 24  # U: everything needed has been sent
    PROBE = 25  # F, instead of FETCH: bytes that measure the link; COMPLETE answers each


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose body, if any, is still to be read."""

    kind: Kind
    head: dict[str, Any]
    body_bytes: int

    def field(self, name: str, kind: type[Field], default: Field | None = None) -> Field:
        """A field of the head. Raises TransferFailed if it has another type, or is missing without a default."""
        value = self.head.get(name, default)
        if type(value) is not kind:
            raise TransferFailed(f"its {self.kind.name} has {name} = {value!r:.100}, not {kind.__name__}")
        return value


class Stream:
    """A connected socket as a stream of frames. One thread sends, one receives.

    Every method raises TransferFailed if the other end disconnects, stalls for longer than the timeout, sends an
    invalid frame, or makes too little progress within a read or write: bytes that drip are no sign of life.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket: socket.socket | SecureSocket = connected
        self._timeout_s = timeout_s
        # Not Python's own timeout, which adds a poll to each call and rules out MSG_WAITALL.
        connected.settimeout(None)
        limit = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = _Tags()
        self._receiving = _Tags()
        self._sent = _Pace(timeout_s)
        self._received = _Pace(timeout_s)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def secure(self, contexts: Contexts | None, *, server: bool) -> None:
        """Continues under TLS, before the first frame, or in the clear if ``contexts`` is None. Raises TransferFailed
        for another end than a process of the run.
        """
        if contexts is not None:
            plain = self._socket
            assert isinstance(plain, socket.socket)
            self._poll.unregister(plain)
            self._socket = guarded = SecureSocket(plain, contexts, self._timeout_s, server=server)
            guarded.shake_hands()

    def authenticate(self, sending_key: bytes, receiving_key: bytes) -> None:
        """Requires these keys (32 bytes) for each direction's frames from the next one on."""
        self._sending.key, self._receiving.key = sending_key, receiving_key

    def send(
        self,
        kind: Kind,
        head: dict[str, Any],
        body: Sequence[memoryview] = (),
        pace: Callable[[int], object] | None = None,
    ) -> None:
        """``pace`` waits until this many more bytes may be sent; the body is then sent in small parts."""
        packed = msgpack.packb(head)
        preamble = PREAMBLE.pack(MAGIC, kind, 0, len(packed), sum(part.nbytes for part in body))
        waiting = [memoryview(preamble + self._sending.next(preamble, packed) + packed), *body]
        self._sent.begin()
        try:
            while waiting:
                ready = waiting[:BUFFERS_MAX]
                if pace is not None:
                    ready = [waiting[0][:PACED_BYTES]]
                    pace(ready[0].nbytes)
                began_s = time.monotonic()
                sent = self._socket.sendmsg(ready)
                self._sent.passed(sent, time.monotonic() - began_s)
                waiting = _rest(waiting, sent)
        except (OSError, ValueError) as error:
            raise TransferFailed(self._said(error, "takes no bytes")) from error

    def is_readable(self, wait_s: float) -> bool:
        """Returns whether a frame, or the end of the stream, arrives within the time."""
        try:
            if isinstance(self._socket, SecureSocket):
                return self._socket.is_readable(wait_s)
            return bool(self._poll.poll(wait_s * 1000))
        except (OSError, ValueError) as error:
            raise TransferFailed(self._said(error, "says nothing")) from error

    def receive(self) -> Frame:
        """The next frame. Its body must be read by ``read_into`` or ``drain`` before the next call."""
        preamble = self.read(PREAMBLE.size)
        magic, kind, reserved, head_bytes, body_bytes = PREAMBLE.unpack(preamble)
        known = magic == MAGIC and kind in Kind._value2member_map_ and not reserved
        if not known or head_bytes > HEAD_MAX or body_bytes > BODY_MAX:
            raise TransferFailed(f"the other end sent {preamble!r} instead of a frame")
        tag, packed = self.read(TAG_BYTES), self.read(head_bytes)
        if not hmac.compare_digest(tag, self._receiving.next(preamble, packed)):
            raise TransferFailed("a frame is damaged or out of order")
        try:
            head = msgpack.unpackb(packed)
        except ValueError as error:
            raise TransferFailed(f"the other end sent a frame with an invalid head: {error!r}") from error
        if not isinstance(head, dict):
            raise TransferFailed(f"the other end sent a frame's head of type {type(head).__name__}")
        return Frame(Kind(kind), head, body_bytes)

    def read_into(self, target: memoryview) -> None:
        self._received.begin()
        try:
            while target:
                began_s = time.monotonic()
                taken = self._socket.recv_into(target, 0, socket.MSG_WAITALL)
                if not taken:
                    raise ConnectionClosed("the other end has disconnected")
                target = target[taken:]
                self._received.passed(taken, time.monotonic() - began_s)
        except (OSError, ValueError) as error:
            raise TransferFailed(self._said(error, "says nothing")) from error

    def read(self, count: int) -> bytes:
        buffer = bytearray(count)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def drain(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, _DRAIN_BYTES)))
        while count:
            piece = scratch[: min(count, len(scratch))]
            self.read_into(piece)
            count -= len(piece)

    def yield_to_others(self) -> None:
        """Marks sent packets as background traffic, which yields to other traffic in a queue (RFC 8622)."""
        option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
        if self._socket.family == socket.AF_INET:
            option = (socket.IPPROTO_IP, socket.IP_TOS)
        with contextlib.suppress(OSError):  # a network without traffic classes carries it anyway
            self._socket.setsockopt(*option, _LOWER_EFFORT)

    def own_host(self) -> str:
        return str(self._socket.getsockname()[0])

    def stop(self) -> None:
        """Ends both directions: a thread that waits on the stream gets TransferFailed. Thread-safe."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()

    def _said(self, error: Exception, waited: str) -> str:
        if isinstance(error, BlockingIOError | TimeoutError):
            return f"the other end {waited} for {self._timeout_s:g} s"
        return f"the connection broke: {error}"


class _Pace:
    """The progress of one direction: within a read or write, bytes must pass at a share of the stream's own pace.

    A call of the system ends when all its bytes have passed or the timeout is over. So only frames that take several
    calls are watched, from the end of the first one, which may have waited for a frame to begin.
    """

    def __init__(self, timeout_s: float) -> None:
        self._watched_s = timeout_s / 2
        self._began_s = time.monotonic()
        self._total = 0
        self._is_first = True
        self._bytes = 0
        self._took_s = 0.0  # in calls of the system: a sender's own limit of bandwidth does not count

    def begin(self) -> None:
        self._is_first, self._bytes, self._took_s = True, 0, 0.0

    def passed(self, count: int, took_s: float) -> None:
        """Enters one call of the system. Raises TransferFailed if too few bytes have passed."""
        self._total += count
        if self._is_first:
            self._is_first = False
            return
        self._bytes += count
        self._took_s += took_s
        if self._took_s < self._watched_s:
            return
        own = self._total / (time.monotonic() - self._began_s)
        least = max(PACE_BYTES_PER_S, PACE_SHARE * own)
        if self._bytes < least * self._took_s:
            raise TransferFailed(
                f"only {self._bytes} bytes passed in {self._took_s:.3g} s, at least {least:.3g} a second are expected"
            )
        self._bytes, self._took_s = 0, 0.0


class _Tags:
    """The tags of one direction's frames, in order."""

    def __init__(self) -> None:
        self.key = bytes(KEY_BYTES)
        self._number = 0

    def next(self, preamble: bytes, head: bytes) -> bytes:
        tag = blake3(preamble, key=self.key).update(_NUMBER.pack(self._number)).update(head).digest(TAG_BYTES)
        self._number += 1
        return tag


def _rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    for number, part in enumerate(parts):
        if sent < part.nbytes:
            return [part[sent:], *parts[number + 1 :]]
        sent -= part.nbytes
    return []
