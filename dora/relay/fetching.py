"""The receiving half: brings one version into its host's store, chunk by chunk, from one upstream after another.

Received chunks are kept when an upstream fails, and the next upstream is asked for the missing ones. Each chunk is
checked in place before it counts as received. Wrong bytes end the connection and name their sender.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Final

from dora.errors import Conflict, InvalidValue, TransferFailed
from dora.kvtransfer.peer import Identity, Peer, greet
from dora.kvtransfer.wire import Frame, Kind, Stream
from dora.relay.deltas import base_of
from dora.relay.holding import TAG_BYTES, Find, Holding, Reader, tag_of
from dora.relay.link import Link
from dora.relay.numbering import packed
from dora.relay.orders import FetchOrder, Upstream
from dora.tls.contexts import Contexts
from dora.weights.delta import decode
from dora.weights.manifest import Manifest, read_manifest

log = logging.getLogger("dora.relay")

CHECKED_MAX: Final = 4  # chunks that wait for their check while the next ones come
MEASURED_MIN: Final = 8  # pieces that came without a pause
CONNECT_S: Final = 5.0  # an upstream that does not answer by then is passed over
GREETING_WAYS: Final = 4  # messages one after the other until both ends know each other
Hold = Callable[[Manifest], Holding]
Delta = tuple[bytes, memoryview]  # an encoded chunk and the base's


class WrongBytes(TransferFailed):
    """The received bytes do not belong to the version, or not to the claimed sender."""


@dataclass(slots=True)
class Measured:
    """The measured performance of one connection's link."""

    start_s: float = 0.0
    pieces: int = 0
    piece_bytes: int = 0
    busy_s: float = 0.0

    def add(self, piece_bytes: int, took_s: float) -> None:
        """Enters a piece that was already waiting when its predecessor had arrived."""
        self.pieces += 1
        self.piece_bytes += piece_bytes
        self.busy_s += took_s

    def link(self) -> Link | None:
        if self.pieces < MEASURED_MIN or self.busy_s <= 0:
            return None
        return Link(self.piece_bytes / self.busy_s, max(self.start_s, 1e-6))


