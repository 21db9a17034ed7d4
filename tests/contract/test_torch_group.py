"""Pairs of torch.distributed whose other end dies, stalls, comes late or is another one: gloo here, NCCL on two GPUs.

Each failure has a deadline and names the transport, and a new pair works afterwards.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.errors import SnapshotRefused, TransferFailed
from dora.kvtransfer.transports.torch_group import Joining
from dora.kvtransfer.transports.torch_pair import TorchReceiver, TorchSender
from dora.kvtransfer.transports.transport import summed
from dora.kvtransfer.wire import Stream
from tests.contract import group_peer
from tests.contract.group_peer import CHUNK, LONG_S, attach, digest, joined_receiver
from tests.refusals import refused

torch = pytest.importorskip("torch")

SHORT_S = 1.0  # the deadline of what must fail
MARGIN_S = 20.0  # beyond it, on a machine that does other work
HAS_TWO_GPUS = Path("/dev/nvidiactl").exists() and torch.cuda.device_count() > 1
NCCL = pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_TWO_GPUS, reason="needs two GPUs")])


@pytest.fixture(params=["gloo", NCCL])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def context() -> Any:
    """Processes that have torch when they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([group_peer.__name__, "torch.distributed"])
    return context


@dataclass
class Other:
    """The other end's process."""

    process: Any
    told: Connection
    stream: Stream

    def ask(self, offer: dict[str, Any]) -> dict[str, Any]:
        """Asks an end that will not join."""
        self.told.send(offer)
        return {}

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def other(context: Any, behaviour: str, backend: str, timeout_s: float = LONG_S) -> Iterator[Other]:
    told, its = context.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        arguments = behaviour, backend, listening.getsockname()[1], timeout_s, its
        process = context.Process(target=group_peer.main, args=arguments, daemon=True)
        process.start()
        its.close()
        listening.settimeout(LONG_S)
        connected, _ = listening.accept()
    stream = Stream(connected, LONG_S)
    try:
        yield Other(process, told, stream)
    finally:
        stream.close()
        process.kill()
        process.join()


@contextmanager
def in_time() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < SHORT_S + MARGIN_S


@contextmanager
def source_to(end: Other, backend: str, timeout_s: float = LONG_S) -> Iterator[TorchSender]:
    with ThreadPoolExecutor(1) as helpers:
        sender = TorchSender(backend, end.stream, timeout_s, helpers)
        try:
            yield sender
        finally:
            sender.close()


def send(sender: TorchSender, end: Other) -> bytes:
    return summed(sender.chunk(end.stream, {"at": 0, "size": len(CHUNK)}, [CHUNK.data], digest))


def check_moves(context: Any, backend: str) -> None:
    """A new pair moves bytes."""
    with other(context, "target", backend) as end, source_to(end, backend) as sender:
        attach(sender, end.told)
        for _ in range(2):
            end.told.send(True)
            found = send(sender, end)
            sender.finish()
            assert end.told.recv() == found == CHUNK.data[:8]
        end.told.send(False)


SETUP = [
    "never comes",
    "ends before it joins",
    "ends before the communicator",
    "stops before the communicator",
    "has the source's rank",
    "is of a larger world",
]


@pytest.mark.parametrize("behaviour", SETUP)
def test_a_target_that_does_not_join_fails_the_source_in_time(context: Any, backend: str, behaviour: str) -> None:
    with other(context, behaviour, backend, SHORT_S) as end, source_to(end, backend, SHORT_S) as sender, in_time():
        with refused(TransferFailed, names=[backend]):
            sender.attach(end.ask)
        sender.abandon()  # as the pair does


def test_a_target_that_comes_late_fails_in_time_and_a_new_pair_works(context: Any, backend: str) -> None:
    with other(context, "comes late", backend, SHORT_S) as end, source_to(end, backend, SHORT_S) as sender:
        with in_time(), refused(TransferFailed, names=[backend]):
            sender.attach(end.ask)
        sender.close()
        end.told.send("given up")
        kind, text, took_s = end.told.recv()
        assert kind in ("SnapshotRefused", "TransferFailed") and text.startswith(backend), text
        assert took_s < 2 * SHORT_S + MARGIN_S
    check_moves(context, backend)


def test_a_refusal_of_the_target_is_told_at_once(context: Any, backend: str) -> None:
    """The source does not wait for a rank that will not join."""

    def refuse(_: dict[str, Any]) -> dict[str, Any]:
        raise TransferFailed("the other end refused it")

    with other(context, "never comes", backend) as end, source_to(end, backend) as sender:
        began_s = time.monotonic()
        with refused(TransferFailed):
            sender.attach(refuse)
        assert time.monotonic() - began_s < LONG_S / 4


