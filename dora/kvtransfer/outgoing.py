"""The sending side of one pair of workers: all snapshots to that worker, one after the other, on one stream.

A thread of its own connects, chooses the transport, and sends; a second one hears what the other end says. A transport
that fails is left for the next one; the pair itself fails only with its stream.
"""

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dora.errors import TransferFailed
from dora.kvtransfer.arrivals import PROBE, PROBE_BYTES
from dora.kvtransfer.checksum import Digest, digest_with
from dora.kvtransfer.peer import Identity, Peer, greet
from dora.kvtransfer.throttle import Throttle
from dora.kvtransfer.transfer import Sent, Transfer
from dora.kvtransfer.transport import Sender, Sum, cut, summed
from dora.kvtransfer.wire import Kind, Stream

log = logging.getLogger("dora.worker")

TICK_S: Final = 0.25
IDLE_S: Final = 60.0  # a pair without snapshots is closed after this
QUEUED_MOST: Final = 1024  # snapshots of one pair that wait; a further one fails
FASTER: Final = 1.25  # a later transport is taken where it was measured faster by this factor
MEASURED_LEAST_BYTES: Final = 1 << 20
SMOOTHING: Final = 0.3  # share of the newest measurement

MakeSender = Callable[[Identity, Stream], Sender]


@dataclass(slots=True)
class _Unacknowledged:
    transfer: Transfer
    transport: str
    began_s: float
    committed_s: float


