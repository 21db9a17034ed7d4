"""Copies one request out of this process: round after round, each sent after the previous one has arrived.

The request's ``Rounds`` cut it: an engine sends the blocks that have become full, a pool sends the bodies that arrived
when the request was parked.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from dora.errors import DoraError, TransferFailed
from dora.kvtransfer.checksum import Seal
from dora.kvtransfer.device import Part
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import DataPlane
from dora.kvtransfer.snapshot import NO_PREFIX, Prefix
from dora.kvtransfer.transfer import Sent, Transfer


class NotMovable(DoraError):
    """The request's KV cannot be moved exactly; it must be prefilled again."""


class Round(NamedTuple):
    """One unit of transfer; its first fields are the arguments of ``DataPlane.send_parts``."""

    parts: Sequence[Part]
    head: bytes = b""
    seal: Seal | None = None
    goes_on: bool = False
    prefix: Prefix = NO_PREFIX
    is_first: bool = False  # rounds sent before it are void
    leaves: "Callable[[Future[Sent]], None] | None" = None  # called when the round is sent


class Rounds(Protocol):
    """The rounds of one request. Used by one thread at a time."""

    @property
    def opened(self) -> "Future[Any] | None":
        """Completes when the first round can be read; after that, any thread may ask for rounds. If it is None, only
        the caller's thread may ask, and must poll.
        """

    @property
    def tokens(self) -> int:
        """Response tokens of the snapshot, or -1 while the request decodes."""

    def next_round(self) -> Round | None:
        """The next round, or None if it must wait. Raises NotFound, NotMovable or TransferFailed if there is none."""

    def restarts(self) -> bool:
        """Called if a round did not arrive. Returns whether the copy may start again from the first block."""

    def close(self, error: DoraError | None) -> DoraError | None:
        """Ends reading. ``error`` says why the copy failed. Returns the cause if these bytes are at fault."""


class CopyReply(Protocol):
    """Receives the progress of a copy. ``ends`` is called once: after ``freezes`` by any thread; for a pool always."""

    def began(self) -> None:
        """Rounds are being sent while the request decodes."""

    def freezes(self) -> None:
        """The request is frozen, and its last round is being sent."""

    def ends(self, copying: "Copying", error: DoraError | None) -> None: ...


class Copying:
    """Call ``advance`` until it returns the last round, and ``finish`` once that is done or ``advance`` raised."""

    def __init__(
        self, plane: DataPlane, peer: Peer, request_id: str, rounds: Rounds, reply: CopyReply | None = None
    ) -> None:
        self._plane = plane
        self._peer = peer
        self._request_id = request_id
        self._reply = reply
        self._after = ""  # key of the last round that arrived
        self._is_cancelled = False
        self._is_told = False  # ``began`` was called
        self._over = threading.Lock()  # held once ``ends`` was called
        self.is_last = False  # its last round is being sent
        self.rounds = rounds
        self.arrived: list[Sent] = []
        self.current: Transfer | None = None

    @property
    def tokens(self) -> int:
        return self.rounds.tokens

    @property
    def is_ahead(self) -> bool:
        return self.tokens < 0 and (self.current is not None or bool(self.arrived))

    @property
    def is_over(self) -> bool:
        return self._over.locked()

    def cancel(self) -> None:
        """Voids the rounds that were sent. Thread-safe."""
        self._is_cancelled = True
        current = self.current
        if current is not None:
            current.cancel()

    def advance(self) -> Transfer | None:
        """Sends the next round if the previous one has arrived. Returns the last round, whose completion ends the copy.

        Raises NotFound for a request that has ended, NotMovable, and TransferFailed if a round did not arrive or the
        copy was cancelled.
        """
        if self.current is not None and not self.current.done.done():
            return None
        if self._is_cancelled:
            raise TransferFailed("it was cancelled")
        failed = self._take_arrived()
        if failed is not None and not self.rounds.restarts():
            raise TransferFailed(str(failed))  # the transfer's own error would reference this frame, hence the transfer
        found = self.rounds.next_round()
        if found is None:
            return None
        after = "" if found.is_first else self._after
        self.current = transfer = self._plane.send_parts(
            self._peer, self._request_id, found.parts, found.head, after, found.seal, found.goes_on, found.prefix
        )
        if self._is_cancelled:
            transfer.cancel()
        if found.leaves is not None:
            found.leaves(transfer.done)
        self.is_last = not found.goes_on
        return transfer if self.is_last else None

    def proceed(self) -> None:
        """Advances and reports it. If any thread may ask for rounds, the rest of the copy continues by itself."""
        try:
            last = self.advance()
        except DoraError as error:
            self.end(self.finish(error))
            return
        current = self.current
        if self._reply is not None and self.is_ahead and not self._is_told:
            self._is_told = True
            self._reply.began()
        if last is not None:
            if self._reply is not None:
                self._reply.freezes()
            last.done.add_done_callback(lambda _done: self.end(self.finish()))
        elif current is not None and self.rounds.opened is not None:
            current.done.add_done_callback(lambda _done: self.proceed())

    def finish(self, error: DoraError | None = None) -> DoraError | None:
        """Ends the copy after its last round, or after ``error``. Returns why it failed, or None if all arrived."""
        error = error or self._take_arrived()
        self.current = None
        return self.rounds.close(None if self._is_cancelled else error) or error

    def end(self, error: DoraError | None) -> None:
        if self._over.acquire(blocking=False) and self._reply is not None:
            self._reply.ends(self, error)

    def _take_arrived(self) -> DoraError | None:
        """Moves a completed transfer to ``arrived``; if it failed, returns why."""
        transfer, self.current = self.current, None
        if transfer is None:
            return None
        error = transfer.done.exception()
        if error is not None:
            assert isinstance(error, DoraError), error
            return error
        self.arrived.append(transfer.done.result())
        self._after = self.arrived[-1].key
        return None