def test_a_source_that_is_gone_before_it_joins_fails_the_target_in_time(context: Any, backend: str) -> None:
    with other(context, "source offers and ends", backend, SHORT_S) as end, in_time():
        offer = end.told.recv()
        end.told.send("end")
        end.process.join()
        receiver = TorchReceiver(backend, end.stream, SHORT_S)
        with refused(SnapshotRefused, names=[backend]):
            receiver.attach(offer)
        receiver.close()


@pytest.mark.parametrize("wrong", [{}, {"host": "127.0.0.1", "port": "1", "prefix": "p"}, {"host": 1, "port": 1}])
def test_an_offer_without_a_store_is_refused(context: Any, backend: str, wrong: dict[str, Any]) -> None:
    with other(context, "never comes", backend) as end, refused(SnapshotRefused):
        TorchReceiver(backend, end.stream, SHORT_S).attach(wrong)


@pytest.mark.parametrize("behaviour", ["target ends after one chunk", "target stops after one chunk"])
def test_a_target_that_fails_in_the_middle_fails_the_source_in_time(context: Any, backend: str, behaviour: str) -> None:
    names = [backend] if "stops" in behaviour else []  # the stream of an end that is gone may break first
    with other(context, behaviour, backend) as end, source_to(end, backend) as sender:
        attach(sender, end.told)
        sender._group._timeout_s = SHORT_S
        with in_time():
            with refused(TransferFailed, names=names):
                for _ in range(16):
                    send(sender, end)
                sender.finish()
            began_s = time.monotonic()
            sender.abandon()
            with refused(TransferFailed, names=names):
                send(sender, end)
            assert time.monotonic() - began_s < SHORT_S, "what has failed is not waited for again"
    check_moves(context, backend)


def receiver_of(end: Other, backend: str) -> TorchReceiver:
    """Joins without haste, and has a short deadline afterwards."""
    receiver = joined_receiver(backend, end.stream, LONG_S, end.told)
    receiver._group._timeout_s = SHORT_S
    return receiver


@pytest.mark.parametrize("behaviour", ["source ends in a chunk", "source stops in a chunk"])
def test_a_source_that_fails_in_the_middle_fails_the_target_in_time_and_writes_no_more(
    context: Any, backend: str, behaviour: str
) -> None:
    with other(context, behaviour, backend) as end:
        receiver = receiver_of(end, backend)
        body = np.zeros(len(CHUNK), np.uint8)
        frame = end.stream.receive()
        with in_time(), refused(SnapshotRefused, names=[backend]):
            summed(receiver.chunk(end.stream, frame, body.data, digest))
        body[:] = 7  # it belongs to another snapshot from here on
        began_s = time.monotonic()
        with refused(SnapshotRefused, names=[backend]):
            receiver.skip(end.stream, frame)
        assert time.monotonic() - began_s < SHORT_S, "what has failed is not waited for again"
        if "stops" in behaviour:
            end.resume()
            end.told.send("go on")
            end.process.join(LONG_S)
        receiver.close()
        assert np.all(body == 7), "late bytes"


def test_an_end_that_is_gone_after_the_last_byte_leaves_what_arrived(context: Any, backend: str) -> None:
    with other(context, "source", backend) as end:
        receiver = receiver_of(end, backend)
        receiver._group._timeout_s = LONG_S
        body = np.zeros(len(CHUNK), np.uint8)
        end.told.send(True)
        ready = receiver.chunk(end.stream, end.stream.receive(), body.data, digest)
        found = summed(ready)
        assert found == end.told.recv() and np.array_equal(body, CHUNK)
        end.process.kill()
        end.process.join()
        with in_time():
            receiver.close()
        assert np.array_equal(body, CHUNK)
    with other(context, "target", backend) as end, source_to(end, backend) as sender:
        attach(sender, end.told)
        end.told.send(True)
        send(sender, end)
        assert end.told.recv() == CHUNK.data[:8]
        end.process.kill()
        end.process.join()
        with in_time():
            sender.finish()
            sender.close()


def test_joining_that_hangs_is_given_up_at_its_deadline(backend: str) -> None:
    """As NCCL's set-up can: whatever it waits for is no more waited for."""
    released = threading.Event()

    def connect(_: Any) -> Any:
        released.wait()
        raise RuntimeError("released")

    joining = Joining(backend, connect, 0, "127.0.0.1", SHORT_S / 4)
    with in_time(), pytest.raises(TimeoutError):
        joining.result()
    released.set()
    joining.join()
