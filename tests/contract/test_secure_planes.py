"""KV under TLS: it arrives as it does in the clear, and no other end than a process of the run is heard."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dora.errors import TransferFailed
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.wire import Kind, Stream
from dora.tls.contexts import Contexts
from tests.contract.planes import WAIT_S, a_plane, until
from tests.tls_files import another, cluster, tls

TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cluster(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("sizes", [[1], [100, 16384, 16385, 3], [48 << 10] * 200, [5 << 20, 7]], ids=str)
def test_a_body_arrives_under_tls(folder: Path, tmp_path: Path, sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    service, host = Contexts(tls(folder, "service")), Contexts(tls(folder, "host-127.0.0.1"))
    with a_plane(tmp_path, 1, ("tcp",), tls=service) as source, a_plane(tmp_path, 2, ("tcp",), tls=host) as target:
        for _ in range(2):
            target.plane.expect("r", 1, sum(sizes))
            sent = source.plane.send_parts(target.peer, "r", source.parts(arrays), b"head").done.result(WAIT_S)
            _, rounds = target.plane.take_rounds(sent.key)
            assert np.array_equal(np.concatenate([each.body for each in rounds]), np.concatenate(arrays))
            target.plane.forget("r")


@contextmanager
def a_listener(contexts: Contexts) -> Iterator[tuple[str, list[bytes]]]:
    """One that reads frames; yields its address and what came."""
    came: list[bytes] = []

    def serve(stream: Stream, _: threading.Event) -> None:
        while True:
            try:
                frame = stream.receive()
                came.append(stream.read(frame.body_bytes))
                stream.send(Kind.ARRIVED, {}, [memoryview(came[-1])])
            except TransferFailed:
                return

    listener = Listener("127.0.0.1")
    listener.open(serve, TIMEOUT_S, contexts)
    try:
        yield listener.address, came
    finally:
        listener.close()


def connected(address: str, contexts: Contexts | None) -> Stream:
    host, _, port = address.rpartition(":")
    stream = Stream(socket.create_connection((host, int(port))), TIMEOUT_S)
    stream.secure(contexts, server=False)
    return stream


def test_both_directions_flow_at_once(folder: Path) -> None:
    own = Contexts(tls(folder, "service"))
    body = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8).tobytes()
    with a_listener(own) as (address, came):
        stream = connected(address, own)
        back: list[bytes] = []

        def read() -> None:
            for _ in range(8):
                back.append(stream.read(stream.receive().body_bytes))

        reading = threading.Thread(target=read)
        reading.start()
        for _ in range(8):
            stream.send(Kind.CHUNK, {}, [memoryview(body)])
        reading.join(WAIT_S)
        assert came == back == [body] * 8
        assert not stream.is_readable(0.0)  # what TLS itself sends is no frame
        stream.close()


def test_only_processes_of_the_run_are_heard(folder: Path, tmp_path: Path) -> None:
    own, stranger = Contexts(tls(folder, "service")), cluster(tmp_path / "other")
    wrong = [
        None,
        Contexts(tls(stranger, "worker")),
        Contexts(another(folder, "trainer", tmp_path / "trainer", serves=True)),
        Contexts(another(folder, "nonsense", tmp_path / "nonsense", serves=True)),
    ]
    with a_listener(own) as (address, came):
        for contexts in wrong:
            with pytest.raises(TransferFailed):
                stream = connected(address, contexts)
                stream.send(Kind.CHUNK, {}, [memoryview(b"mine")])
                stream.receive()
        assert not came
        stream = connected(address, own)
        stream.send(Kind.CHUNK, {}, [memoryview(b"ours")])
        assert stream.receive().kind is Kind.ARRIVED and came == [b"ours"]
        stream.close()


def test_a_certificate_that_ends_meanwhile_opens_no_connection(folder: Path, tmp_path: Path) -> None:
    own = Contexts(tls(folder, "service"))
    brief = Contexts(another(folder, "worker", tmp_path, ends_s=2.0))
    with a_listener(own) as (address, came):
        stream = connected(address, brief)
        stream.send(Kind.CHUNK, {}, [memoryview(b"early")])
        stream.receive()
        until(lambda: came == [b"early"])
        ends_s = time.monotonic() + 2.5
        until(lambda: time.monotonic() > ends_s)
        with pytest.raises(TransferFailed):
            late = connected(address, brief)
            late.send(Kind.CHUNK, {}, [memoryview(b"late")])
            late.receive()
        assert came == [b"early"]
        stream.close()


def test_a_listener_closes_while_a_stranger_is_silent(folder: Path) -> None:
    with a_listener(Contexts(tls(folder, "service"))) as (address, _):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as silent:
            began_s = time.monotonic()
            assert silent.fileno() >= 0
    assert time.monotonic() - began_s < TIMEOUT_S / 2
