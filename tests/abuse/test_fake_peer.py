"""Peers of the KV plane and of the relays, which greet alike: a stranger in either place gets no secret, and no replay
of an honest connection is believed.
"""

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from dora.errors import TransferFailed
from dora.kvtransfer.peer import Identity, Peer, answer, greet
from dora.kvtransfer.wire import Stream

SECRET = secrets.token_bytes(32)
TIMEOUT_S = 30.0
SOURCE, TARGET = Identity("w0", 1, "model", "host"), Identity("w1", 2, "model", "host")
PEER = Peer("w1", 2, "there", ("tcp",))


def sends(stream: Stream) -> Identity:
    return greet(stream, SOURCE, PEER, SECRET)


def receives(stream: Stream) -> Identity:
    return answer(stream, TARGET, SECRET)


def a_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        return near, listening.accept()[0]


def beside(call: Callable[..., Any], *given: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=given, daemon=True)
    thread.start()
    return thread


def pumped(taken: socket.socket, given: socket.socket, heard: bytearray) -> None:
    while content := taken.recv(4096):
        heard += content
        given.sendall(content)
    given.shutdown(socket.SHUT_WR)


def read(taken: socket.socket, heard: bytearray) -> None:
    with suppress(ConnectionResetError):  # the other end closed before it had read everything
        while content := taken.recv(4096):
            heard += content


def heard_of_both() -> tuple[bytes, bytes]:
    """The messages of both halves of an honest connection."""
    (source, near), (far, target) = a_pair(), a_pair()
    of_source, of_target, found = bytearray(), bytearray(), list[Identity]()
    pumps = [beside(pumped, near, far, of_source), beside(pumped, far, near, of_target)]
    answering = beside(lambda: found.append(receives(Stream(target, TIMEOUT_S))))
    assert sends(Stream(source, TIMEOUT_S)) == TARGET
    answering.join()
    assert found == [SOURCE]
    source.close()
    target.close()
    for each in pumps:
        each.join()
    return bytes(of_source), bytes(of_target)


@pytest.mark.parametrize(
    ("half", "place", "what"),
    [(sends, 1, "replayed"), (sends, 1, "its own"), (sends, 1, "nothing"), (receives, 0, "replayed")],
    ids=["a sender, replayed", "a sender, its own", "a sender, nothing", "a receiver, replayed"],
)
def test_a_stranger_in_a_peers_place_gets_nothing(half: Callable[[Stream], Identity], place: int, what: str) -> None:
    honest = heard_of_both()
    ours, theirs = a_pair()
    heard = bytearray()
    if what == "its own":  # all that the half sends comes back to it
        listening = beside(pumped, theirs, theirs, heard)
    else:
        if what == "replayed":
            theirs.sendall(honest[place])
        theirs.shutdown(socket.SHUT_WR)
        listening = beside(read, theirs, heard)
    with pytest.raises(TransferFailed):
        half(Stream(ours, TIMEOUT_S))
    ours.close()
    listening.join()
    for content in (bytes(heard), *honest):
        assert SECRET not in content
    assert not set(chunks(bytes(heard))) & set(chunks(honest[1 - place])[1:])


def chunks(content: bytes) -> list[bytes]:
    """The proofs among these bytes: what follows the name ``proof`` in a head."""
    return [part[:34] for part in content.split(b"\xa5proof")]
