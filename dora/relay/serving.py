"""The sending half: sends a relay's versions, complete or in reception, on one thread for each follower.

follower                               upstream
FETCH    name                  ──────▶
                               ◀────── HELD        the manifest
LACKED   chunks, base          ──────▶             the base, between zones: a version for deltas
                               ◀────── CHUNK       a piece: consecutive chunks, as soon as they are here; one chunk,
                                                   as a delta, if both have the base
                               ◀────── AWAITED     nothing new for a while, but more is to come
                               ◀────── COMPLETE    all missing chunks were sent
                               ◀────── REFUSED     instead of any of these
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora.errors import InvalidValue, TransferFailed
from dora.kvtransfer.listener import TICK_S
from dora.kvtransfer.peer import Identity, answer
from dora.kvtransfer.throttle import Throttle
from dora.kvtransfer.wire import BODY_MAX, Frame, Kind, Stream
from dora.relay.background import stand_back
from dora.relay.deltas import Encoder, base_of
from dora.relay.holding import Find, Holding, Reader
from dora.relay.link import PIECE_BYTES_MAX
from dora.relay.numbering import unpacked
from dora.relay.probing import answer_probe

log = logging.getLogger("dora.relay")

FOLLOWERS_MAX: Final = 32  # at once; more are refused, and ask elsewhere
AWAITED_S: Final = 1.0  # interval at which a waiting follower hears that its upstream lives


class Serving:
    """``serve`` runs on each connection's thread. ``find`` returns the local copy of a named version."""

    def __init__(self, own: Identity, secret: bytes, find: Find, throttle: Throttle, wait_s: float) -> None:
        """``find`` waits up to its second argument in seconds.

        A follower waits ``wait_s`` for new chunks before it is refused.
        """
        self._own = own
        self._secret = secret
        self._find = find
        self._throttle = throttle
        self._wait_s = wait_s
        self._places = threading.Semaphore(FOLLOWERS_MAX)

    def serve(self, stream: Stream, stopping: threading.Event) -> None:
        stand_back()
        stream.yield_to_others()
        try:
            peer = answer(stream, self._own, self._secret)
        except TransferFailed as error:
            log.warning("relay: %s", error)
            return
        if not self._places.acquire(blocking=False):
            stream.send(Kind.REFUSED, {"reason": f"{FOLLOWERS_MAX} others take from this relay"})
            return
        try:
            self._serve(_Follower(stream, peer, stopping))
        except TransferFailed as error:
            if not stopping.is_set():
                log.info("relay: %s takes no more: %s", peer.worker_id, error)
        finally:
            self._places.release()

    def _serve(self, follower: "_Follower") -> None:
        stream = follower.stream
        fetch = stream.receive()
        if fetch.kind is Kind.PROBE:
            answer_probe(stream, fetch)
            return
        if fetch.kind is not Kind.FETCH:
            raise TransferFailed(f"it sent {fetch.kind.name}, not {Kind.FETCH.name}")
        name, most_bytes = fetch.field("name", str), fetch.field("piece_bytes", int)
        try:
            holding = self._awaited(name, follower)
            body = holding.manifest.to_json().encode() if fetch.field("manifest", bool, True) else b""
            if len(body) > BODY_MAX:
                raise TransferFailed(f"the manifest of {name} has {len(body):,} bytes, a frame at most {BODY_MAX:,}")
            stream.send(Kind.HELD, {}, [memoryview(body)])
            told = _expected(stream, Kind.LACKED)
            lacked = unpacked(_body(stream, told), holding.numbering.chunks)
            is_far = follower.peer.host != self._own.host
            piece_bytes = min(max(most_bytes, 1), PIECE_BYTES_MAX)
            base_name = told.field("base", str, "")
            with holding.reader() as reader, base_of(holding.manifest, base_name, self._find) as base:
                encoder = Encoder(holding, base) if base is not None else None
                self._send(_Way(holding, reader, encoder, piece_bytes, is_far), follower, lacked)
        except (TransferFailed, InvalidValue) as error:
            stream.send(Kind.REFUSED, {"reason": str(error)})
            raise TransferFailed(str(error)) from error
        stream.send(Kind.COMPLETE, {})

    def _awaited(self, name: str, follower: "_Follower") -> Holding:
        """Waits for the version's first chunk: a follower may ask before its upstream has started."""
        ends_s = time.monotonic() + self._wait_s
        while (holding := self._find(name, TICK_S)) is None:
            if time.monotonic() > ends_s:
                raise TransferFailed(f"{name} is not here")
            follower.check()
        return holding

    def _send(self, way: "_Way", follower: "_Follower", lacked: Sequence[tuple[int, int]]) -> None:
        holding, left = way.holding, {first + more for first, count in lacked for more in range(count)}
        seen, heard_s, told_s = 0, time.monotonic(), time.monotonic()
        while left:
            come = holding.wait(seen, TICK_S)
            now_s = time.monotonic()
            if not come:
                follower.check()
                if now_s - heard_s > self._wait_s:
                    raise TransferFailed(f"nothing more of {holding.manifest.name} came for {self._wait_s:g} s")
                if now_s - told_s > AWAITED_S:
                    follower.stream.send(Kind.AWAITED, {"here": seen})
                    told_s = now_s
                continue
            numbers = [number for number in come if number in left]
            seen += len(come)
            pieces = list(way.pieces(numbers))
            for at, (first, count) in enumerate(pieces, start=1):
                self._send_piece(way, follower, first, count, more=at < len(pieces))
            left.difference_update(numbers)
            heard_s = told_s = time.monotonic()

    def _send_piece(self, way: "_Way", follower: "_Follower", first: int, count: int, more: bool) -> None:
        parts = [way.reader.chunk(number) for number in range(first, first + count)]
        size = sum(part.nbytes for part in parts)
        head: dict[str, Any] = {"first": first, "count": count, "size": size, "more": more}
        if way.is_far:
            numbers = range(first, first + count)
            tags = [way.holding.tag(number, part, self._secret) for number, part in zip(numbers, parts, strict=True)]
            head["tags"] = b"".join(tags)
        if way.encoder is not None:
            parts = [way.encoder.encoded(first, parts[0])]
            head |= {"delta": True, "more": False}  # it was not waiting, as it was encoded just now
        if follower.stopping.is_set():
            raise TransferFailed("this relay ends")
        pace = self._throttle.pass_bytes if self._throttle.is_capped else None
        follower.stream.send(Kind.CHUNK, head, parts, pace)