@dataclass(slots=True)
class VersionFetch:
    """One incoming version. ``run`` has a thread of its own; any thread may call ``replace`` and ``stop``."""

    order: FetchOrder
    own: Identity
    secret: bytes = field(repr=False)
    hold: Hold  # starts or resumes the reception of a version
    find: Find
    helpers: Executor
    timeout_s: float
    wait_s: float  # an upstream that only says that more will come is left after this, and the timeout
    tls: Contexts | None = None
    came_bytes: int = 0
    culprits: set[str] = field(default_factory=set)
    link: Link | None = None
    taken_from: str = ""
    _holding: Holding | None = None
    _stream: Stream | None = None
    _upstream: Upstream | None = None
    _stopped: str = ""
    _changed: int = 0  # orders that have replaced the first
    _failed: int = -1  # how many had when it failed
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def replace(self, order: FetchOrder) -> None:
        """Replaces the upstreams. A connection to one that is no longer named is closed at once."""
        with self._lock:
            self.order, self._changed = order, self._changed + 1
            if self._stream is not None and self._upstream not in order.upstreams:
                self._stream.stop()

    @property
    def is_stopped(self) -> bool:
        return bool(self._stopped)

    @property
    def may_retry(self) -> bool:
        """Returns whether it was replaced after its failure and not stopped."""
        with self._lock:
            return not self._stopped and self._changed != self._failed

    def stop(self, reason: str) -> None:
        with self._lock:
            self._stopped = reason
            if self._stream is not None:
                self._stream.stop()

    def run(self) -> Holding:
        """Returns the sealed version. Raises TransferFailed if no upstream could deliver it or it was stopped, and
        OSError if the store's folder is unusable.

        All upstreams are asked again after a round that received something, or if the order was replaced.
        """
        while True:
            with self._lock:
                order, changed = self.order, self._changed
            try:
                holding = self._round(order, changed)
            except Exception:
                self._failed = changed
                raise
            if holding is not None:
                return holding

    def _round(self, order: FetchOrder, changed: int) -> Holding | None:
        """Asks each upstream once. Returns the version, or None if another round is worthwhile; raises as ``run`` does.

        ``changed`` is the number of replacements when ``order`` was taken.
        """
        before = self.came_bytes
        reasons: list[str] = []
        if self._holding is not None and self._holding.is_ended:
            self._holding = None  # the store refused it: all chunks must come again
        for upstream in order.upstreams:
            holding = self._tried(upstream, reasons)
            if holding is not None:
                return holding
            if self._stopped:
                raise TransferFailed(self._stopped)
            if self._changed != changed:
                return None
        if self._changed == changed and self.came_bytes == before:
            raise TransferFailed("; ".join(reasons) or "no host is known that has it")
        return None

    def _tried(self, upstream: Upstream, reasons: list[str]) -> Holding | None:
        for base in dict.fromkeys((upstream.base, "")):
            try:
                return self._take(upstream, base)
            except TransferFailed as error:
                self._note(upstream, error)
                reasons.append(f"{upstream.host}: {error}")
                if not isinstance(error, WrongBytes):
                    break  # otherwise a base may be damaged, at either end: whole chunks do without it
        return None

    def _note(self, upstream: Upstream, error: TransferFailed) -> None:
        level = logging.INFO if self._stopped else logging.WARNING
        log.log(level, "relay: %s from %s: %s", self.order.name, upstream.host, error)
        if isinstance(error, WrongBytes):
            self.culprits.add(upstream.host)

    def _take(self, upstream: Upstream, base_name: str) -> Holding:
        measured = Measured()
        stream = self._connect(upstream)
        try:
            stream.secure(self.tls, server=False)
            began_s = time.monotonic()
            peer = Peer(upstream.host, upstream.epoch, upstream.address, ())
            far = greet(stream, self.own, peer, self.secret).host != self.own.host
            measured.start_s = (time.monotonic() - began_s) / GREETING_WAYS
            holding = self._open(stream)
            with base_of(holding.manifest, base_name, self.find) as base:
                needed = holding.lacked()
                stream.send(Kind.LACKED, {"base": base_name if base else ""}, [memoryview(packed(needed))])
                if needed:
                    self._receive(_Arriving(stream, holding, base, far, measured, self.wait_s + self.timeout_s))
            lacked = len(holding.lacked())
            if lacked:
                raise TransferFailed(f"it says that all was sent, and {lacked} chunks are lacking")
            self._seal(holding)
        except InvalidValue as error:  # the store has no room, or it is another model's
            raise TransferFailed(str(error)) from error
        finally:
            with self._lock:
                self._stream = self._upstream = None
            stream.close()
        self.link, self.taken_from = measured.link(), upstream.host
        return holding

    def _seal(self, holding: Holding) -> None:
        try:
            holding.seal()
        except OSError as error:
            raise TransferFailed(f"{holding.manifest.name} cannot be kept: {error.strerror}") from error

    def _connect(self, upstream: Upstream) -> Stream:
        host, _, port = upstream.address.rpartition(":")
        try:
            connected = socket.create_connection((host.strip("[]"), int(port)), min(CONNECT_S, self.timeout_s))
        except (OSError, ValueError) as error:
            raise TransferFailed(f"at {upstream.address!r}: {error}") from error
        stream = Stream(connected, self.timeout_s)
        stream.yield_to_others()
        with self._lock:
            self._stream, self._upstream = stream, upstream
            stale = self._stopped or upstream not in self.order.upstreams
        if stale:
            stream.close()
            raise TransferFailed(self._stopped or f"{upstream.host} is no longer asked")
        return stream

    def _open(self, stream: Stream) -> Holding:
        fetch = {"name": self.order.name, "piece_bytes": self.order.piece_bytes}
        stream.send(Kind.FETCH, {**fetch, "manifest": self._holding is None})
        frame = _heard(stream)
        if frame.kind is not Kind.HELD:
            raise TransferFailed(f"it sent {frame.kind.name}, not HELD")
        body = stream.read(frame.body_bytes)
        if self._holding is None:
            self._holding = self.hold(self._manifest(body))
        return self._holding

    def _manifest(self, body: bytes) -> Manifest:
        try:
            manifest = read_manifest(body.decode())
        except (InvalidValue, UnicodeDecodeError) as error:
            raise WrongBytes(f"its manifest: {error}") from error
        if manifest.name != self.order.name:
            raise WrongBytes(f"it sent the manifest of {manifest.name}")
        return manifest

    def _receive(self, arriving: "_Arriving") -> None:
        try:
            arriving.run(self.helpers, self.secret)
        finally:
            self.came_bytes += arriving.came_bytes


