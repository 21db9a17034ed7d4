"""One request on its way out of this process: round after round, each once the one before it has arrived.

A round is cut by the request's ``Rounds``: of an engine they are the blocks that have become full, of a pool the bodies
that came when the request was parked.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from dora.errors import DoraError, TransferFailed
from dora.kvtransfer.checksum import Seal
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import DataPlane
from dora.kvtransfer.snapshot import NO_PREFIX, Prefix
from dora.kvtransfer.transfer import Sent, Transfer


class NotMovable(DoraError):
    """The request's KV cannot move exactly; it must be re-prefilled."""


class Round(NamedTuple):
    """What travels at once; its first fields are those of ``DataPlane.send_parts``."""

    parts: Sequence[memoryview]
    head: bytes = b""
    seal: Seal | None = None
    goes_on: bool = False
    prefix: Prefix = NO_PREFIX
    is_first: bool = False  # the rounds sent before it are void
    leaves: "Callable[[Future[Sent]], None] | None" = None  # is called as the round leaves


class Rounds(Protocol):
    """The rounds of one request. One thread at a time uses it."""

    @property
    def opened(self) -> "Future[Any] | None":
        """Ends once the first round can be read; then any thread may ask for rounds. None: the caller's thread alone
        may, and it asks again and again."""

    @property
    def tokens(self) -> int:
        """Response tokens of the snapshot; -1: the request still decodes."""

    def next_round(self) -> Round | None:
        """The round that follows; None: not yet. Raises NotFound, NotMovable and TransferFailed where there is none."""

    def restarts(self) -> bool:
        """A round did not arrive: whether the next one may begin again with the first block."""

    def close(self, error: DoraError | None) -> DoraError | None:
        """No byte is read any longer. ``error``: why the copy failed. Returns the cause, if it lies in these bytes."""


class Copying:
    """``advance`` until it has returned the last round; ``finish`` once that round is done, or ``advance`` raised."""

    def __init__(self, plane: DataPlane, peer: Peer, request_id: str, rounds: Rounds) -> None:
        self._plane = plane
        self._peer = peer
        self._request_id = request_id
        self._after = ""  # key of the round that has arrived
        self._is_cancelled = False
        self.rounds = rounds
        self.arrived: list[Sent] = []
        self.current: Transfer | None = None

    @property
    def tokens(self) -> int:
        return self.rounds.tokens

    @property
    def is_ahead(self) -> bool:
        """Whether rounds are under way while the request decodes."""
        return self.tokens < 0 and (self.current is not None or bool(self.arrived))

    def cancel(self) -> None:
        """Makes void what was sent. Any thread may call it."""
        self._is_cancelled = True
        current = self.current
        if current is not None:
            current.cancel()

    def advance(self) -> Transfer | None:
        """Sends the next round if the one before has arrived. Returns the last round, whose end is the copy's.

        Raises NotFound for a request that has ended, NotMovable, and TransferFailed where a round did not arrive or
        the copy was cancelled.
        """
        if self.current is not None and not self.current.done.done():
            return None
        if self._is_cancelled:
            raise TransferFailed("it was cancelled")
        if self.current is not None:
            failed = self._take_arrived(self.current)
            if failed is not None and not self.rounds.restarts():
                # Another error: the transfer's own would hold this frame, and so the transfer itself.
                raise TransferFailed(str(failed))
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
        return None if found.goes_on else transfer

    def finish(self, error: DoraError | None = None) -> DoraError | None:
        """Ends the copy after its last round, or after ``error``. Returns why it failed; None: all has arrived."""
        current = self.current
        if error is None and current is not None:
            error = self._take_arrived(current)
        self.current = None
        return self.rounds.close(None if self._is_cancelled else error) or error

    def _take_arrived(self, transfer: Transfer) -> DoraError | None:
        """Moves a transfer that has ended to ``arrived``; if it failed, returns why."""
        self.current = None
        error = transfer.done.exception()
        if error is not None:
            assert isinstance(error, DoraError), error
            return error
        self.arrived.append(transfer.done.result())
        self._after = self.arrived[-1].key
        return None
