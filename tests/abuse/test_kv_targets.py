"""A target that is broken or hostile: its source says why in one line, goes on decoding, and keeps nothing."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dora.errors import TransferFailed
from dora.kvtransfer.peer import Identity, answer
from dora.kvtransfer.wire import Frame, Kind, Stream
from dora.models.tiny import make_tiny
from dora.rpc import dora_pb2 as pb
from tests.contract.planes import SECRET, a_plane, until
from tests.contract.test_worker_handoff import alone, long_request, started
from tests.contract.workers import Worker

TIMEOUT_S = 0.4
Act = Callable[["Target", Stream], object]


class Target:
    """Somebody at a worker's address, who holds the secret of the run and does ``act`` with each connection."""

    def __init__(self, identity: Identity, act: Act, secret: bytes = SECRET) -> None:
        self._identity = identity
        self._act = act
        self._secret = secret
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._streams: list[Stream] = []
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def peer(self, transport: str) -> pb.KvPeer:
        address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        return pb.KvPeer(worker_id="w9", epoch=9, address=address, transports=[transport])

    def close(self) -> None:
        self.is_over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        for stream in self._streams:
            stream.stop()
        self._thread.join()
        for stream in self._streams:
            stream.close()
        self._socket.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                stream = Stream(self._socket.accept()[0], 20.0)
                self._streams.append(stream)
                with suppress(TransferFailed):
                    answer(stream, self._identity, self._secret)
                    self._act(self, stream)


def heard(stream: Stream, *kinds: Kind) -> Frame:
    """Answers as it should be, until a frame of one of these kinds has come."""
    while True:
        frame = stream.receive()
        stream.drain(frame.body_bytes)
        if frame.kind in kinds:
            return frame
        if frame.kind is Kind.ATTACH:
            stream.send(Kind.ATTACHED, {})
        elif frame.kind is Kind.OPEN:
            stream.send(Kind.OPENED, {"key": frame.head["key"]})
        elif frame.kind is Kind.COMMIT:
            stream.send(Kind.ARRIVED, {"key": frame.head["key"]})


def says(after: Kind, kind: Kind, **head: object) -> Act:
    """Says this in place of an answer. ``key`` None: that of the frame."""

    def act(target: Target, stream: Stream) -> None:
        key = heard(stream, after).head.get("key", "")
        stream.send(kind, {"key": key, **head})
        target.is_over.wait()

    return act


def sends(after: Kind, raw: bytes) -> Act:
    def act(target: Target, stream: Stream) -> None:
        heard(stream, after)
        stream._socket.sendall(raw)
        target.is_over.wait()

    return act


def stops(after: Kind) -> Act:
    def act(target: Target, stream: Stream) -> None:
        heard(stream, after)
        target.is_over.wait()

    return act


def leaves(after: Kind) -> Act:
    def act(target: Target, stream: Stream) -> None:
        heard(stream, after)
        stream.stop()

    return act


# What it does, and what of it the source is to say.
ACTS: dict[str, tuple[Act, str]] = {
    "it never answers": (stops(Kind.ATTACH), "did not answer"),
    "it stops when a snapshot begins": (stops(Kind.OPEN), "did not answer"),
    "it stops in the middle": (stops(Kind.CHUNK), "acknowledges nothing"),
    "it stops at the end": (stops(Kind.COMMIT), "acknowledges nothing"),
    "it leaves at once": (leaves(Kind.ATTACH), "disconnected"),
    "it leaves in the middle": (leaves(Kind.CHUNK), "disconnected"),
    "it leaves at the end": (leaves(Kind.COMMIT), "disconnected"),
    "it refuses the transport": (says(Kind.ATTACH, Kind.REFUSED, reason="not here"), "not here"),
    "it refuses the snapshot": (says(Kind.OPEN, Kind.REFUSED, reason="no such ticket"), "no such ticket"),
    "it refuses in the middle": (says(Kind.CHUNK, Kind.REFUSED, reason="no more of it"), "no more of it"),
    "it refuses at the end": (says(Kind.COMMIT, Kind.REFUSED, reason="checksum of chunk 1"), "checksum of chunk 1"),
    "it answers what nobody asked": (says(Kind.CHUNK, Kind.WELCOME), "without being asked"),
    "it has another one": (says(Kind.COMMIT, Kind.ARRIVED, key="9-another.kv"), "without being asked"),
    "it opens another one": (says(Kind.OPEN, Kind.OPENED, key="9-another.kv"), "without being asked"),
    "it asks to attach": (says(Kind.COMMIT, Kind.ATTACH, transport="tcp"), "without being asked"),
    "it sends no frame": (sends(Kind.CHUNK, b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64)), "of a frame"),
    "it sends a frame of nobody": (sends(Kind.CHUNK, b"DKV2\x0b\0\0\0" + bytes(28)), "out of order"),
    "it sends an endless head": (sends(Kind.COMMIT, b"DKV2\x0b\0\0\0\xff\xff\xff\x7f" + bytes(8)), "of a frame"),
    "it sends an endless body": (sends(Kind.COMMIT, b"DKV2\x0b\0\0\0" + bytes(4) + b"\xff" * 8), "of a frame"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("kv") / "model")


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(tmp_path: Path, transport: str, model: Path) -> Iterator[Worker]:
    """With two requests, both with full blocks."""
    with a_plane(tmp_path, 1, (transport,), timeout_s=TIMEOUT_S) as end:
        worker = Worker(end, model)
        assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
        started(worker, [long_request(), replace(long_request(), request_id="r2")], 5)
        yield worker


def goes_on(source: Worker, target: Target, transport: str, model: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The one line that the source says; its requests are what they are without a move."""
    identity = source.end.identity if source.end else None
    assert identity is not None
    with caplog.at_level(logging.INFO, "dora.worker"):
        number = source.order(copy_out=pb.CopyOut(request_id="r1", target=target.peer(transport)))
        outcome = source.copied(number, "r1")
        assert not outcome.ok and outcome.error_kind == "refused" and not outcome.locator
        assert source.obey(thaw=pb.Thaw(request_id="r1")).ok
        for name in ("r1", "r2"):
            assert source.finish(name) == alone(model, long_request())
        assert source.end is not None
        until(lambda: source.end is not None and source.end.plane.held_bytes() == (0, 0))
    (load, _) = source.engine.load(), caplog
    assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return "\n".join(lines) if len(lines) != 1 else outcome.error


@pytest.mark.parametrize("what", ACTS)
def test_a_bad_target_costs_its_source_one_line(
    source: Worker, transport: str, model: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    act, reason = ACTS[what]
    assert source.end is not None
    target = Target(replace(source.end.identity, worker_id="w9", epoch=9), act)
    try:
        assert reason in goes_on(source, target, transport, model, caplog)
    finally:
        target.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "another model"}, "fingerprint"),
        ({"epoch": 8}, "epoch"),
        ({"worker_id": "w8"}, "w8"),
    ],
)
def test_a_target_that_is_another_one_gets_nothing(
    source: Worker,
    transport: str,
    model: Path,
    change: dict[str, object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert source.end is not None
    target = Target(replace(source.end.identity, **{"worker_id": "w9", "epoch": 9, **change}), stops(Kind.OPEN))
    try:
        assert reason in goes_on(source, target, transport, model, caplog)
    finally:
        target.close()
