"""One parked snapshot on its way out of the pool: its rounds one after the other, each under the sums it came with.

The bytes are sent from where they lie. If they do not arrive they are looked at: what has changed meanwhile is lost.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from dora.errors import DoraError, TransferFailed
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import DataPlane
from dora.kvtransfer.transfer import Sent, Transfer
from dora.pool.parked import Parked
from dora.pool.store import Store
from dora.rpc import dora_pb2 as pb
from dora.session.failure import NotMovable
from dora.session.orders import REASON_MAX

Answer = Callable[[pb.WorkerOutcome, DoraError | None], None]


class Sending:
    """``begin`` once the snapshot is in memory. ``answer`` is called once, by whichever thread ends it."""

    def __init__(
        self, plane: DataPlane, store: Store, peer: Peer, parked: Parked, outcome: pb.WorkerOutcome, answer: Answer
    ) -> None:
        self._plane = plane
        self._store = store
        self._peer = peer
        self._parked = parked
        self._outcome = outcome
        self._answer = answer
        self._bodies: Sequence[np.ndarray] = ()
        self._sent = 0  # rounds that have arrived
        self._current: Transfer | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """What has arrived is void."""
        self._cancelled = True
        current = self._current
        if current is not None:
            current.cancel()

    def begin(self, opened: "Future[Sequence[np.ndarray]]") -> None:
        error = opened.exception()
        if error is not None:
            assert isinstance(error, DoraError), error
            self._answer(self._outcome, error)
            return
        self._bodies = opened.result()
        self._send_next("")

    def _send_next(self, after: str) -> None:
        number = self._sent
        if self._cancelled:
            self._end(TransferFailed("it was cancelled"))
            return
        head = b"" if number else self._parked.head  # first, so that the worker makes the request ready meanwhile
        goes_on = number < len(self._bodies) - 1
        body, seal = [self._bodies[number].data], self._parked.rounds[number].seal
        try:
            sending = self._plane.send_parts(self._peer, self._parked.request_id, body, head, after, seal, goes_on)
        except DoraError as error:
            self._end(error)
            return
        self._current = sending
        if self._cancelled:
            sending.cancel()
        sending.done.add_done_callback(self._arrived)

    def _arrived(self, done: "Future[Sent]") -> None:
        error = done.exception()
        if error is not None:
            assert isinstance(error, DoraError), error
            self._end(self._looked_at(error))
            return
        sent = done.result()
        self._sent += 1
        self._outcome.snapshot_bytes += sent.body_bytes
        self._outcome.kv_fallbacks.extend(reason[:REASON_MAX] for reason in sent.fallbacks)
        if self._sent < len(self._bodies):
            self._send_next(sent.key)
            return
        self._outcome.locator, self._outcome.kv_transport = sent.key, sent.transport
        self._outcome.tokens = self._parked.tokens
        self._end(None)

    def _looked_at(self, error: DoraError) -> DoraError:
        """Why it did not arrive: for what has become of the bytes here, or for something else."""
        wrong = "" if self._cancelled else self._store.check(self._parked, self._bodies)
        if not wrong:
            return error
        self._store.drop(self._parked, wrong)
        return NotMovable(f"{self._parked.request_id} is lost: {wrong}")

    def _end(self, error: DoraError | None) -> None:
        self._bodies, self._current = (), None
        self._store.close_snapshot(self._parked)
        self._answer(self._outcome, error)
