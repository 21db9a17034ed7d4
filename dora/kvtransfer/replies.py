"""What the other end of a pair says to what was sent: answers, refusals, and the end of each snapshot.

Each answer belongs to a question, and each other word to a snapshot that is under way. Whoever says more than that
breaks the rules, and the pair ends: so nothing can pile up here, and no answer is taken for another one's.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dora.errors import TransferFailed
from dora.kvtransfer.choice import Choice
from dora.kvtransfer.transfer import Sent, Transfer
from dora.kvtransfer.wire import Frame, Kind

Answer = tuple[Kind, dict[str, Any]]


@dataclass(slots=True)
class _Due:
    """All of it was sent; the other end has still to say what became of it."""

    transfer: Transfer
    transport: str
    began_s: float
    committed_s: float


class Replies:
    """One thread hears, another one sends. Refusals of a transport, not of a snapshot, are doubts for ``choice``."""

    def __init__(
        self, choice: Choice, send_again: Callable[[Transfer], None], lock: AbstractContextManager[object] | None = None
    ) -> None:
        """``send_again``: a snapshot whose transport has failed; called within ``lock``, as no place else has it."""
        self._choice = choice
        self._send_again = send_again
        self._lock = lock or threading.RLock()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._asked: tuple[Kind, str] | None = None  # kind and key of the answer that is due
        self._due: dict[str, _Due] = {}  # by key
        self._sending = ""  # the key of what is being sent, from the target's consent to the commit
        self._sending_by = ""  # and its transport
        self._refused = ""  # why the target has refused it since then
        self._ended = ""

    # The thread that sends.

    def begin(self, key: str, transport: str) -> None:
        """The target has consented to this snapshot."""
        with self._lock:
            self._sending, self._sending_by, self._refused = key, transport, ""

    @property
    def refused(self) -> str:
        """Why the target does not want what is being sent; empty: it does."""
        return self._refused

    def committed(self, key: str, transfer: Transfer, transport: str, began_s: float) -> None:
        """From here on the target's word on this key is the transfer's end."""
        with self._lock:
            self._sending = ""
            refused = self._refused or self._ended
            if not refused:
                self._due[key] = _Due(transfer, transport, began_s, time.monotonic())
        if refused:
            transfer.fail(refused)

    def ask(self, kind: Kind, key: str) -> None:
        """Something is asked now that is answered with this kind and key, or refused."""
        with self._lock:
            self._asked = kind, key

    def wait(self, timeout_s: float) -> Answer:
        """The answer. Raises queue.Empty where none comes in time."""
        return self._answers.get(timeout=timeout_s)

    def are_due(self) -> bool:
        with self._lock:
            return bool(self._due)

    def are_overdue(self, timeout_s: float) -> bool:
        """Whether the other end has been silent about a snapshot for so long."""
        with self._lock:
            return any(time.monotonic() - each.committed_s > timeout_s for each in self._due.values())

    # The thread that hears.

    def hear(self, frame: Frame) -> None:
        """Raises TransferFailed for what belongs to nothing."""
        key, reason = frame.field("key", str, ""), frame.field("reason", str, "")
        with self._lock:
            due = self._due.pop(key, None) if frame.kind in (Kind.ARRIVED, Kind.REFUSED) else None
            fails = frame.kind is Kind.REFUSED and frame.field("transport", bool, False)  # it, not the snapshot
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
                asked, self._asked = self._asked, None
                if asked is None or frame.kind not in (asked[0], Kind.REFUSED) or key != asked[1]:
                    raise TransferFailed(f"it said {frame.kind.name} for {key!r}, which nobody had asked")
                self._answers.put((frame.kind, frame.head))
                return
        if frame.kind is Kind.ARRIVED:
            self._arrived(key, due, bool(frame.head.get("ahead")))
        else:
            due.transfer.fail(reason)

    def end(self, reason: str) -> list[Transfer]:
        """No more will be heard. Returns what nothing was heard of; who waits for an answer gets ``reason``."""
        with self._lock:
            self._ended = reason
            left, self._due = [each.transfer for each in self._due.values()], {}
        self._answers.put((Kind.REFUSED, {"reason": reason}))
        return left

    def _arrived(self, key: str, due: _Due, is_ahead: bool) -> None:
        transfer, took_s = due.transfer, time.monotonic() - due.began_s
        self._choice.measure(due.transport, transfer.body_bytes, took_s)
        transfer.succeed(Sent(key, due.transport, transfer.body_bytes, took_s, tuple(transfer.fallbacks), is_ahead))
