"""What the loops of a worker and of a pool have alike: how orders come, and what they say of a handoff."""

from collections.abc import Iterator
from typing import Final, Protocol

from dora.data.types import RequestSpec
from dora.errors import SnapshotRefused
from dora.kvtransfer.peer import Peer
from dora.rpc import dora_pb2 as pb

REASON_MAX: Final = 500  # characters of why a KV transport failed, or a snapshot was dropped


class Orders(Protocol):
    """Where commands come from and messages go; ``Link``, or a list in a test."""

    def take(self, timeout_s: float) -> pb.WorkerCommand | None: ...
    def send(self, message: pb.WorkerMessage) -> None: ...


def waiting(orders: Orders, timeout_s: float) -> Iterator[pb.WorkerCommand]:
    """All commands that wait, the first of them awaited. Shutdown is the last: the stream ends after it, which is no
    fault then."""
    while (command := orders.take(timeout_s)) is not None:
        yield command
        if command.HasField("shutdown"):
            return
        timeout_s = 0.0


def peer_of(order: pb.CopyOut) -> Peer:
    """The target of a copy."""
    target = order.target
    return Peer(target.worker_id, target.epoch, target.address, tuple(target.transports))


def check_asked_for(found: RequestSpec, order: pb.CopyIn) -> None:
    """Raises SnapshotRefused for a snapshot of another request or version than the one to be taken in."""
    if (found.request_id, found.version) != (order.request_id, order.version):
        raise SnapshotRefused(
            f"snapshot of {found.request_id} version {found.version}; "
            f"expected {order.request_id} version {order.version}"
        )
