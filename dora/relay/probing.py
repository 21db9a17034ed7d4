"""Measures the link to another host's relay: whether it is reached and belongs to the run, its rate, and its loss.

The bytes go through the relay's own port, with its proofs and its TLS, and are only counted there. The kernel tells how
many segments it had to send again.
"""

import socket
import struct
import time
from dataclasses import dataclass
from typing import Final

from dora.errors import TransferFailed
from dora.kvtransfer.peer import Identity, Peer, greet
from dora.kvtransfer.wire import Frame, Kind, Stream
from dora.relay.orders import Upstream
from dora.tls.contexts import Contexts

PIECE_BYTES: Final = 1 << 20
PIECES_MAX: Final = 64  # of one connection
PROBED_S: Final = 1.0  # after which no further piece is sent
TIMEOUT_S: Final = 10.0
_ROUNDS: Final = 3  # of which the shortest is the link's round trip
_TCP_INFO_BYTES: Final = 232
_RETRANSMITTED_AT: Final = 100  # tcpi_total_retrans in linux/tcp.h
_SENT_AT: Final = 136  # tcpi_segs_out
_NUMBER: Final = struct.Struct("@I")


@dataclass(frozen=True, slots=True)
class Probed:
    """A measured link, in the direction to the other host. ``loss``: share of segments that were sent again."""

    bytes_per_s: float
    round_trip_s: float
    loss: float


def probe(upstream: Upstream, own: Identity, secret: bytes, tls: Contexts | None = None) -> Probed:
    """Takes at most some ``TIMEOUT_S``. Raises TransferFailed with the reason why the relay cannot be used."""
    host, _, port = upstream.address.rpartition(":")
    try:
        connected = socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise TransferFailed(f"at {upstream.address!r}: {error}") from error
    stream = Stream(connected, TIMEOUT_S)
    try:
        stream.secure(tls, server=False)
        greet(stream, own, Peer(upstream.host, upstream.epoch, upstream.address, ()), secret)
        round_trip_s = min(_sent(stream, memoryview(b"")) for _ in range(_ROUNDS))
        piece, took_s, sent_bytes = memoryview(bytes(PIECE_BYTES)), 0.0, 0
        for _ in range(PIECES_MAX - _ROUNDS):
            took_s += max(_sent(stream, piece) - round_trip_s, 1e-6)
            sent_bytes += PIECE_BYTES
            if took_s > PROBED_S:
                break
        return Probed(sent_bytes / took_s, round_trip_s, _loss(connected))
    finally:
        stream.close()


def answer_probe(stream: Stream, first: Frame) -> None:
    """Counts the bytes of a connection that begins with ``first``. Raises TransferFailed at its end."""
    frame = first
    for _ in range(PIECES_MAX):
        if frame.kind is not Kind.PROBE or frame.body_bytes > PIECE_BYTES:
            raise TransferFailed(f"it sent {frame.kind.name} with {frame.body_bytes:,} bytes, not a piece of a probe")
        stream.drain(frame.body_bytes)
        stream.send(Kind.COMPLETE, {})
        frame = stream.receive()


def _sent(stream: Stream, piece: memoryview) -> float:
    """Returns the time until the other end has a piece, and says so."""
    began_s = time.monotonic()
    stream.send(Kind.PROBE, {}, [piece])
    reply = stream.receive()
    if reply.kind is not Kind.COMPLETE:
        raise TransferFailed(f"it refuses a probe: {reply.head.get('reason', reply.kind.name)}")
    return time.monotonic() - began_s


def _loss(connected: socket.socket) -> float:
    """The share of segments that the kernel sent again; 0 if it does not tell."""
    try:
        told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        again, sent = (_NUMBER.unpack_from(told, at)[0] for at in (_RETRANSMITTED_AT, _SENT_AT))
    except (OSError, AttributeError, struct.error):
        return 0.0
    return again / sent if sent else 0.0
