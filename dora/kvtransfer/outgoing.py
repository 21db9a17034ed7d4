"""The sending side of a pair of workers: sends all snapshots to one worker, one at a time, on one stream.

One thread connects and sends each snapshot by the transport that ``TransportChoice`` selects; a second one receives
replies. If a transport fails, the next one is used; the pair itself fails only with its stream.
"""

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from dora.errors import TransferFailed
from dora.kvtransfer.arrivals import PROBE, PROBE_BYTES
from dora.kvtransfer.checksum import Checksum, Digest, Seal, digest_with
from dora.kvtransfer.choice import TransportChoice
from dora.kvtransfer.device import DeviceMemory, Part
from dora.kvtransfer.peer import Identity, Peer, greet
from dora.kvtransfer.replies import Answer, Replies
from dora.kvtransfer.throttle import Throttle
from dora.kvtransfer.transfer import Transfer
from dora.kvtransfer.transports.transport import Sender, Sum, cut, summed
from dora.kvtransfer.wire import Kind, Stream
from dora.tls.contexts import Contexts

log = logging.getLogger("dora.worker")

TICK_S: Final = 0.25
IDLE_S: Final = 60.0  # a pair without snapshots is closed after this time
QUEUED_MAX: Final = 1024  # queued snapshots of one pair; a further one fails

MakeSender = Callable[[Identity, Stream], Sender]


