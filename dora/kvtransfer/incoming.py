"""The receiving side of a pair: receives another worker's snapshots, on the thread of its connection."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from dora.errors import SnapshotRefused, TransferFailed
from dora.kvtransfer.arrivals import Arrival, Arrivals
from dora.kvtransfer.checksum import DIGEST_BYTES, Checksum, Digest, digest_with
from dora.kvtransfer.device import DeviceMemory, OnDevice
from dora.kvtransfer.listener import TICK_S
from dora.kvtransfer.memory import Memory
from dora.kvtransfer.peer import Identity, answer
from dora.kvtransfer.snapshot import Prefix
from dora.kvtransfer.transports.transport import CHUNK_MAX, NoRoom, Receiver, Sum, summed
from dora.kvtransfer.wire import ConnectionClosed, Frame, Kind, Stream

log = logging.getLogger("dora.worker")

VOID_MAX: Final = 16
PENDING_MAX: Final = 4  # chunks in transit while another is checked

MakeReceiver = Callable[[Identity, Stream], Receiver]


class Incoming:
    """Serves each connection on its own thread."""

    def __init__(
        self,
        own: Identity,
        secret: bytes,
        arrivals: Arrivals,
        pool: Memory,
        receivers: Mapping[str, MakeReceiver],
        timeout_s: float,
    ) -> None:
        self._own = own
        self._secret = secret
        self._arrivals = arrivals
        self._pool = pool
        self._receivers = receivers
        self._timeout_s = timeout_s
        self.device: DeviceMemory | None = None  # takes bodies that come straight from another device

    def serve(self, stream: Stream, stopping: threading.Event) -> None:
        try:
            peer = answer(stream, self._own, self._secret)
        except TransferFailed as error:
            log.warning("kv: %s", error)
            return
        checksum: Checksum = "blake3" if self._own.needs_proof(peer) else "xxh3"
        digest = digest_with(checksum, self._secret)
        device = self.device if peer.host == self._own.host else None  # its checksum finds no forgery
        connection = _Connection(stream, peer, self._arrivals, self._pool, self._receivers, checksum, digest, device)
        try:
            connection.run(stopping, self._timeout_s)
        except TransferFailed as error:
            voided = connection.under_way()
            if not stopping.is_set() and (voided or not isinstance(error, ConnectionClosed)):
                # Logged as text: a stored log record would otherwise reference the error's frames, and so memory of KV.
                log.warning("kv: from %s: %s; voided %d incoming snapshots", peer.worker_id, str(error), voided)
        finally:
            connection.close()


@dataclass(slots=True)
class _Use:
    """The transport of an arriving body, and its memory."""

    receiver: Receiver
    body: np.ndarray | OnDevice

    def end(self) -> None:
        self.receiver.end(self.body)


class _Connection:
    """One pair's stream, from the receiving side."""

    def __init__(
        self,
        stream: Stream,
        peer: Identity,
        arrivals: Arrivals,
        pool: Memory,
        receivers: Mapping[str, MakeReceiver],
        checksum: Checksum,
        digest: Digest,
        device: DeviceMemory | None,
    ) -> None:
        self._device = device
        self._stream = stream
        self._peer = peer
        self._arrivals = arrivals
        self._pool = pool
        self._make = receivers
        self._checksum: Checksum = checksum
        self._digest = digest
        self._receivers: dict[str, Receiver] = {}
        self._uses: dict[str, _Use] = {}  # by key
        self._void: dict[str, _Use] = {}  # refused, but not yet ended by the sender, which may still write there
        self._pending: deque[tuple[Arrival, Sum]] = deque()
        self._obey: dict[Kind, Callable[[Frame], None]] = {
            Kind.ATTACH: self._attach,
            Kind.OPEN: self._open,
            Kind.CHUNK: self._chunk,
            Kind.COMMIT: self._commit,
            Kind.CANCEL: self._cancel,
        }

    def run(self, stopping: threading.Event, timeout_s: float) -> None:
        """Serves until the other end disconnects, stalls within a snapshot, or violates the protocol."""
        heard_s = time.monotonic()
        while not stopping.is_set():
            if not self._stream.is_readable(TICK_S):
                if self._uses and time.monotonic() - heard_s > timeout_s:
                    raise TransferFailed(f"it stalled within a snapshot for {timeout_s:g} s")
                continue
            frame = self._stream.receive()
            heard_s = time.monotonic()
            obey = self._obey.get(frame.kind)
            if obey is None:
                raise TransferFailed(f"it sent {frame.kind.name}")
            try:
                obey(frame)
            except (KeyError, TypeError, ValueError, ArithmeticError) as error:
                raise TransferFailed(f"its {frame.kind.name} is invalid: {error!r}") from error

    def under_way(self) -> int:
        """The number of snapshots or rounds that have begun and are not complete."""
        return len(self._uses)

    def close(self) -> None:
        self._pending.clear()
        for key, use in [*self._uses.items(), *self._void.items()]:
            self._arrivals.drop(key)
            use.end()
        self._uses.clear()
        self._void.clear()
        for receiver in self._receivers.values():
            receiver.close()

    def _attach(self, frame: Frame) -> None:
        name = frame.field("transport", str)
        make = self._make.get(name)
        try:
            if make is None or frame.body_bytes:
                raise SnapshotRefused(f"transport {name!r}: this worker has {', '.join(self._make)}")
            if name in self._receivers:
                self._receivers.pop(name).close()
            self._receivers[name] = receiver = make(self._peer, self._stream)
            answer = receiver.attach(frame.head)
        except (SnapshotRefused, TransferFailed) as error:
            self._stream.send(Kind.REFUSED, {"reason": str(error)})
            return
        kind = "" if self._device is None else self._device.kind
        self._stream.send(Kind.ATTACHED, {**answer, "device": kind if kind in receiver.devices else ""})

    def _open(self, frame: Frame) -> None:
        head = frame.head
        key, ticket, body_bytes = frame.field("key", str), frame.field("ticket", str), frame.field("size", int)
        after, goes_on = frame.field("after", str, ""), frame.field("goes_on", bool, False)
        name = frame.field("transport", str)
        if name not in self._receivers or frame.body_bytes:
            raise TransferFailed(f"its OPEN names {name!r}, which is not attached, or has a body")
        receiver = self._receivers[name]
        try:
            before = self._arrivals.check_opening(ticket, self._peer.epoch, key, body_bytes, after)
            try:
                landing = receiver.begin(
                    head, body_bytes, self._memory(receiver, frame.field("memory", str, ""), ticket)
                )
            except SnapshotRefused as error:
                self._refuse(key, str(error), transport=True, full=isinstance(error, NoRoom))
                return
            use = _Use(receiver, landing.body)
            try:
                arrival = Arrival(key, ticket, self._peer.epoch, landing.body, before, goes_on)
                arrival.prefix = Prefix(str(head.get("prefix", "")), int(head.get("prefix_blocks", 0)))
                arrival.checksum = self._checksum
                self._arrivals.begin(arrival)
            except SnapshotRefused:
                use.end()
                raise
        except SnapshotRefused as error:
            self._refuse(key, str(error))
            return
        self._uses[key] = use
        self._stream.send(Kind.OPENED, {"key": key, **landing.answer})

    def _memory(self, receiver: Receiver, kind: str, ticket: str) -> Memory | DeviceMemory:
        """Returns the memory for a body on this kind of device. Raises SnapshotRefused if there is none for it."""
        if not kind:
            return self._pool
        if self._device is None or kind != self._device.kind or kind not in receiver.devices:
            raise SnapshotRefused(f"memory {kind!r}: this worker takes no body there by this transport", "memory", kind)
        if not self._arrivals.may_land(ticket, self._peer.epoch):
            raise NoRoom("no blocks are reserved: its KV waits in host memory")
        return self._device

    def _chunk(self, frame: Frame) -> None:
        key, at, size = frame.field("key", str), frame.field("at", int), frame.field("size", int)
        if key in self._void:
            self._skip(self._void[key].receiver, frame)
            return
        if key not in self._uses:
            raise TransferFailed(f"its CHUNK belongs to {key!r}, which it has not opened")
        receiver, arrival = self._uses[key].receiver, self._arrivals.find(key)
        if arrival is None:
            self._skip(receiver, frame)
            self._refuse(key, "it is no longer expected")
            return
        if at != arrival.filled_bytes or not 0 < size <= CHUNK_MAX or at + size > arrival.body.nbytes:
            whole, before = arrival.body.nbytes, arrival.filled_bytes
            raise TransferFailed(f"{key}: bytes {at} to {at + size} of {whole} cannot follow {before}")
        target = arrival.body[at : at + size]
        arrival.filled_bytes += size
        arrival.chunk_bytes = max(arrival.chunk_bytes, size)
        try:
            if isinstance(target, OnDevice):
                assert self._device is not None
                found = receiver.device_chunk(self._stream, frame, target, self._device.digest)
            else:
                found = receiver.chunk(self._stream, frame, target.data, self._digest)
        except SnapshotRefused as error:
            self._refuse(key, str(error), transport=True)
            return
        self._pending.append((arrival, found))
        self._check_pending(0 if isinstance(found, bytes) else PENDING_MAX)

    def _skip(self, receiver: Receiver, frame: Frame) -> None:
        with contextlib.suppress(SnapshotRefused):
            receiver.skip(self._stream, frame)

    def _check_pending(self, left: int) -> None:
        """Waits for chunks and their checksums, in the order of arrival, until only ``left`` are pending."""
        while len(self._pending) > left:
            arrival, found = self._pending.popleft()
            try:
                arrival.sums.append(summed(found))
            except SnapshotRefused as error:
                if arrival.key in self._uses:
                    self._refuse(arrival.key, str(error), transport=True)

    def _commit(self, frame: Frame) -> None:
        key, expected, chunks = frame.field("key", str), frame.field("sum", bytes), frame.field("chunks", int)
        body = self._stream.read(frame.body_bytes)
        sums = [body[at : at + DIGEST_BYTES] for at in range(0, min(chunks * DIGEST_BYTES, len(body)), DIGEST_BYTES)]
        head = body[chunks * DIGEST_BYTES :]
        self._check_pending(0)
        if key in self._void:
            self._void.pop(key).end()
            return
        use = self._uses.pop(key, None)
        if use is None:
            raise TransferFailed(f"its COMMIT belongs to {key!r}, which it has not opened")
        arrival = self._arrivals.find(key)
        reason = self._complete(key, head, sums, expected)
        use.end()
        if reason:
            self._refuse(key, reason)
        else:
            is_ahead = arrival is not None and arrival.ahead_bytes > 0
            self._stream.send(Kind.ARRIVED, {"key": key, "ahead": is_ahead})

    def _complete(self, key: str, head: bytes, sums: list[bytes], expected: bytes) -> str:
        """Completes a snapshot after its sender's commit. Returns why it is refused, or an empty text."""
        arrival = self._arrivals.find(key)
        if arrival is None:
            return "it is no longer expected"
        if arrival.filled_bytes != arrival.body.nbytes:
            return f"{arrival.filled_bytes} bytes arrived, {arrival.body.nbytes} were announced"
        has_head = arrival.goes_on or head or any(each.head for each in arrival.rounds())
        if not has_head or self._digest([*sums, head]) != expected:
            return "checksum of the head: its bytes are not those that were sent"
        if sums != arrival.sums:
            pairs = enumerate(zip(sums, arrival.sums, strict=False), 1)
            number = next((number for number, (sent, found) in pairs if sent != found), len(arrival.sums))
            return f"checksum of chunk {number}: its bytes are not those that were sent"
        try:
            return "" if self._arrivals.complete(arrival, head) else "it is no longer expected"
        except SnapshotRefused as error:
            return str(error)

    def _cancel(self, frame: Frame) -> None:
        key = frame.field("key", str)
        if frame.body_bytes:
            raise TransferFailed("its CANCEL has a body")
        self._check_pending(0)
        use = self._void.pop(key, None) or self._uses.pop(key, None)
        if use is not None:
            self._arrivals.drop(key)
            use.end()

    def _refuse(self, key: str, reason: str, transport: bool = False, full: bool = False) -> None:
        """With ``transport`` another transport might succeed, with ``full`` this one later."""
        use = self._uses.pop(key, None)
        if use is not None:
            self._void[key] = use
            if len(self._void) > VOID_MAX:
                raise TransferFailed(f"{len(self._void)} snapshots were refused and neither ended nor cancelled")
        self._arrivals.drop(key)
        log.warning("kv: refused %s from %s: %s", key, self._peer.worker_id, reason)
        self._stream.send(Kind.REFUSED, {"key": key, "reason": reason, "transport": transport, "full": full})
