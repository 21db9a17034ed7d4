"""One end of handoffs: executes their commands on a store of requests.

    source                                   target
                                             reserve ─▶ store.reserve, plane.expect
    copy_out ─▶ store.rounds_of ─ rounds ─▶  (the plane)
                                             copy_in ─▶ plane.take_all, store.accept
    remove ─▶ store.remove

A worker's engine is a store, and so is a pool: parking is a handoff to the pool, and resuming is a handoff from it.
``thaw`` and ``cancel_reservation`` undo a handoff at either end.
"""

from concurrent.futures import Future
from typing import NamedTuple, Protocol

from dora.errors import MISSING, Conflict, DoraError, SnapshotRefused, TransferFailed
from dora.kvtransfer.arrivals import Ahead
from dora.kvtransfer.copying import Copying, CopyReply, Rounds
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import ArrivedSnapshot, DataPlane


class ReserveOrder(Protocol):
    """The command to make room for an incoming request; ``dora_pb2.ReserveSlot`` is one."""

    request_id: str
    version: int
    kv_tokens: int
    kv_bytes: int
    most_bytes: int
    source_epoch: int
    needs_slot: bool


class SnapshotRoom(NamedTuple):
    most_bytes: int  # limit of its snapshot
    ahead: Ahead | None = None
    granted: "Future[None] | None" = None  # completes once there is room; None: there is room now


class RequestStore(Protocol):
    """Requests with their KV. Used by one thread, except for the objects that it returns."""

    def reserve(self, order: ReserveOrder) -> SnapshotRoom:
        """Raises Conflict or SnapshotRefused if there is no room."""

    def release(self, request_id: str) -> None:
        """Undoes ``reserve``. Unknown ids are ignored."""

    def accept(self, arrived: ArrivedSnapshot, row: int) -> None:
        """Accepts an arrived request into its reservation. ``row`` is its row in the service's request table.

        Raises as ``RolloutEngine.take_in``.
        """

    def rounds_of(self, request_id: str, peer: Peer) -> Rounds:
        """The request in rounds for ``peer``. Raises NotMovable."""

    def thaw(self, request_id: str) -> None:
        """Resumes the request here. Raises NotFound."""

    def remove(self, request_id: str) -> None:
        """Forgets the request. Unknown ids are ignored."""


class Endpoint:
    """Called by one thread. ``plane`` is None if no request can arrive or leave with its KV."""

    def __init__(self, store: RequestStore, plane: DataPlane | None) -> None:
        self._store = store
        self._plane = plane
        self._reserved: set[str] = set()
        self.copies: dict[str, Copying] = {}  # by request

    @property
    def plane(self) -> DataPlane:
        """Raises Conflict if there is none."""
        if self._plane is None:
            raise Conflict("data plane", MISSING, "present, to move a request with its KV", why="is missing")
        return self._plane

    def reserve(self, order: ReserveOrder) -> "Future[None] | None":
        """Makes room, and expects one snapshot. Returns a future that ends once there is room, or None if there is.

        Raises Conflict or SnapshotRefused; the future may fail with the same.
        """
        request_id, room = order.request_id, self._store.reserve(order)
        try:
            plane = self.plane
            plane.expect(request_id, order.source_epoch, room.most_bytes, room.ahead)
        except DoraError:
            self._store.release(request_id)
            raise
        self._reserved.add(request_id)
        if room.granted is not None:
            room.granted.add_done_callback(lambda done: plane.forget(request_id) if done.exception() else None)
        return room.granted

    def cancel_reservation(self, request_id: str) -> None:
        """Undoes ``reserve``, and ``copy_in`` if the request had already been copied in."""
        self._reserved.discard(request_id)
        self._store.release(request_id)
        if self._plane is not None:
            self._plane.forget(request_id)
        self._store.remove(request_id)

    def copy_in(self, request_id: str, version: int, key: str, row: int) -> None:
        """Passes the arrived snapshot to the store. Raises SnapshotRefused, NotFound, and the store's errors."""
        arrived = self.plane.take_all(key)
        found = arrived.snapshot.request
        if (found.request_id, found.version) != (request_id, version):
            raise SnapshotRefused(
                f"snapshot of {found.request_id} version {found.version}; expected {request_id} version {version}"
            )
        self._store.accept(arrived, row)
        self._reserved.discard(request_id)

    def copy_out(self, request_id: str, peer: Peer, reply: CopyReply) -> None:
        """Begins to copy a request to ``peer``, which expects it. Raises Conflict and NotMovable."""
        self.end_copy(request_id)
        plane, rounds = self.plane, self._store.rounds_of(request_id, peer)
        copy = self.copies[request_id] = Copying(plane, peer, request_id, rounds, reply)
        if rounds.opened is not None:
            rounds.opened.add_done_callback(lambda _done: copy.proceed())

    def advance(self) -> None:
        """Sends the next round, if it is time, of each copy that this thread must poll."""
        for request_id, copy in list(self.copies.items()):
            if not copy.is_last and copy.rounds.opened is None:
                copy.proceed()
                if copy.is_over and not copy.is_last:
                    del self.copies[request_id]

    def thaw(self, request_id: str) -> None:
        """Ends the copy, and resumes the request here. Raises NotFound."""
        self.end_copy(request_id)
        self._store.thaw(request_id)

    def remove(self, request_id: str) -> None:
        """Ends the copy, and removes the request."""
        self.end_copy(request_id)
        self._store.remove(request_id)

    def end_copy(self, request_id: str, error: DoraError | None = None) -> None:
        """Voids the copy of a request, because of ``error`` or on command."""
        copy = self.copies.pop(request_id, None)
        if copy is not None:
            copy.cancel()
            if not copy.is_last:
                copy.end(error or TransferFailed("it was cancelled"))

    def leave(self) -> None:
        """Undoes all handoffs in progress after the service was lost. The store keeps its requests."""
        for request_id, copy in self.copies.items():
            copy.cancel()
            self._store.thaw(request_id)
        self.copies.clear()
        for request_id in self._reserved:
            self._store.release(request_id)
        self._reserved.clear()
        self._plane = None

    def come_back(self, plane: DataPlane | None) -> None:
        self._plane = plane
