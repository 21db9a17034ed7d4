"""One end of handoffs: it obeys their commands, over a store of requests.

    source                                   target
                                             reserve ─▶ store.reserve, plane.expect
    copy_out ─▶ store.rounds_of ─ rounds ─▶  (the plane)
                                             copy_in ─▶ plane.take_all, store.accept
    remove ─▶ store.remove

A worker's engine is a store, and so is a pool: to park is a handoff whose target is the pool, and to resume is one
whose source it is. ``thaw`` and ``cancel_reservation`` undo what was begun at either end.
"""

from concurrent.futures import Future
from typing import NamedTuple, Protocol

from dora.errors import MISSING, Conflict, DoraError, SnapshotRefused, TransferFailed
from dora.kvtransfer.arrivals import Ahead
from dora.kvtransfer.copying import Copying, CopyReply, Rounds
from dora.kvtransfer.peer import Peer
from dora.kvtransfer.plane import Arrived, DataPlane


class ReserveOrder(Protocol):
    """The command to make room for a request that is to come; ``dora_pb2.ReserveSlot`` is one."""

    request_id: str
    version: int
    kv_tokens: int
    kv_bytes: int
    most_bytes: int
    source_epoch: int
    needs_slot: bool


class Room(NamedTuple):
    """What a store keeps for a request that is to come."""

    most_bytes: int  # of its snapshot
    ahead: Ahead | None = None
    granted: "Future[None] | None" = None  # ends once there is room; None: there is


class KvStore(Protocol):
    """Requests with their KV. One thread uses it, but for what it gives out."""

    def reserve(self, order: ReserveOrder) -> Room:
        """Raises Conflict and SnapshotRefused where there is no room."""

    def release(self, request_id: str) -> None:
        """Undoes ``reserve``. Unknown ids are ignored."""

    def accept(self, arrived: Arrived, row: int) -> None:
        """Holds a request that has come, in what was reserved for it. ``row``: by which the service knows it.

        Raises as ``RolloutEngine.take_in``.
        """

    def rounds_of(self, request_id: str, peer: Peer) -> Rounds:
        """The request as ``peer`` is to get it. Raises NotMovable."""

    def thaw(self, request_id: str) -> None:
        """The request goes on here. Raises NotFound."""

    def remove(self, request_id: str) -> None:
        """Forgets the request. Unknown ids are ignored."""


class Endpoint:
    """One thread gives it commands. ``plane``: None where no request can come or leave with its KV."""

    def __init__(self, store: KvStore, plane: DataPlane | None) -> None:
        self._store = store
        self._plane = plane
        self._reserved: set[str] = set()
        self.copies: dict[str, Copying] = {}  # by request

    @property
    def plane(self) -> DataPlane:
        """Raises Conflict where there is none."""
        if self._plane is None:
            raise Conflict("data plane", MISSING, "there, for a request to move with its KV", why="is missing")
        return self._plane

    def reserve(self, order: ReserveOrder) -> "Future[None] | None":
        """Makes room, and lets in one snapshot. Returns what ends once there is room; None: there is.

        Raises Conflict and SnapshotRefused, as which the future may end too.
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
        """Undoes ``reserve``, and ``copy_in`` if the request was copied in before the handoff was undone."""
        self._reserved.discard(request_id)
        self._store.release(request_id)
        if self._plane is not None:
            self._plane.forget(request_id)
        self._store.remove(request_id)

    def copy_in(self, request_id: str, version: int, key: str, row: int) -> None:
        """The store holds the snapshot that has arrived. Raises SnapshotRefused, NotFound, and as the store does."""
        arrived = self.plane.take_all(key)
        found = arrived.snapshot.request
        if (found.request_id, found.version) != (request_id, version):
            raise SnapshotRefused(
                f"snapshot of {found.request_id} version {found.version}; expected {request_id} version {version}"
            )
        self._store.accept(arrived, row)
        self._reserved.discard(request_id)

    def copy_out(self, request_id: str, peer: Peer, reply: CopyReply) -> None:
        """Begins to copy a request to ``peer``, which expects it. Raises Conflict, and NotMovable."""
        self.end_copy(request_id)
        plane, rounds = self.plane, self._store.rounds_of(request_id, peer)
        copy = self.copies[request_id] = Copying(plane, peer, request_id, rounds, reply)
        if rounds.opened is not None:
            rounds.opened.add_done_callback(lambda _done: copy.go_on())

    def advance(self) -> None:
        """Sends the next round of each copy whose rounds are asked for by this thread, where it is time for one."""
        for request_id, copy in list(self.copies.items()):
            if not copy.is_last and copy.rounds.opened is None:
                copy.go_on()
                if copy.is_over and not copy.is_last:
                    del self.copies[request_id]

    def thaw(self, request_id: str) -> None:
        """Ends the copy: the request goes on here. Raises NotFound."""
        self.end_copy(request_id)
        self._store.thaw(request_id)

    def remove(self, request_id: str) -> None:
        """Ends the copy, and forgets the request."""
        self.end_copy(request_id)
        self._store.remove(request_id)

    def end_copy(self, request_id: str, error: DoraError | None = None) -> None:
        """Makes void what was copied of a request, because of ``error`` or because it was ordered."""
        copy = self.copies.pop(request_id, None)
        if copy is not None:
            copy.cancel()
            if not copy.is_last:
                copy.end(error or TransferFailed("it was cancelled"))

    def leave(self) -> None:
        """The service is lost: undoes all handoffs under way. What the store holds stays."""
        for request_id, copy in self.copies.items():
            copy.cancel()
            self._store.thaw(request_id)
        self.copies.clear()
        for request_id in self._reserved:
            self._store.release(request_id)
        self._reserved.clear()
        self._plane = None

    def come_back(self, plane: DataPlane | None) -> None:
        """A service is there again."""
        self._plane = plane