class Pair:
    """``send`` from any thread. Once ``broken`` says why, everything of it has failed and it takes nothing more."""

    def __init__(
        self,
        own: Identity,
        peer: Peer,
        secret: bytes,
        senders: Mapping[str, MakeSender],
        throttle: Throttle,
        timeout_s: float,
        idle_s: float = IDLE_S,
    ) -> None:
        """``senders``: by name, in order of preference; of them those are used that the peer has too."""
        self.broken = ""
        self._own = own
        self._peer = peer
        self._secret = secret
        self._make = {name: make for name, make in senders.items() if name in peer.transports}
        self._throttle = throttle
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._waiting: queue.Queue[Transfer | None] = queue.Queue()
        self._answers: queue.Queue[tuple[Kind, dict[str, Any]]] = queue.Queue()
        self._unacknowledged: dict[str, _Unacknowledged] = {}
        self._current: Transfer | None = None  # being sent
        self._sending = ""  # its key, from the target's consent to the commit
        self._sending_by = ""  # and its transport
        self._refused = ""  # why the target has refused it since then
        self._to_leave: dict[str, str] = {}  # transports that the target has found not to work
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._senders: dict[str, Sender] = {}
        self._failed: set[str] = set()
        self._news: list[str] = []  # transports that failed, of which no transfer has told yet
        self._bytes_per_s: dict[str, float] = {}
        self._digest: Digest = digest_with("xxh3", secret)
        self._thread = threading.Thread(target=self._run, name=f"kv-out-{peer.worker_id}", daemon=True)
        self._thread.start()

    def send(self, transfer: Transfer) -> None:
        """Queues a snapshot; it fails where the pair is broken or too many wait."""
        with self._lock:
            refused = self.broken
            if self._waiting.qsize() >= QUEUED_MOST:
                refused = f"{QUEUED_MOST} snapshots wait for {self._peer.worker_id}"
            if not refused:
                self._waiting.put(transfer)
        if refused:
            transfer.fail(refused)

    def close(self) -> None:
        """Breaks off what is under way."""
        self._break("this worker ends")
        self._thread.join()

    def measured(self) -> dict[str, float]:
        """Bytes a second of each transport, as far as one was used."""
        return dict(self._bytes_per_s)

    # ------------------------------------------------------------------------------------------------- the own thread

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
            self._break("the pair has ended")
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
        if self.broken:  # meanwhile; from here on whoever breaks it stops the stream
            raise TransferFailed(self.broken)
        try:
            found = greet(stream, self._own, self._peer, self._secret)
        except TransferFailed as error:
            raise TransferFailed(f"{self._peer.worker_id}: {error}") from error
        if found.host != self._own.host:
            self._digest = digest_with("blake3", self._secret)
            self._make.pop("shm", None)
        return stream

    def _probe(self) -> None:
        """Times each transport once where there is a choice. Under a cap all are alike, and the first is as good."""
        if len(self._make) < 2 or self._throttle.is_capped:
            return
        zeros = memoryview(bytes(PROBE_BYTES))
        for name in list(self._make):
            try:
                for _ in range(2):  # memory that is touched for the first time is slow
                    self._bytes_per_s.pop(name, None)
                    probe = Transfer(PROBE, [zeros], b"probe")
                    self._copy(probe, name)
                    probe.done.result(self._timeout_s)
            except TimeoutError as error:
                raise TransferFailed(f"the other end answers no probe for {self._timeout_s:g} s") from error
            except (TransferFailed, _Void) as error:
                if self.broken:
                    raise TransferFailed(self.broken) from error
                self._leave(name, str(error))

    def _work(self) -> None:
        busy_s = time.monotonic()
        while not self.broken:
            try:
                transfer = self._waiting.get(timeout=TICK_S)
            except queue.Empty:
                self._check_acknowledged()
                if time.monotonic() - busy_s > self._idle_s and self._retires():
                    return
                continue
            if transfer is not None:
                self._current = transfer
                self._bring(transfer)
                self._current = None
                busy_s = time.monotonic()

    def _retires(self) -> bool:
        """Whether nothing is under way: then nothing more is taken either."""
        with self._lock:
            if self._unacknowledged or not self._waiting.empty():
                return False
            self.broken = f"idle for {self._idle_s:g} s"
            return True

    def _bring(self, transfer: Transfer) -> None:
        """One snapshot, over the best transport that works."""
        tried: set[str] = set()
        if transfer.cancelled.is_set():
            transfer.fail("it was cancelled")
        while not transfer.done.done():
            while self._to_leave:
                self._leave(*self._to_leave.popitem())
            transfer.fallbacks, self._news = [*transfer.fallbacks, *self._news], []
            name = next((name for name in self._order() if name not in tried), None)
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
                if name not in self._failed:  # it has no room just now
                    self._news.append(f"{name}: {error}")

    def _order(self) -> list[str]:
        """Transports that work, the best first: as preferred, but for a later one that was measured faster."""
        usable = [name for name in self._make if name not in self._failed]
        best: list[str] = []
        for name in usable:
            rate = self._bytes_per_s.get(name, 0.0)
            place = next(
                (i for i, other in enumerate(best) if rate > FASTER * self._bytes_per_s.get(other, rate)), len(best)
            )
            best.insert(place, name)
        return best

    def _leave(self, name: str, reason: str) -> None:
        """The transport does not work between these two."""
        self._failed.add(name)
        self._news.append(f"{name}: {reason}")
        log.warning("kv: %s to %s fails: %s", name, self._peer.worker_id, reason)
        sender = self._senders.pop(name, None)
        if sender is not None:
            sender.close()

    def _copy(self, transfer: Transfer, name: str) -> None:
        """Raises TransferFailed where the transport fails, _Void where the snapshot is not wanted any more."""
        key = f"{self._own.epoch}-{secrets.token_hex(16)}.kv"
        began_s = time.monotonic()
        sender = self._attached(name)
        body_bytes = transfer.body_bytes
        opening = {"key": key, "ticket": transfer.ticket, "transport": name, "size": body_bytes}
        opening.update(after=transfer.after, goes_on=not transfer.head)
        opening.update(sender.begin(body_bytes))  # where this raises, the transport has no room just now
        try:
            kind, answer = self._ask(Kind.OPEN, opening)
            if kind is Kind.REFUSED:
                raise (_NoRoom if answer.get("transport") else _Void)(str(answer.get("reason")))
            with self._lock:
                self._sending, self._sending_by, self._refused = key, name, ""
            sender.begun(answer)
            begun = self._send_chunks(transfer, key, sender)
            sender.finish()
            sums = [summed(found) for found in begun]
        except _Void:
            sender.abandon()
            self._say(Kind.CANCEL, {"key": key})
            raise
        except _NoRoom as error:
            sender.abandon()
            raise TransferFailed(str(error)) from error
        except TransferFailed as error:
            sender.abandon()
            if not self.broken:
                self._leave(name, str(error))
                self._say(Kind.CANCEL, {"key": key})
            raise
        self._await(key, _Unacknowledged(transfer, name, began_s, time.monotonic()))
        total = self._digest([*sums, transfer.head])
        body = [memoryview(b"".join(sums)), memoryview(transfer.head)]
        self._say(Kind.COMMIT, {"key": key, "sum": total, "chunks": len(sums)}, body)

    def _send_chunks(self, transfer: Transfer, key: str, sender: Sender) -> list[Sum]:
        sums: list[Sum] = []
        name = sender.name
        at = 0
        assert self._stream is not None
        for parts in cut(transfer.parts, sender.chunk_bytes):
            size = sum(part.nbytes for part in parts)
            self._throttle.pass_bytes(size)
            if transfer.cancelled.is_set():
                raise _Void("it was cancelled")
            if name in self._to_leave:
                raise TransferFailed(self._to_leave.pop(name))
            if self._refused:
                raise _Void(self._refused)
            if self.broken:
                raise TransferFailed(self.broken)
            sums.append(sender.chunk(self._stream, {"key": key, "at": at, "size": size}, parts, self._digest))
            at += size
        return sums

    def _await(self, key: str, waiting: _Unacknowledged) -> None:
        """From here on the target's word on this key is the transfer's end."""
        with self._lock:
            self._sending = ""
            if self._refused:
                waiting.transfer.fail(self._refused)
            else:
                self._unacknowledged[key] = waiting

    def _attached(self, name: str) -> Sender:
        sender = self._senders.get(name)
        if sender is not None:
            return sender
        assert self._stream is not None
        sender = self._make[name](self._own, self._stream)

        def ask(offer: dict[str, Any]) -> dict[str, Any]:
            kind, answer = self._ask(Kind.ATTACH, {**offer, "transport": name})
            if kind is Kind.REFUSED:
                raise TransferFailed(f"the other end refuses it: {answer.get('reason')}")
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

    def _ask(self, kind: Kind, head: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
        """Says something and waits for the answer."""
        self._say(kind, head)
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            self._break(f"{self._peer.worker_id} does not answer for {self._timeout_s:g} s")
            raise TransferFailed(self.broken) from None
        if self.broken:
            raise TransferFailed(self.broken)
        return answer

    def _check_acknowledged(self) -> None:
        oldest_s = min((each.committed_s for each in list(self._unacknowledged.values())), default=None)
        if oldest_s is not None and time.monotonic() - oldest_s > self._timeout_s:
            raise TransferFailed(f"{self._peer.worker_id} acknowledges nothing for {self._timeout_s:g} s")

    # -------------------------------------------------------------------------------------------- what the other says

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
        key = str(frame.head.get("key", ""))
        reason = str(frame.head.get("reason"))
        with self._lock:
            waiting = self._unacknowledged.pop(key, None)
            refused = frame.kind is Kind.REFUSED and key != "" and key == self._sending
            fails = bool(frame.head.get("transport"))  # the transport, not the snapshot
            if refused and fails:
                self._to_leave[self._sending_by] = reason
            elif refused:
                self._refused = reason
        if waiting is not None:
            if frame.kind is Kind.ARRIVED:
                self._arrived(key, waiting)
            elif fails:  # once more, by another one
                self._to_leave[waiting.transport] = reason
                self._waiting.put(waiting.transfer)
            else:
                waiting.transfer.fail(reason)
        elif not refused:
            self._answers.put((frame.kind, frame.head))

    def _arrived(self, key: str, waiting: _Unacknowledged) -> None:
        transfer, took_s = waiting.transfer, time.monotonic() - waiting.began_s
        if transfer.body_bytes >= MEASURED_LEAST_BYTES:
            rate = transfer.body_bytes / max(took_s, 1e-9)
            before = self._bytes_per_s.get(waiting.transport, rate)
            self._bytes_per_s[waiting.transport] = before + SMOOTHING * (rate - before)
        transfer.succeed(Sent(key, waiting.transport, transfer.body_bytes, took_s, tuple(transfer.fallbacks)))

    def _break(self, reason: str) -> None:
        """The pair is over, and all that waits on it has failed. Any thread may say so; the first reason holds."""
        with self._lock:
            if self.broken:
                return
            self.broken = reason
            failed = [each.transfer for each in self._unacknowledged.values()]
            self._unacknowledged.clear()
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting = self._waiting.get_nowait()
                    if waiting is not None:
                        failed.append(waiting)
        self._waiting.put(None)
        self._answers.put((Kind.REFUSED, {"reason": reason}))
        if self._stream is not None:
            self._stream.stop()
        for transfer in failed:
            transfer.fail(reason)


class _Void(Exception):
    """The snapshot is not wanted any more: no transport could do better."""


class _NoRoom(Exception):
    """The target cannot take it by this transport; by another one it may."""