@dataclass(slots=True)
class _Arriving:
    stream: Stream
    holding: Holding
    base: Reader | None  # of deltas
    is_far: bool
    measured: Measured
    patience_s: float  # without a chunk
    came_bytes: int = 0
    _seen: set[int] = field(default_factory=set)  # chunks that were written, checked or not: none is written twice
    _checking: "deque[Future[int]]" = field(default_factory=deque)

    def run(self, helpers: Executor, secret: bytes) -> None:
        """Receives until the upstream reports the end. Raises TransferFailed."""
        try:
            self._hear(helpers, secret)
        except TransferFailed as error:
            raise self._settled(0) or error from error
        wrong = self._settled(0)
        if wrong is not None:
            raise wrong

    def _hear(self, helpers: Executor, secret: bytes) -> None:
        ready_s = 0.0  # when the last piece had come, where the next was ready then
        came_s = time.monotonic()
        while (frame := _heard(self.stream)).kind is not Kind.COMPLETE:
            if frame.kind is Kind.AWAITED:
                if time.monotonic() - came_s > self.patience_s:
                    raise TransferFailed(f"it awaits more, and nothing came for {self.patience_s:g} s")
                continue
            if frame.kind is not Kind.CHUNK:
                raise WrongBytes(f"it sent {frame.kind.name}")
            self._piece(frame, helpers, secret)
            came_s = time.monotonic()
            if ready_s:
                self.measured.add(frame.body_bytes, came_s - ready_s)
            ready_s = came_s if frame.field("more", bool, False) else 0.0

    def _piece(self, frame: Frame, helpers: Executor, secret: bytes) -> None:
        first, count = frame.field("first", int), frame.field("count", int)
        tags = frame.field("tags", bytes, b"")
        numbers = range(first, first + count)
        numbering = self.holding.numbering
        if not 0 <= first < first + count <= numbering.chunks or len(tags) != (count * TAG_BYTES if self.is_far else 0):
            raise WrongBytes(f"a piece of chunks {first} to {first + count}, with {len(tags)} bytes of tags")
        size = sum(numbering.chunk_bytes(number) for number in numbers)
        is_delta, fits = frame.field("delta", bool, False), frame.body_bytes == size
        if is_delta:
            fits = self.base is not None and count == 1 and 0 < frame.body_bytes <= size + 1
        if frame.field("size", int) != size or not fits:
            raise WrongBytes(f"a piece of {frame.body_bytes} bytes, whose chunks have {size}")
        receiving = self.holding.receiving
        assert receiving is not None
        for at, number in enumerate(numbers):
            file, index = numbering.place(number)
            if number in self._seen or receiving.has(file, index):
                raise WrongBytes(f"chunk {index} of {file}, which is here")
            self._seen.add(number)
            target = receiving.place(file, index)
            delta = None
            if is_delta and self.base is not None:
                delta = self.stream.read(frame.body_bytes), self.base.chunk(number)
            else:
                self.stream.read_into(target)
            tag = tags[at * TAG_BYTES : (at + 1) * TAG_BYTES]
            self._checking.append(helpers.submit(self._check, number, target, tag, secret, delta))
            error = self._settled(CHECKED_MAX)
            if error is not None:
                raise error

    def _check(self, number: int, content: memoryview, tag: bytes, secret: bytes, delta: Delta | None) -> int:
        """Checks that a chunk in its place belongs to the version. Only then may it be passed on.

        Decodes a ``delta`` to its place first. Returns the bytes that crossed the link.
        """
        file, index = self.holding.numbering.place(number)
        receiving = self.holding.receiving
        assert receiving is not None
        try:
            if delta is not None:
                content[:] = decode(*delta, content.nbytes)
            if tag and tag_of(content, secret) != tag:
                raise WrongBytes(f"{file}: chunk {index} was changed on the way")
            receiving.placed(file, index)
        except Conflict as error:  # the version was given up meanwhile
            raise TransferFailed(str(error)) from error
        except InvalidValue as error:
            self.stream.stop()  # nothing more is wanted from there
            raise WrongBytes(str(error)) from error
        except WrongBytes:
            self.stream.stop()
            raise
        self.holding.add(number, tag)
        return content.nbytes if delta is None else len(delta[0])

    def _settled(self, most: int) -> TransferFailed | None:
        found: TransferFailed | None = None
        while len(self._checking) > most:
            try:
                self.came_bytes += self._checking.popleft().result()
            except WrongBytes as error:
                found = error
            except TransferFailed as error:
                found = found or error
        return found


def _heard(stream: Stream) -> Frame:
    frame = stream.receive()
    if frame.kind is Kind.REFUSED:
        raise TransferFailed(f"refused: {frame.head.get('reason')}")
    return frame
