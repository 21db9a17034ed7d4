"""The other rank of a pair of torch.distributed, in a process of its own, which fails as a test asks."""

import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dora.errors import DoraError
from dora.kvtransfer.transports.torch_group import Joining, make_group
from dora.kvtransfer.transports.torch_pair import TorchReceiver, TorchSender
from dora.kvtransfer.transports.transport import CHUNK_MAX, summed
from dora.kvtransfer.wire import Frame, Kind, Stream

LONG_S = 60.0
CHUNK = np.random.default_rng(1).integers(0, 255, CHUNK_MAX, np.uint8)


def digest(parts: Any) -> bytes:
    return b"".join(bytes(part[:8]) for part in parts)


def main(behaviour: str, backend: str, port: int, timeout_s: float, told: Connection) -> None:
    """``told``: what the test says, and hears."""
    if backend == "nccl":
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # before CUDA starts in this process
    with socket.create_connection(("127.0.0.1", port)) as connected:
        BEHAVIOURS[behaviour](Peer(backend, Stream(connected, LONG_S), timeout_s, told))


def attach(sender: TorchSender, told: Connection) -> None:
    """Joins as the source with a target that joins too."""

    def ask(offer: dict[str, Any]) -> dict[str, Any]:
        told.send(offer)
        answer: dict[str, Any] = told.recv()
        return answer

    sender.attach(ask)


def joined_receiver(backend: str, stream: Stream, timeout_s: float, told: Connection) -> TorchReceiver:
    """Joins as the target with a source that joins too."""
    receiver = TorchReceiver(backend, stream, timeout_s)
    told.send(receiver.attach(told.recv()))
    return receiver


class Peer:
    def __init__(self, backend: str, stream: Stream, timeout_s: float, told: Connection) -> None:
        self.backend = backend
        self.stream = stream
        self.timeout_s = timeout_s
        self.told = told

    def store(self, offer: dict[str, Any]) -> Any:
        import torch.distributed as distributed

        store = distributed.TCPStore(
            offer["host"], offer["port"], None, False, timedelta(seconds=self.timeout_s), False
        )
        return distributed.PrefixStore(offer["prefix"], store)

    def receiver(self) -> TorchReceiver:
        """Joins as the target."""
        return joined_receiver(self.backend, self.stream, self.timeout_s, self.told)

    def sender(self) -> TorchSender:
        """Joins as the source."""
        sender = TorchSender(self.backend, self.stream, self.timeout_s, ThreadPoolExecutor(1))
        attach(sender, self.told)
        return sender

    def receive(self, receiver: TorchReceiver) -> bytes:
        body = np.zeros(CHUNK_MAX, np.uint8)
        return summed(receiver.chunk(self.stream, self.stream.receive(), body.data, digest))

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def _target(peer: Peer) -> None:
    """Receives chunks until the test closes the stream."""
    receiver = peer.receiver()
    while peer.told.recv():
        peer.told.send(peer.receive(receiver))
    receiver.close()


def _target_after_one(peer: Peer, then: Callable[[], None]) -> None:
    receiver = peer.receiver()
    peer.receive(receiver)
    then()
    peer.told.recv()


def _ends_before_joining(peer: Peer) -> None:
    peer.store(peer.told.recv())
    os._exit(1)


def _ends_before_the_communicator(peer: Peer) -> None:
    offer = peer.told.recv()
    make_group(peer.backend, peer.store(offer), 1, "127.0.0.1", peer.timeout_s)
    os._exit(1)


def _stops_before_the_communicator(peer: Peer) -> None:
    offer = peer.told.recv()
    made = make_group(peer.backend, peer.store(offer), 1, "127.0.0.1", peer.timeout_s)
    peer.stop()
    assert made is not None


def _has_the_sources_rank(peer: Peer) -> None:
    offer = peer.told.recv()
    joining = Joining(peer.backend, lambda _: peer.store(offer), 0, "127.0.0.1", peer.timeout_s)
    _tell_failure(peer, joining.result)


def _is_of_a_larger_world(peer: Peer) -> None:
    import torch.distributed as distributed

    store = peer.store(peer.told.recv())
    if peer.backend == "nccl":
        _tell_failure(peer, lambda: distributed.ProcessGroupNCCL(store, 1, 3, distributed.ProcessGroupNCCL.Options()))
        return
    timeout = timedelta(seconds=peer.timeout_s)
    _tell_failure(peer, lambda: distributed.ProcessGroupGloo(store, 1, 3, timeout))


def _comes_late(peer: Peer) -> None:
    offer = peer.told.recv()
    peer.told.recv()  # the source has given up

    def join() -> None:
        receiver = TorchReceiver(peer.backend, peer.stream, peer.timeout_s)
        receiver.attach(offer)  # may succeed while the source's thread ends
        frame = Frame(Kind.CHUNK, {"messages": [len(CHUNK)]}, 0)  # the source announces none
        summed(receiver.chunk(peer.stream, frame, np.zeros(CHUNK_MAX, np.uint8).data, digest))

    _tell_failure(peer, join)


def _tell_failure(peer: Peer, join: Callable[[], Any]) -> None:
    began_s = time.monotonic()
    try:
        join()
    except (DoraError, RuntimeError, TimeoutError) as error:
        peer.told.send((type(error).__name__, str(error), time.monotonic() - began_s))
    else:
        peer.told.send(("", "", 0.0))


def _source(peer: Peer) -> None:
    """Sends a chunk whenever the test says so."""
    sender = peer.sender()
    while peer.told.recv():
        found = sender.chunk(peer.stream, {"at": 0, "size": len(CHUNK)}, [CHUNK.data], digest)
        sender.finish()
        peer.told.send(summed(found))
    sender.close()


def _source_offers_and_ends(peer: Peer) -> None:
    sender = TorchSender(peer.backend, peer.stream, peer.timeout_s, ThreadPoolExecutor(1))

    def ask(offer: dict[str, Any]) -> dict[str, Any]:
        peer.told.send(offer)
        peer.told.recv()
        os._exit(1)

    sender.attach(ask)


def _source_announces(peer: Peer, then: Callable[[], None]) -> None:
    """Announces a chunk, and sends nothing of it until the test says so."""
    sender = peer.sender()
    group, sender._group = sender._group, _Sends(sender._group, then)  # type: ignore[assignment]
    sender.chunk(peer.stream, {"at": 0, "size": len(CHUNK)}, [CHUNK.data], digest)
    sender._group = group
    peer.told.recv()


class _Sends:
    """A group that does something before it sends."""

    def __init__(self, group: Any, before: Callable[[], None]) -> None:
        self._group = group
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send(self, tensor: Any, rank: int) -> Any:
        self._before()
        return self._group.send(tensor, rank)


def _exit() -> None:
    os._exit(1)


BEHAVIOURS: dict[str, Callable[[Peer], None]] = {
    "target": _target,
    "target ends after one chunk": lambda peer: _target_after_one(peer, _exit),
    "target stops after one chunk": lambda peer: _target_after_one(peer, peer.stop),
    "ends before it joins": _ends_before_joining,
    "ends before the communicator": _ends_before_the_communicator,
    "stops before the communicator": _stops_before_the_communicator,
    "has the source's rank": _has_the_sources_rank,
    "is of a larger world": _is_of_a_larger_world,
    "comes late": _comes_late,
    "never comes": lambda peer: peer.told.recv(),
    "source": _source,
    "source offers and ends": _source_offers_and_ends,
    "source ends in a chunk": lambda peer: _source_announces(peer, _exit),
    "source stops in a chunk": lambda peer: _source_announces(peer, peer.stop),
}
