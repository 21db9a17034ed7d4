"""Measures the link to another host's relay: whether it is reached and belongs to the run, its rate, and its loss.

The bytes go through the relay's own port, with its proofs and its TLS, and are only counted there. The kernel tells how
many segments it had to send again. On request, blocks of random bytes go there and back, as KV does over TCP, and
chunks of a version are fetched and thrown away. All of it is bounded in bytes, memory and time, and yields to the
relay's own transfers.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dora.errors import InvalidValue, TransferFailed
from dora.kvtransfer.peer import Identity, Peer, greet
from dora.kvtransfer.wire import Frame, Kind, Stream
from dora.relay.holding import TAG_BYTES, tag_of
from dora.relay.numbering import Numbering, packed
from dora.relay.orders import Upstream
from dora.tls.contexts import Contexts
from dora.weights.manifest import read_manifest

PIECE_BYTES: Final = 1 << 20
PIECES_MAX: Final = 64  # of one connection
PROBED_S: Final = 1.0  # after which no further piece is sent
TIMEOUT_S: Final = 10.0
BACK: Final = "back"  # field of a piece that is to come back
KV_BYTES_MAX: Final = 16 << 20
FETCHED_MAX: Final = 64 << 20
_ROUNDS: Final = 3  # of which the shortest is the link's round trip
_TCP_INFO_BYTES: Final = 232
_RETRANSMITTED_AT: Final = 100  # tcpi_total_retrans in linux/tcp.h
_SENT_AT: Final = 136  # tcpi_segs_out
_NUMBER: Final = struct.Struct("@I")


@dataclass(frozen=True, slots=True)
class Probed:
    """A measured link, in the direction to the other host. ``loss`` is the share of segments that were sent again."""

    bytes_per_s: float
    round_trip_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """Chunks of a version that came and were thrown away."""

    bytes: int
    took_s: float


def probe(upstream: Upstream, own: Identity, secret: bytes, tls: Contexts | None = None) -> Probed:
    """Measures the link to a host, in at most some ``TIMEOUT_S``. Raises TransferFailed if its relay cannot be used."""
    with _connected(upstream, own, secret, tls) as (stream, connected, _):
        round_trip_s = min(_sent(stream, memoryview(b"")) for _ in range(_ROUNDS))
        piece, took_s, sent_bytes = memoryview(bytes(PIECE_BYTES)), 0.0, 0
        for _ in range(PIECES_MAX - _ROUNDS):
            took_s += max(_sent(stream, piece) - round_trip_s, 1e-6)
            sent_bytes += PIECE_BYTES
            if took_s > PROBED_S:
                break
        return Probed(sent_bytes / took_s, round_trip_s, _loss(connected))


def probe_kv(
    upstream: Upstream, own: Identity, secret: bytes, size_bytes: int, tls: Contexts | None = None
) -> tuple[int, float]:
    """Sends random blocks of together ``size_bytes``, at most ``KV_BYTES_MAX``, to a relay and back, and compares them.

    Returns the bytes, fewer if ``PROBED_S`` was over before, and the seconds. Raises TransferFailed, also for an other
    end that cannot send back.
    """
    left = min(size_bytes, KV_BYTES_MAX)
    with _connected(upstream, own, secret, tls) as (stream, _, _):
        done_bytes, began_s, took_s = 0, time.monotonic(), 0.0
        while left and took_s <= PROBED_S:
            piece = memoryview(os.urandom(min(PIECE_BYTES, left)))
            stream.send(Kind.PROBE, {BACK: True}, [piece])
            reply = _completed(stream)
            if reply.body_bytes != len(piece) or stream.read(reply.body_bytes) != piece:
                raise TransferFailed(f"{len(piece):,} bytes of KV came back as {reply.body_bytes:,}, or other ones")
            done_bytes, left = done_bytes + len(piece), left - len(piece)
            took_s = time.monotonic() - began_s
        return done_bytes, took_s


def probe_fetch(upstream: Upstream, own: Identity, secret: bytes, name: str, tls: Contexts | None = None) -> Fetched:
    """Fetches the first chunks of a version, checks and drops them: at most ``FETCHED_MAX`` bytes for ``PROBED_S``.

    Raises TransferFailed if the relay has no such version, or sends other bytes.
    """
    with _connected(upstream, own, secret, tls) as (stream, _, is_far):
        stream.send(Kind.FETCH, {"name": name, "piece_bytes": PIECE_BYTES, "manifest": True})
        held = stream.receive()
        if held.kind is not Kind.HELD:
            raise TransferFailed(f"it does not send {name}: {held.head.get('reason', held.kind.name)}")
        try:
            numbering = Numbering(read_manifest(stream.read(held.body_bytes).decode()))
        except (InvalidValue, UnicodeDecodeError) as error:
            raise TransferFailed(f"its manifest of {name}: {error}") from error
        stream.send(Kind.LACKED, {}, [memoryview(packed(_first(numbering)))])
        done_bytes, began_s = 0, time.monotonic()
        while time.monotonic() - began_s <= PROBED_S and (frame := stream.receive()).kind is not Kind.COMPLETE:
            if frame.kind is Kind.CHUNK:
                done_bytes += _checked(stream, frame, numbering, secret if is_far else b"")
            elif frame.kind is not Kind.AWAITED:
                raise TransferFailed(f"it sends no more of {name}: {frame.head.get('reason', frame.kind.name)}")
        return Fetched(done_bytes, time.monotonic() - began_s)


def answer_probe(stream: Stream, first: Frame) -> None:
    """Counts bytes of a connection that begins with ``first``, or returns them. Raises TransferFailed at the end."""
    frame = first
    for _ in range(PIECES_MAX):
        if frame.kind is not Kind.PROBE or frame.body_bytes > PIECE_BYTES:
            raise TransferFailed(f"it sent {frame.kind.name} with {frame.body_bytes:,} bytes, not a piece of a probe")
        if frame.field(BACK, bool, False):
            stream.send(Kind.COMPLETE, {}, [memoryview(stream.read(frame.body_bytes))])
        else:
            stream.drain(frame.body_bytes)
            stream.send(Kind.COMPLETE, {})
        frame = stream.receive()


@contextmanager
def _connected(
    upstream: Upstream, own: Identity, secret: bytes, tls: Contexts | None
) -> Iterator[tuple[Stream, socket.socket, bool]]:
    host, _, port = upstream.address.rpartition(":")
    try:
        connected = socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise TransferFailed(f"at {upstream.address!r}: {error}") from error
    stream = Stream(connected, TIMEOUT_S)
    try:
        stream.secure(tls, server=False)
        stream.yield_to_others()
        peer = greet(stream, own, Peer(upstream.host, upstream.epoch, upstream.address, ()), secret)
        yield stream, connected, peer.host != own.host
    finally:
        stream.close()


def _first(numbering: Numbering) -> Iterator[int]:
    left = FETCHED_MAX
    for number in range(numbering.chunks):
        left -= numbering.chunk_bytes(number)
        if number and left < 0:
            return
        yield number


def _checked(stream: Stream, frame: Frame, numbering: Numbering, secret: bytes) -> int:
    first, count, tags = frame.field("first", int), frame.field("count", int), frame.field("tags", bytes, b"")
    if not 0 <= first < first + count <= numbering.chunks or len(tags) != (count * TAG_BYTES if secret else 0):
        raise TransferFailed(f"it sent chunks {first} to {first + count} with {len(tags)} bytes of tags")
    sizes = [numbering.chunk_bytes(number) for number in range(first, first + count)]
    if frame.body_bytes != sum(sizes):
        raise TransferFailed(f"it sent {frame.body_bytes:,} bytes, whose chunks have {sum(sizes):,}")
    for at, size in enumerate(sizes):
        content = memoryview(stream.read(size))
        if secret and tag_of(content, secret) != tags[at * TAG_BYTES : (at + 1) * TAG_BYTES]:
            raise TransferFailed(f"chunk {first + at} was changed on the way")
    return sum(sizes)


def _sent(stream: Stream, piece: memoryview) -> float:
    began_s = time.monotonic()
    stream.send(Kind.PROBE, {}, [piece])
    _completed(stream)
    return time.monotonic() - began_s


def _completed(stream: Stream) -> Frame:
    reply = stream.receive()
    if reply.kind is not Kind.COMPLETE:
        raise TransferFailed(f"it refuses a probe: {reply.head.get('reason', reply.kind.name)}")
    return reply


def _loss(connected: socket.socket) -> float:
    try:
        told = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        again, sent = (_NUMBER.unpack_from(told, at)[0] for at in (_RETRANSMITTED_AT, _SENT_AT))
    except (OSError, AttributeError, struct.error):
        return 0.0
    return again / sent if sent else 0.0
