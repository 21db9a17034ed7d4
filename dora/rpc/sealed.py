"""Secrets within messages of the service, sealed for the session that reads them. See the header of dora.proto."""

from typing import Final, TypeVar

from dora.rpc import dora_pb2 as pb
from dora.rpc.proof import bytes_of, seal, text_of, unseal

Order = TypeVar("Order", pb.WorkerCommand, pb.HostOrder)
SECRETS: Final = {
    pb.KvSettings: ("secret",),
    pb.HostWelcome: ("relay_secret", "pool_token"),
    pb.StartWorker: ("token",),
    pb.StopWorker: ("token",),
}  # fields by message; a text is base64 of what is sealed


def sealed(order: Order, session: bytes) -> Order:
    """Returns a copy of an order whose secrets only this session's client can read. A caller by certificate has no
    session's key (empty): its connection is encrypted.
    """
    if not session:
        return order
    copy = type(order)()
    copy.CopyFrom(order)
    for part in _parts(copy):
        for name in SECRETS[type(part)]:
            value = getattr(part, name)
            if value:
                content = seal(session, value if isinstance(value, bytes) else value.encode())
                setattr(part, name, content if isinstance(value, bytes) else text_of(content))
    return copy


def unsealed(order: Order, session: bytes) -> Order:
    """Opens an order's secrets in their places, and returns it. Raises InvalidValue for those of another session."""
    if not session:
        return order
    for part in _parts(order):
        for name in SECRETS[type(part)]:
            value = getattr(part, name)
            if isinstance(value, bytes) and value:
                setattr(part, name, unseal(session, value))
            elif value:
                setattr(part, name, unseal(session, bytes_of(value)).decode())
    return order


def _parts(
    order: pb.WorkerCommand | pb.HostOrder,
) -> list[pb.KvSettings | pb.HostWelcome | pb.StartWorker | pb.StopWorker]:
    if isinstance(order, pb.WorkerCommand):
        return [order.welcome.kv] if order.HasField("welcome") else []
    kind = order.WhichOneof("kind")
    return [getattr(order, kind)] if kind in ("welcome", "start_worker", "stop_worker") else []
