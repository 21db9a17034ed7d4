"""The transfer of one snapshot to another worker, and its result."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from dora.errors import TransferFailed
from dora.kvtransfer.checksum import Seal
from dora.kvtransfer.device import Part, in_host_memory, is_on_device
from dora.kvtransfer.snapshot import NO_PREFIX, Prefix


@dataclass(frozen=True, slots=True)
class Sent:
    key: str  # its key at the target
    transport: str
    body_bytes: int
    took_s: float
    fallbacks: tuple[str, ...] = ()  # transports that failed before, each with its reason
    is_ahead: bool = False  # whether this round was written to its destination already


@dataclass(eq=False)
class Transfer:
    """A snapshot, or one round of it, in transit; the consecutive ``parts`` are its body.

    The parts must not change until it is done or cancelled. ``after`` is the key of the previous round. If it
    ``goes_on``, another follows. A body from another worker has a ``seal``. A first round may follow a ``prefix``.
    """

    ticket: str
    parts: Sequence[Part]
    head: bytes
    after: str = ""
    seal: Seal | None = None
    goes_on: bool = False
    prefix: Prefix = NO_PREFIX
    done: "Future[Sent]" = field(default_factory=Future)  # its exception is TransferFailed
    cancelled: threading.Event = field(default_factory=threading.Event)
    fallbacks: list[str] = field(default_factory=list)

    def cancel(self) -> None:
        self.cancelled.set()

    @property
    def is_on_device(self) -> bool:
        return is_on_device(self.parts)

    def to_host(self) -> list[memoryview]:
        """Brings the body into host memory, if it is elsewhere. Raises TransferFailed if there is no room."""
        self.parts = found = in_host_memory(self.parts)
        return found

    @property
    def body_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def succeed(self, sent: Sent) -> None:
        with suppress(InvalidStateError):  # another thread was first
            self.done.set_result(sent)

    def fail(self, reason: str) -> None:
        with suppress(InvalidStateError):
            self.done.set_exception(TransferFailed(reason))
