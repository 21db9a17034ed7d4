"""The contract of KV transports: bytes arrive equal or not at all, and everything borrowed is returned."""

import gc
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora.errors import NotFound, TransferFailed
from dora.kvtransfer.checksum import digest_with
from dora.kvtransfer.device import is_on_device
from dora.kvtransfer.peer import Identity, Peer, greet
from dora.kvtransfer.transfer import Sent, Transfer
from dora.kvtransfer.transports.registry import is_installed
from dora.kvtransfer.transports.segments import sweep
from dora.kvtransfer.transports.transport import CHUNK_BYTES
from dora.kvtransfer.wire import ConnectionClosed, Kind, Stream
from tests.contract.planes import ON_DEVICE, SECRET, TRANSPORTS, WAIT_S, End, a_plane, name_of, until
from tests.refusals import refused
from tests.sweeps import examples, some_of

SIZES = (1, 7, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    if not is_installed(name_of(request.param)):
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture
def ends(tmp_path: Path, transport: str) -> Iterator[tuple[End, End]]:
    with two_ends(tmp_path, transport) as both:
        yield both


@contextmanager
def two_ends(folder: Path, transport: str, **target_settings: Any) -> Iterator[tuple[End, End]]:
    """Source, of epoch 1, and target, of epoch 2."""
    with a_plane(folder, 1, (transport,)) as source, a_plane(folder, 2, (transport,), **target_settings) as target:
        yield source, target


def made(sizes: list[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


def sent(source: End, target: Peer | End, ticket: str, parts: list[np.ndarray], head: bytes = b"head") -> Transfer:
    """Begins to send these bytes."""
    peer = target.peer if isinstance(target, End) else target
    return source.plane.send_parts(peer, ticket, source.parts(parts), head)


def arrived(target: End, key: str) -> tuple[bytes, Any]:
    """The head and the body of a snapshot that came in one round."""
    head, rounds = target.plane.take_rounds(key)
    return head, rounds[0].body


def moved(source: End, target: End, ticket: str, parts: list[np.ndarray], head: bytes = b"head") -> Sent:
    """Sends these bytes to a target that expects them, and sees that they are there."""
    target.plane.expect(ticket, source.identity.epoch, sum(part.nbytes for part in parts))
    done = sent(source, target, ticket, parts, head).done.result(WAIT_S)
    found_head, body = arrived(target, done.key)
    assert found_head == head and is_on_device([body]) == (source.landings is not None and target.landings is not None)
    assert source.landings or not body.flags.writeable
    assert np.array_equal(body, np.concatenate(parts))
    return done


def refusal(transfer: Transfer) -> str:
    error = transfer.done.exception(WAIT_S)
    assert isinstance(error, TransferFailed), error
    return str(error)


# What arrives.


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=6),
    head=st.binary(min_size=1, max_size=300),
    data=st.data(),
)
def test_bytes_arrive_as_they_left(ends: tuple[End, End], sizes: list[int], head: bytes, data: st.DataObject) -> None:
    source, target = ends
    parts = made(sizes + data.draw(st.lists(st.integers(1, 5000), max_size=40)), seed=len(sizes))
    done = moved(source, target, "r", parts, head)
    assert done.body_bytes == sum(part.nbytes for part in parts) and done.fallbacks == ()


def test_one_pair_carries_many_requests_at_once(ends: tuple[End, End], transport: str) -> None:
    """From many threads, in both directions."""
    source, target = ends
    bodies = {f"r{i}": made([3000 * i + 1, CHUNK_BYTES // 3], seed=i) for i in range(24)}
    for ticket, parts in bodies.items():
        size = sum(part.nbytes for part in parts)
        target.plane.expect(ticket, 1, size)
        source.plane.expect(ticket, 2, size)
    there, back = {}, {}

    def begin(tickets: list[str]) -> None:
        for ticket in tickets:
            there[ticket] = sent(source, target, ticket, bodies[ticket], ticket.encode())
            back[ticket] = sent(target, source, ticket, bodies[ticket], ticket.encode())

    threads = [threading.Thread(target=begin, args=(list(bodies)[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for transfers, end in ((there, target), (back, source)):
        for ticket, transfer in transfers.items():
            done = transfer.done.result(WAIT_S)
            head, body = arrived(end, done.key)
            assert (head, done.transport) == (ticket.encode(), name_of(transport))
            assert np.array_equal(body, np.concatenate(bodies[ticket]))


def test_memory_comes_back_when_the_last_view_of_it_is_gone(ends: tuple[End, End]) -> None:
    source, target = ends
    for _ in range(3):  # again and again the same memory
        target.plane.expect("r", 1, 1 << 20)
        done = sent(source, target, "r", made([1 << 20])).done.result(WAIT_S)
        _, body = arrived(target, done.key)
        view = body[5:9].reshape(2, 2)
        del body
        assert sum(source.plane.held_bytes()) + sum(target.plane.held_bytes()) >= 1 << 20
        assert view.nbytes == 4
        del view
        until(lambda: sum(source.plane.held_bytes()) + sum(target.plane.held_bytes()) == 0)


def test_what_has_arrived_outlives_its_source(tmp_path: Path, transport: str) -> None:
    with a_plane(tmp_path, 2, (transport,)) as target:
        with a_plane(tmp_path, 1, (transport,)) as source:
            target.plane.expect("r", 1, 1 << 20)
            parts = made([1 << 20])
            key = sent(source, target, "r", parts).done.result(WAIT_S).key
        _, body = arrived(target, key)
        assert np.array_equal(body, parts[0])
        with refused(NotFound, field="locator", value=key):
            arrived(target, key)


# What is refused. The source keeps the request, the target has nothing of it left.


def test_what_is_not_expected_is_refused(ends: tuple[End, End]) -> None:
    source, target = ends
    parts = made([100])
    assert "not expected" in refusal(sent(source, target, "r", parts))
    target.plane.expect("r", 7, 100)  # from another epoch
    assert "not expected" in refusal(sent(source, target, "r", parts))
    target.plane.expect("r", 1, 99)
    assert "at most 99" in refusal(sent(source, target, "r", parts))
    target.plane.expect("r", 1, 100)
    target.plane.forget("r")
    assert "not expected" in refusal(sent(source, target, "r", parts))
    moved(source, target, "r", parts)
    until(lambda: target.plane.held_bytes()[1] == 0)


def test_a_full_target_refuses_and_takes_again_when_there_is_room(tmp_path: Path, transport: str) -> None:
    """Whichever end has the memory: with shared memory it is the source."""
    if transport.endswith(ON_DEVICE):
        pytest.skip("a body goes by host memory if a device is full: see test_device_bodies")
    with (
        a_plane(tmp_path, 1, (transport,), memory_bytes=3 << 20) as source,
        a_plane(tmp_path, 2, (transport,), memory_bytes=3 << 20) as target,
    ):
        parts = made([2 << 20])
        for ticket in ("a", "b"):
            target.plane.expect(ticket, 1, 2 << 20)
        held = arrived(target, sent(source, target, "a", parts).done.result(WAIT_S).key)
        assert "in flight" in refusal(sent(source, target, "b", parts))
        del held
        gc.collect()
        _, body = arrived(target, sent(source, target, "b", parts).done.result(WAIT_S).key)
        assert np.array_equal(body, parts[0])


def test_a_cancelled_transfer_leaves_nothing(ends: tuple[End, End], transport: str) -> None:
    """Midway: a cap lets a part of it through."""
    source, target = ends
    with a_plane(source.plane._settings.folder, 3, (transport,), bandwidth_bytes_per_s=8 << 20) as slow:
        target.plane.expect("r", 3, 64 << 20)
        transfer = sent(slow, target, "r", made([64 << 20]))
        until(lambda: target.plane.arriving(3) != [])
        transfer.cancel()
        assert "cancelled" in refusal(transfer)
        until(lambda: target.plane.arriving(3) == [] and target.plane.held_bytes()[1] == 0)
        small = made([5])
        target.plane.expect("s", 3, 5)
        done = sent(slow, target, "s", small).done.result(WAIT_S)  # on the same stream
        assert np.array_equal(arrived(target, done.key)[1], small[0])


def test_a_target_that_expects_it_no_longer_ends_the_copy(ends: tuple[End, End], transport: str) -> None:
    source, target = ends
    with a_plane(source.plane._settings.folder, 3, (transport,), bandwidth_bytes_per_s=8 << 20) as slow:
        target.plane.expect("r", 3, 64 << 20)
        transfer = sent(slow, target, "r", made([64 << 20]))
        until(lambda: target.plane.arriving(3) != [])
        target.plane.forget("r")
        assert "no longer expected" in refusal(transfer)
        until(lambda: target.plane.held_bytes()[1] == 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "another model"}, "fingerprint"),
        ({"secret": bytes(32)}, "secret"),
    ],
)
def test_a_worker_of_another_model_or_run_is_refused(
    ends: tuple[End, End], transport: str, change: dict[str, Any], reason: str
) -> None:
    source, target = ends
    target.plane.expect("r", 3, 100)
    with a_plane(source.plane._settings.folder, 3, (transport,), **change) as stranger:
        assert reason in refusal(sent(stranger, target, "r", made([100])))


def test_a_worker_of_another_epoch_is_refused(ends: tuple[End, End], transport: str) -> None:
    """A source that was told of the target's earlier life does not reach the present one."""
    source, target = ends
    target.plane.expect("r", 1, 100)
    former = Peer("w2", 1, target.address, (name_of(transport),))
    assert "epoch 2" in refusal(sent(source, former, "r", made([100])))
    nowhere = Peer("w9", 9, "127.0.0.1:1", (name_of(transport),))
    assert "w9" in refusal(sent(source, nowhere, "r", made([100])))
    nameless = Peer("", 0, "", ())
    assert refusal(sent(source, nameless, "r", made([100])))


def test_both_ends_need_a_transport_in_common(ends: tuple[End, End]) -> None:
    source, target = ends
    target.plane.expect("r", 1, 100)
    strange = Peer("w2", 2, target.address, ("pigeon",))
    assert "none in common" in refusal(sent(source, strange, "r", made([100])))


# The other end fails in the middle.


@contextmanager
def hostile(target: End, epoch: int = 9, timeout_s: float = WAIT_S) -> Iterator[Stream]:
    """A connection of a worker that holds the secret, and says what it likes."""
    host, _, port = target.address.rpartition(":")
    stream = Stream(socket.create_connection((host, int(port))), timeout_s)
    try:
        identity = Identity(f"w{epoch}", epoch, target.identity.fingerprint, target.identity.host)
        greet(stream, identity, target.peer, SECRET)
        yield stream
    finally:
        stream.close()


def opened(stream: Stream, size: int, key: str = "9-" + "0" * 32 + ".kv") -> str:
    stream.send(Kind.ATTACH, {"transport": "tcp"})
    assert stream.receive().kind is Kind.ATTACHED
    stream.send(Kind.OPEN, {"key": key, "ticket": "r", "transport": "tcp", "size": size})
    assert stream.receive().kind is Kind.OPENED
    return key


@pytest.fixture
def target(tmp_path: Path) -> Iterator[End]:
    with a_plane(tmp_path, 2, ("tcp",), timeout_s=0.5) as end:
        end.plane.expect("r", 9, 1000)
        yield end


def test_a_peer_that_stops_in_the_middle_is_given_up(target: End) -> None:
    with hostile(target) as stream:
        opened(stream, 1000)
        assert target.plane.held_bytes()[1]
        with refused(ConnectionClosed):
            stream.receive()
    until(lambda: target.plane.held_bytes()[1] == 0)


def test_a_target_that_stops_fails_what_was_sent_to_it(tmp_path: Path) -> None:
    """It accepts, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as deaf, a_plane(tmp_path, 1, ("tcp",), timeout_s=0.3) as source:
        peer = Peer("w2", 2, f"127.0.0.1:{deaf.getsockname()[1]}", ("tcp",))
        assert "says nothing for 0.3 s" in refusal(sent(source, peer, "r", made([100])))


CHUNK = {"at": 0, "size": 10}
ZEROS = memoryview(bytes(1001))
WRONG: dict[str, Callable[[Stream, str], None]] = {
    "no frame": lambda stream, key: stream._socket.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(40)),
    "no head": lambda stream, key: stream._socket.sendall(b"DKV1\x09\0\0\0\x04\0\0\0" + bytes(8) + b"\xc1" * 4),
    "an endless head": lambda stream, key: stream._socket.sendall(b"DKV1\x09\0\0\0\xff\xff\xff\x7f" + bytes(8)),
    "an endless body": lambda stream, key: stream._socket.sendall(b"DKV1\x09\0\0\0\0\0\0\0" + b"\xff" * 8),
    "too much": lambda stream, key: stream.send(Kind.CHUNK, {**CHUNK, "key": key, "size": 1001}, [ZEROS]),
    "a gap": lambda stream, key: stream.send(Kind.CHUNK, {**CHUNK, "key": key, "at": 5}, [ZEROS[:10]]),
    "a huge chunk": lambda stream, key: stream.send(Kind.CHUNK, {**CHUNK, "key": key, "size": 1 << 60}),
    "a chunk of nothing": lambda stream, key: stream.send(Kind.CHUNK, {**CHUNK, "key": "9-nothing"}),
    "no fields": lambda stream, key: stream.send(Kind.CHUNK, {}),
    "other types": lambda stream, key: stream.send(Kind.CHUNK, {**CHUNK, "key": key, "at": "here"}),
    "a greeting": lambda stream, key: stream.send(Kind.GREETING, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_garbage_ends_the_connection_and_nothing_else(target: End, name: str) -> None:
    with hostile(target) as stream:
        WRONG[name](stream, opened(stream, 1000))
        with pytest.raises(TransferFailed) as caught:
            while stream.receive().kind is Kind.REFUSED:
                pass
        assert not isinstance(caught.value.__cause__, BlockingIOError | TimeoutError), "it was ended, and did not stall"
    until(lambda: target.plane.held_bytes()[1] == 0)
    with a_plane(target.plane._settings.folder, 1, ("tcp",)) as honest:
        moved(honest, target, "s", made([3000]))


def test_damage_is_refused_wherever_it_is(target: End) -> None:
    body = made([1000])[0]
    digest = digest_with("xxh3", SECRET)
    with hostile(target) as stream:
        for damaged in ("body", "head", "short"):
            key = opened(stream, 1000, f"9-{damaged.encode().hex():0>32}.kv")
            right = digest([body.data])
            if damaged != "short":
                stream.send(Kind.CHUNK, {"key": key, "at": 0, "size": 1000}, [body.data])
            sums = [bytes(16)] if damaged == "body" else [right]
            total = bytes(16) if damaged == "head" else digest([*sums, b"head"])
            commit = {"key": key, "sum": total, "chunks": 1}
            stream.send(Kind.COMMIT, commit, [memoryview(sums[0]), memoryview(b"head")])
            answer = stream.receive()
            assert answer.kind is Kind.REFUSED and answer.head["key"] == key
            expected = {"body": "checksum of chunk 1", "head": "checksum of the head", "short": "0 bytes arrived"}
            assert expected[damaged] in answer.head["reason"]
            until(lambda: target.plane.held_bytes()[1] == 0)


def test_a_stranger_is_told_nothing(target: End) -> None:
    """A peer that cannot prove the secret is refused before anything else is read."""
    host, _, port = target.address.rpartition(":")
    stream = Stream(socket.create_connection((host, int(port))), WAIT_S)
    nobody = Identity("w9", 9, "f", "h")
    with refused(TransferFailed, field="secret", value=target.peer.address):
        greet(stream, nobody, target.peer, bytes(32))
    stream.close()


# Several transports.


def test_a_transport_that_fails_is_left_for_the_next_and_says_so(tmp_path: Path) -> None:
    """The target has another folder, so that it cannot map what the source writes."""
    (tmp_path / "other").mkdir()
    with a_plane(tmp_path, 1) as source, a_plane(tmp_path / "other", 2) as target:
        parts = made([3 << 20])
        target.plane.expect("r", 1, 3 << 20)
        done = sent(source, target, "r", parts).done.result(WAIT_S)
        assert done.transport == "tcp"
        (reason,) = done.fallbacks
        assert reason.startswith("shm: ") and "No such file" in reason
        assert np.array_equal(arrived(target, done.key)[1], parts[0])
        assert moved(source, target, "s", parts).fallbacks == (), "one event, not one for each snapshot"


def test_another_host_is_not_reached_by_shared_memory_and_gets_strong_checksums(tmp_path: Path) -> None:
    with a_plane(tmp_path, 1) as source, a_plane(tmp_path, 2, host="elsewhere") as target:
        assert moved(source, target, "r", made([CHUNK_BYTES + 5])).transport == "tcp"


def test_each_transport_is_timed_where_there_is_a_choice(tmp_path: Path) -> None:
    with a_plane(tmp_path, 1) as source, a_plane(tmp_path, 2) as target:
        moved(source, target, "r", made([2 << 20]))
        rates = source.plane.measured()["w2"]
        assert set(rates) == {"shm", "tcp"} and all(rate > 0 for rate in rates.values())


def test_a_cap_holds_over_all_pairs(tmp_path: Path, transport: str) -> None:
    with ExitStack() as stack:
        source = stack.enter_context(a_plane(tmp_path, 1, (transport,), bandwidth_bytes_per_s=40 << 20))
        targets = [stack.enter_context(a_plane(tmp_path, epoch, (transport,))) for epoch in (2, 3)]
        parts = made([6 << 20])
        began_s = time.monotonic()
        for target in targets:
            target.plane.expect("r", 1, 6 << 20)
        for transfer in [sent(source, target, "r", parts) for target in targets]:
            transfer.done.result(WAIT_S)
        assert time.monotonic() - began_s >= 0.12, "12 MiB at 40 MiB/s, less the burst and the last chunk"


# What is left behind.


def _send_and_wait(folder: str, peer: Peer, transport: str, told: Connection) -> None:
    with a_plane(Path(folder), 1, (transport,)) as source:
        sent = source.plane.send_parts(peer, "r", source.parts(made([1 << 20])), b"head")
        told.send(sent.done.result(WAIT_S).key)
        told.recv()


@pytest.mark.parametrize("transport", some_of(TRANSPORTS, "shm"), indirect=True)  # a process starts
def test_what_a_killed_source_leaves_is_swept_and_what_it_sent_stays(tmp_path: Path, transport: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with a_plane(tmp_path, 2, (transport,)) as target:
        target.plane.expect("r", 1, 1 << 20)
        child = context.Process(
            target=_send_and_wait, args=(str(tmp_path), target.peer, transport, theirs), daemon=True
        )
        child.start()
        key = ours.recv()
        sweep(tmp_path)
        assert {folder.name for folder in tmp_path.iterdir()} == {"1", "2"}, "both live"
        child.kill()
        child.join()
        sweep(tmp_path)
        assert {folder.name for folder in tmp_path.iterdir()} == {"2"}
        _, body = arrived(target, key)
        assert np.array_equal(body, made([1 << 20])[0])


def test_no_thread_descriptor_or_file_is_left(tmp_path: Path, transport: str) -> None:
    def left() -> tuple[int, int, list[str]]:
        gc.collect()
        files = sorted(str(file) for file in tmp_path.rglob("*"))
        return threading.active_count(), len(os.listdir("/proc/self/fd")), files

    with two_ends(tmp_path, transport) as (source, target):  # what is made once a process is made now
        moved(source, target, "r", made([100]))
    before = left()
    for _ in range(3):
        with two_ends(tmp_path, transport) as (source, target):
            moved(source, target, "r", made([100, CHUNK_BYTES]))
            target.plane.expect("s", 1, 100)
            sent(source, target, "s", made([100])).done.result(WAIT_S)  # and never taken
    assert left() == before


def test_closing_in_the_middle_fails_what_is_under_way(tmp_path: Path, transport: str) -> None:
    with a_plane(tmp_path, 2, (transport,)) as target:
        with a_plane(tmp_path, 1, (transport,), bandwidth_bytes_per_s=8 << 20) as source:
            for ticket in ("r", "s"):
                target.plane.expect(ticket, 1, 64 << 20)
            transfers = [sent(source, target, ticket, made([64 << 20])) for ticket in ("r", "s")]
            until(lambda: target.plane.arriving(1) != [])
        assert all("ends" in refusal(transfer) for transfer in transfers)
        until(lambda: target.plane.arriving(1) == [] and target.plane.held_bytes()[1] == 0)
