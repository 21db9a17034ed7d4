"""Streams whose other end lets a byte pass now and then: progress is the sign of life, not bytes."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dora.errors import TransferFailed
from dora.kvtransfer.wire import PREAMBLE, TAG_BYTES, Kind, Stream

TIMEOUT_S = 0.1
PAUSE_S = 0.01  # well below the timeout: the other end is never silent
BODY = bytes(4 << 20)
BEFORE = (0, 2)  # whole frames at full pace


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            yield one, other


def drips(pass_some: Callable[[], object]) -> Callable[[], None]:
    """Begins to let something pass again and again; returns what ends it."""
    ended = threading.Event()

    def run() -> None:
        with suppress(OSError):
            while not ended.wait(PAUSE_S):
                pass_some()

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("where", ["preamble", "head", "body"])
def test_a_sender_that_drips_is_found_out(pair: tuple[socket.socket, socket.socket], where: str, before: int) -> None:
    ours, theirs = pair
    stream, sender = Stream(ours, TIMEOUT_S), Stream(theirs, 20.0)
    for _ in range(before):
        sending = threading.Thread(target=sender.send, args=(Kind.CHUNK, {}, [memoryview(BODY)]))
        sending.start()
        stream.drain(stream.receive().body_bytes)
        sending.join()
    if where == "body":
        sender.send(Kind.CHUNK, {"n": 1}, [])
        stream.receive()
    elif where == "head":
        theirs.sendall(PREAMBLE.pack(b"DKV2", Kind.CHUNK, 0, 1 << 15, 0) + bytes(TAG_BYTES))
    end = drips(lambda: theirs.sendall(b"D"))
    try:
        with pytest.raises(TransferFailed):
            stream.drain(len(BODY)) if where == "body" else stream.receive()
    finally:
        end()


@pytest.mark.parametrize("before", BEFORE)
def test_a_receiver_that_drips_is_found_out(pair: tuple[socket.socket, socket.socket], before: int) -> None:
    ours, theirs = pair
    for each in pair:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    stream, receiver = Stream(ours, TIMEOUT_S), Stream(theirs, 20.0)

    def take() -> None:
        receiver.drain(receiver.receive().body_bytes)

    for _ in range(before):
        taking = threading.Thread(target=take)
        taking.start()
        stream.send(Kind.CHUNK, {}, [memoryview(BODY)])
        taking.join()
    end = drips(lambda: theirs.recv(1))
    try:
        with pytest.raises(TransferFailed):
            stream.send(Kind.CHUNK, {}, [memoryview(BODY * 8)])
    finally:
        end()


def test_a_slow_sender_is_not_taken_for_one(pair: tuple[socket.socket, socket.socket]) -> None:
    """It takes many timeouts for one frame, at a pace that is its own."""
    ours, theirs = pair
    stream, sender = Stream(ours, TIMEOUT_S), Stream(theirs, 20.0)
    sender.send(Kind.CHUNK, {}, [])
    stream.receive()
    end = drips(lambda: theirs.sendall(bytes(4 << 10)))
    try:
        stream.drain(100 << 10)
    finally:
        end()