class Pair:
    """``send`` is thread-safe. Once ``broken`` has a reason, all transfers have failed and no more are accepted."""

    def __init__(
        self,
        own: Identity,
        peer: Peer,
        secret: bytes,
        senders: Mapping[str, MakeSender],
        throttle: Throttle,
        timeout_s: float,
        idle_s: float = IDLE_S,
        device: DeviceMemory | None = None,
        tls: Contexts | None = None,
    ) -> None:
        """``senders`` are by name, in order of preference; only those that the peer has too are used.

        Bodies in the memory of ``device`` go straight to another device, where transport and target can.
        """
        self.broken = ""
        self._own = own
        self._peer = peer
        self._secret = secret
        self._make = senders
        self._choice = TransportChoice(name for name in senders if name in peer.transports)
        self._throttle = throttle
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._device = device
        self._tls = tls
        self._straight: set[str] = set()  # transports that take bodies from this device to one of the target
        self._waiting: queue.Queue[Transfer | None] = queue.Queue()
        self._lock = threading.RLock()
        self._replies = Replies(self._choice, self._waiting.put, self._lock)
        self._current: Transfer | None = None  # being sent
        self._stream: Stream | None = None
        self._senders: dict[str, Sender] = {}
        self._checksum: Checksum = "xxh3"
        self._digest: Digest = digest_with("xxh3", secret)
        self._thread = threading.Thread(target=self._run, name=f"kv-out-{peer.worker_id}", daemon=True)
        self._thread.start()

    def send(self, transfer: Transfer) -> None:
        """Queues a snapshot, which fails if the pair is broken or too many are queued."""
        with self._lock:
            refused = self.broken
            if self._waiting.qsize() >= QUEUED_MAX:
                refused = f"{QUEUED_MAX} snapshots wait for {self._peer.worker_id}"
            if not refused:
                self._waiting.put(transfer)
        if refused:
            transfer.fail(refused)

    def close(self) -> None:
        self._break("this worker ends")
        self._thread.join()

    def measured(self) -> dict[str, float]:
        """Bytes per second of each transport that was used."""
        return self._choice.measured()

    # ------------------------------------------------------------------------------------------------ the sending
    # thread

    def _run(self) -> None:
        hearing: threading.Thread | None = None
        try:
            stream = self._connect()
            hearing = threading.Thread(target=self._hear, args=(stream,), name="kv-acks", daemon=True)
            hearing.start()
            self._probe()
            self._work()
        except TransferFailed as error:
            self._break(str(error))
        finally:
            self._break("the pair is closed")
            if self._current is not None:
                self._current.fail(self.broken)
            if hearing is not None:
                hearing.join()
            for sender in self._senders.values():
                sender.close()
            if self._stream is not None:
                self._stream.close()

    def _connect(self) -> Stream:
        host, _, port = self._peer.address.rpartition(":")
        try:
            connected = socket.create_connection((host.strip("[]"), int(port)), self._timeout_s)
        except (OSError, ValueError) as error:
            raise TransferFailed(f"{self._peer.worker_id} at {self._peer.address!r}: {error}") from error
        self._stream = stream = Stream(connected, self._timeout_s)
        if self.broken:  # broken meanwhile; after this point ``_break`` stops the stream
            raise TransferFailed(self.broken)
        try:
            stream.secure(self._tls, server=False)
            found = greet(stream, self._own, self._peer, self._secret)
        except TransferFailed as error:
            raise TransferFailed(f"{self._peer.worker_id}: {error}") from error
        if self._own.needs_proof(found):
            self._checksum = "blake3"
            self._digest = digest_with("blake3", self._secret)
        if found.host != self._own.host:
            self._device = None  # the device's checksum finds no forgery
            self._choice.rule_out("shm")
        return stream

    def _probe(self) -> None:
        """Times each transport once if there is a choice. Under a bandwidth cap all are alike; the first is used."""
        names = self._choice.order()
        if len(names) < 2 or self._throttle.is_capped:
            return
        zeros: Part | None = None if self._device is None else self._device.array(PROBE_BYTES)
        zeros = memoryview(bytes(PROBE_BYTES)) if zeros is None else zeros
        for name in names:
            try:
                for _ in range(2):  # the first touch of memory is slow
                    self._choice.forget_measured(name)
                    probe = Transfer(PROBE, [zeros], b"probe")
                    self._copy(probe, name)
                    probe.done.result(self._timeout_s)
            except TimeoutError as error:
                raise TransferFailed(f"the other end answered no probe for {self._timeout_s:g} s") from error
            except (TransferFailed, _Void) as error:
                if self.broken:
                    raise TransferFailed(self.broken) from error
                if not isinstance(error, _Full):  # a full transport may work; it is timed when it is used
                    self._leave(name, str(error))

    def _work(self) -> None:
        busy_s = time.monotonic()
        while not self.broken:
            try:
                transfer = self._waiting.get(timeout=TICK_S)
            except queue.Empty:
                self._check_due()
                if time.monotonic() - busy_s > self._idle_s and self._retires():
                    return
                continue
            if transfer is not None:
                self._current = transfer
                self._bring(transfer)
                self._current = transfer = None  # frees its memory
                busy_s = time.monotonic()

    def _check_due(self) -> None:
        if self._replies.are_overdue(self._timeout_s):
            raise TransferFailed(f"{self._peer.worker_id} acknowledges nothing for {self._timeout_s:g} s")

    def _retires(self) -> bool:
        """Closes the pair if no transfer is queued or in progress; returns whether it did."""
        with self._lock:
            if self._replies.are_due() or not self._waiting.empty():
                return False
            self.broken = f"idle for {self._idle_s:g} s"
            return True

    def _bring(self, transfer: Transfer) -> None:
        tried: set[str] = set()
        if transfer.cancelled.is_set():
            transfer.fail("it was cancelled")
        while not transfer.done.done():
            for suspected, reason in self._choice.take_suspects().items():
                self._leave(suspected, reason)
            transfer.fallbacks += self._choice.take_news()
            name = next((name for name in self._choice.order() if name not in tried), None)
            if name is None:
                said = "; ".join(transfer.fallbacks) or "the two workers have none in common"
                transfer.fail(f"no transport is left: {said}")
                return
            tried.add(name)
            try:
                self._copy(transfer, name)
                return
            except _Void as void:
                transfer.fail(str(void))
                return
            except TransferFailed as error:
                if self.broken:
                    transfer.fail(self.broken)
                    return
                if isinstance(error, _Full) and transfer.is_on_device:  # its host's memory may have room
                    try:
                        transfer.to_host()
                    except TransferFailed as full:
                        transfer.fail(str(full))
                    tried.discard(name)
                elif self._choice.works(name):  # it only has no room now
                    self._choice.pass_over(name, str(error))

    def _leave(self, name: str, reason: str) -> None:
        self._choice.leave(name, reason)
        self._straight.discard(name)
        log.warning("kv: %s to %s fails: %s", name, self._peer.worker_id, reason)
        sender = self._senders.pop(name, None)
        if sender is not None:
            sender.close()

    def _copy(self, transfer: Transfer, name: str) -> None:
        """Raises TransferFailed if the transport fails, _Void if the snapshot is no longer wanted."""
        key = f"{self._own.epoch}-{secrets.token_hex(16)}.kv"
        began_s = time.monotonic()
        sender = self._attached(name)
        body_bytes = transfer.body_bytes
        device = self._device if name in self._straight and transfer.is_on_device else None
        if device is None:
            try:
                transfer.to_host()
            except TransferFailed as error:
                raise _Void(str(error)) from error
        opening = {"key": key, "ticket": transfer.ticket, "transport": name, "size": body_bytes}
        opening.update(after=transfer.after, goes_on=transfer.goes_on)
        opening.update(memory="" if device is None else device.kind)
        opening.update(prefix=transfer.prefix.key, prefix_blocks=transfer.prefix.blocks)
        opening.update(sender.begin(body_bytes))  # if this raises, the transport has no room now
        try:
            kind, answer = self._ask(Kind.OPEN, opening, Kind.OPENED)
            if kind is Kind.REFUSED:
                raise _refusal(answer)
            self._replies.begin(key, name)
            sender.begun(answer)
            begun = self._send_chunks(transfer, key, sender, device)
            refused = sender.if_refused()
            sender.finish()
            sums = [summed(found) for found in begun]
            transfer.done.add_done_callback(lambda done: done.exception() and refused())
        except _Void:
            sender.abandon()
            self._say(Kind.CANCEL, {"key": key})
            raise
        except _NotThisWay:
            sender.abandon()
            raise
        except TransferFailed as error:
            sender.abandon()
            if not self.broken:
                self._leave(name, str(error))
                self._say(Kind.CANCEL, {"key": key})
            raise
        self._replies.committed(key, transfer, name, began_s)
        total = self._digest([*sums, transfer.head])
        body = [memoryview(b"".join(sums)), memoryview(transfer.head)]
        self._say(Kind.COMMIT, {"key": key, "sum": total, "chunks": len(sums)}, body)

    def _send_chunks(self, transfer: Transfer, key: str, sender: Sender, device: DeviceMemory | None) -> list[Sum]:
        sums: list[Sum] = []
        name = sender.name
        seal = self._usable_seal(transfer, sender)
        at = 0
        assert self._stream is not None
        chunks: Iterator[list[Any]] = cut(cast(Sequence[Any], transfer.parts), sender.chunk_bytes)
        for parts in chunks:
            size = sum(part.nbytes for part in parts)
            self._throttle.pass_bytes(size)
            if transfer.cancelled.is_set():
                raise _Void("it was cancelled")
            if suspect := self._choice.take_suspect(name):
                raise TransferFailed(suspect)
            if self._replies.refused:
                raise _Void(self._replies.refused)
            if self.broken:
                raise TransferFailed(self.broken)
            head = {"key": key, "at": at, "size": size}
            if device is None:
                digest = self._digest if seal is None else seal.digest_of(len(sums))
                sums.append(sender.chunk(self._stream, head, parts, digest))
            else:
                sums.append(sender.device_chunk(self._stream, head, parts, device.digest))
            at += size
        return sums

    def _usable_seal(self, transfer: Transfer, sender: Sender) -> Seal | None:
        """The body's own seal, if this transport has the same chunks. Otherwise checks the body and returns None."""
        seal = transfer.seal
        if seal is None or seal.fits(self._checksum, sender.chunk_bytes, transfer.body_bytes):
            return seal
        number = seal.damaged(transfer.to_host()[0], self._secret)
        if number:
            raise _Void(f"chunk {number} has changed since it arrived here")
        return None

    def _attached(self, name: str) -> Sender:
        sender = self._senders.get(name)
        if sender is not None:
            return sender
        assert self._stream is not None
        sender = self._make[name](self._own, self._stream)

        def ask(offer: dict[str, Any]) -> dict[str, Any]:
            self._straight.discard(name)
            kind, answer = self._ask(Kind.ATTACH, {**offer, "transport": name}, Kind.ATTACHED)
            if kind is Kind.REFUSED:
                raise TransferFailed(f"the other end refused it: {answer.get('reason')}")
            memory = "" if self._device is None else self._device.kind
            if memory in sender.devices and answer.get("device") == memory:
                self._straight.add(name)
            return answer

        try:
            sender.attach(ask)
        except TransferFailed as error:
            sender.close()
            self._leave(name, str(error))
            raise
        self._senders[name] = sender
        return sender

    def _say(self, kind: Kind, head: dict[str, Any], body: Sequence[memoryview] = ()) -> None:
        assert self._stream is not None
        try:
            self._stream.send(kind, head, body)
        except TransferFailed as error:
            self._break(str(error))
            raise

    def _ask(self, kind: Kind, head: dict[str, Any], expected: Kind) -> Answer:
        self._replies.ask(expected, str(head.get("key", "")))
        self._say(kind, head)
        try:
            answer = self._replies.wait(self._timeout_s)
        except queue.Empty:
            self._break(f"{self._peer.worker_id} did not answer for {self._timeout_s:g} s")
            raise TransferFailed(self.broken) from None
        if self.broken:
            raise TransferFailed(self.broken)
        return answer

    # --------------------------------------------------------------------------------------------- the receiving thread

    def _hear(self, stream: Stream) -> None:
        try:
            while not self.broken:
                if stream.is_readable(TICK_S):
                    self._heard(stream)
        except TransferFailed as error:
            self._break(f"{self._peer.worker_id}: {error}")

    def _heard(self, stream: Stream) -> None:
        frame = stream.receive()
        stream.drain(frame.body_bytes)
        self._replies.hear(frame)

    def _break(self, reason: str) -> None:
        """Ends the pair and fails all its transfers. Thread-safe; the first reason is retained."""
        with self._lock:
            if self.broken:
                return
            self.broken = reason
            failed = self._replies.end(reason)
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting = self._waiting.get_nowait()
                    if waiting is not None:
                        failed.append(waiting)
        self._waiting.put(None)
        if self._stream is not None:
            self._stream.stop()
        for transfer in failed:
            transfer.fail(reason)


class _Void(Exception):
    """The snapshot is no longer wanted; another transport would not help."""


class _NotThisWay(TransferFailed):
    """The target cannot accept it by this transport, but may by another."""


class _Full(_NotThisWay):
    """The target has no room for it now."""


def _refusal(answer: dict[str, Any]) -> Exception:
    kind = _Full if answer.get("full") else _NotThisWay if answer.get("transport") else _Void
    return kind(str(answer.get("reason")))
