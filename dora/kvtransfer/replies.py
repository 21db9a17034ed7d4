"""Replies of a pair's other end: answers, refusals, and the result of each snapshot.

Each answer belongs to a question, and each other reply to a snapshot in progress. Any other reply violates the protocol
and ends the pair, so replies cannot accumulate here or be mistaken for others.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dora.errors import TransferFailed
from dora.kvtransfer.choice import TransportChoice
from dora.kvtransfer.transfer import Sent, Transfer
from dora.kvtransfer.wire import Frame, Kind

Answer = tuple[Kind, dict[str, Any]]


@dataclass(slots=True)
class _Due:
    """A snapshot that was sent completely and awaits its result."""

    transfer: Transfer
    transport: str
    began_s: float
    committed_s: float


class Replies:
    """One thread receives, another one sends. A transport that is refused is marked as suspect in ``choice``."""

    def __init__(
        self,
        choice: TransportChoice,
        send_again: Callable[[Transfer], None],
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """``send_again`` sends a snapshot again after its transport failed; called with ``lock`` held."""
        self._choice = choice
        self._send_again = send_again
        self._lock = lock or threading.RLock()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._expected: tuple[Kind, str] | None = None  # kind and key of the expected answer
        self._due: dict[str, _Due] = {}  # by key
        self._sending = ""  # key of the snapshot being sent, from the target's consent to the commit
        self._sending_by = ""  # and its transport
        self._refused = ""  # why the target has refused it since then
        self._ended = ""

    # Called by the sending thread.

    def begin(self, key: str, transport: str) -> None:
        """Notes that the target has consented to this snapshot."""
        with self._lock:
            self._sending, self._sending_by, self._refused = key, transport, ""

    @property
    def refused(self) -> str:
        """The target's reason to refuse the snapshot being sent, or an empty text."""
        return self._refused

    def committed(self, key: str, transfer: Transfer, transport: str, began_s: float) -> None:
        """Notes that a snapshot was sent; the target's next reply for this key ends the transfer."""
        with self._lock:
            self._sending = ""
            refused = self._refused or self._ended
            if not refused:
                self._due[key] = _Due(transfer, transport, began_s, time.monotonic())
        if refused:
            transfer.fail(refused)

    def ask(self, kind: Kind, key: str) -> None:
        """Notes a question whose answer has this kind and key, or is a refusal."""
        with self._lock:
            self._expected = kind, key

    def wait(self, timeout_s: float) -> Answer:
        """The answer. Raises queue.Empty after the timeout."""
        return self._answers.get(timeout=timeout_s)

    def are_due(self) -> bool:
        with self._lock:
            return bool(self._due)

    def are_overdue(self, timeout_s: float) -> bool:
        with self._lock:
            return any(time.monotonic() - each.committed_s > timeout_s for each in self._due.values())

    # Called by the receiving thread.

    def hear(self, frame: Frame) -> None:
        """Handles a reply. Raises TransferFailed for one that belongs to nothing."""
        key, reason = frame.field("key", str, ""), frame.field("reason", str, "")
        with self._lock:
            due = self._due.pop(key, None) if frame.kind in (Kind.ARRIVED, Kind.REFUSED) else None
            fails = frame.kind is Kind.REFUSED and frame.field("transport", bool, False)  # not the snapshot
            if due is not None and fails:
                self._choice.suspect(due.transport, reason)
                self._send_again(due.transfer)
                return
            if due is None and frame.kind is Kind.REFUSED and key and key == self._sending:
                if fails:
                    self._choice.suspect(self._sending_by, reason)
                else:
                    self._refused = reason
                return
            if due is None:
                expected, self._expected = self._expected, None
                if expected is None or frame.kind not in (expected[0], Kind.REFUSED) or key != expected[1]:
                    said = f"it sent {frame.kind.name} for {key!r} without being asked"
                    raise TransferFailed(said, "frame", frame.kind.name)
                self._answers.put((frame.kind, frame.head))
                return
        if frame.kind is Kind.ARRIVED:
            self._arrived(key, due, bool(frame.head.get("ahead")))
        else:
            due.transfer.fail(reason)

    def end(self, reason: str) -> list[Transfer]:
        """Ends the replies. Returns the transfers without a result; a waiting ``wait`` gets ``reason`` as a refusal."""
        with self._lock:
            self._ended = reason
            left, self._due = [each.transfer for each in self._due.values()], {}
        self._answers.put((Kind.REFUSED, {"reason": reason}))
        return left

    def _arrived(self, key: str, due: _Due, is_ahead: bool) -> None:
        transfer, took_s = due.transfer, time.monotonic() - due.began_s
        self._choice.measure(due.transport, transfer.body_bytes, took_s)
        transfer.succeed(Sent(key, due.transport, transfer.body_bytes, took_s, tuple(transfer.fallbacks), is_ahead))