@dataclass(frozen=True, slots=True)
class _Follower:
    stream: Stream
    peer: Identity
    stopping: threading.Event

    def check(self) -> None:
        """Raises TransferFailed if the follower has left or sends an unexpected frame."""
        if self.stopping.is_set():
            raise TransferFailed("this relay ends")
        if self.stream.is_readable(0):
            frame = self.stream.receive()
            reason = frame.field("reason", str, "") if frame.kind is Kind.REFUSED else f"it sent {frame.kind.name}"
            raise TransferFailed(reason)


@dataclass(frozen=True, slots=True)
class _Way:
    holding: Holding
    reader: Reader
    encoder: Encoder | None  # for deltas
    piece_bytes: int
    is_far: bool  # another host

    def pieces(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        numbering = self.holding.numbering
        most_bytes = self.piece_bytes if self.encoder is None else 0
        first, count, size, file = 0, 0, 0, ""
        for number in numbers:
            chunk_bytes, of_file = numbering.chunk_bytes(number), numbering.place(number)[0]
            if count and number == first + count and of_file == file and size + chunk_bytes <= most_bytes:
                count, size = count + 1, size + chunk_bytes
                continue
            if count:
                yield first, count
            first, count, size, file = number, 1, chunk_bytes, of_file
        if count:
            yield first, count


def _expected(stream: Stream, kind: Kind) -> Frame:
    frame = stream.receive()
    if frame.kind is not kind:
        raise TransferFailed(f"it sent {frame.kind.name}, not {kind.name}")
    return frame


def _body(stream: Stream, frame: Frame) -> bytes:
    return stream.read(frame.body_bytes)
