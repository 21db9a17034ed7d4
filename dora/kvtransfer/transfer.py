"""One snapshot on its way from a worker to another, and how it got there."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from dora.errors import TransferFailed
from dora.kvtransfer.checksum import Seal
from dora.kvtransfer.snapshot import NO_PREFIX, Prefix


@dataclass(frozen=True, slots=True)
class Sent:
    """How a snapshot reached its target."""

    key: str  # under which it is there
    transport: str
    body_bytes: int
    took_s: float
    fallbacks: tuple[str, ...] = ()  # transports that failed before, each with its reason
    is_ahead: bool = False  # it is a round that lies where its request is to be taken in


@dataclass(eq=False)
class Transfer:
    """A snapshot, or one round of it, on its way: ``parts`` in a row are its body.

    They must not change before it is done, or else it must be cancelled. ``after``: the key of the round before.
    ``goes_on``: another round follows. A body that was received before has its ``seal``. A first round may follow on a
    ``prefix``.
    """

    ticket: str
    parts: Sequence[memoryview]
    head: bytes
    after: str = ""
    seal: Seal | None = None
    goes_on: bool = False
    prefix: Prefix = NO_PREFIX
    done: "Future[Sent]" = field(default_factory=Future)  # its exception is TransferFailed
    cancelled: threading.Event = field(default_factory=threading.Event)
    fallbacks: list[str] = field(default_factory=list)

    def cancel(self) -> None:
        """The snapshot is void. What has left already is dropped at the target."""
        self.cancelled.set()

    @property
    def body_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def succeed(self, sent: Sent) -> None:
        with suppress(InvalidStateError):  # another thread was first
            self.done.set_result(sent)

    def fail(self, reason: str) -> None:
        with suppress(InvalidStateError):
            self.done.set_exception(TransferFailed(reason))
