"""Upstreams that die at any word, or send what is wrong: what has come stays, and the next one gives the rest.

The faulty end is a script on the wire, which does its harm at a word of the protocol and not at a time.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dora.errors import TransferFailed
from dora.kvtransfer import wire
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import Identity, Peer, answer, greet
from dora.kvtransfer.wire import Kind, Stream
from dora.relay.holding import tag_of
from dora.relay.numbering import Numbering, packed, unpacked
from dora.relay.orders import Upstream
from dora.weights import manifest
from dora.weights.host_store import RECEIVING_FOLDER
from tests.contract.relays import (  # noqa: F401
    SECRET,
    SMALL,
    WAIT_S,
    Host,
    hosts_of,
    publish,
    publish_anew,
    same,
    small_chunks,
    tiny_model,
)


@pytest.fixture
def hosts(tmp_path: Path, model: Path) -> Iterator[list[Host]]:
    with hosts_of(tmp_path, model, 2, timeout_s=2.0) as two:
        yield two


class Scripted:
    """An upstream that knows a version of ``source``; ``act`` has its chunks sent, and the harm."""

    def __init__(self, source: Host, act: Callable[[Any], None], version: int = 1) -> None:
        self.source = source
        self.manifest = source.store.manifest(version)
        self.numbering = Numbering(self.manifest)
        self.stream: Stream
        self._reader = source.relay.find(self.manifest.name)
        self._act = act

    def serve(self, stream: Stream, stopping: threading.Event) -> None:
        self.stream, self.stopping = stream, stopping
        try:
            self._act(self)
        except TransferFailed:
            return  # the other end has had enough

    def hear(self, kind: Kind) -> bytes:
        frame = self.stream.receive()
        assert frame.kind is kind
        return self.stream.read(frame.body_bytes)

    def meet(self) -> None:
        answer(self.stream, IDENTITY, SECRET)

    def show(self, text: str = "") -> None:
        """The manifest."""
        body = (text or self.manifest.to_json()).encode()
        self.stream.send(Kind.HELD, {}, [memoryview(body)])

    def begin(self) -> None:
        """All words until chunks are wanted."""
        self.meet()
        self.hear(Kind.FETCH)
        self.show()
        self.hear(Kind.LACKED)

    def content(self, number: int) -> bytes:
        assert self._reader is not None
        with self._reader.reader() as reader:
            return bytes(reader.chunk(number))

    def send(self, number: int, content: bytes | None = None, **head: Any) -> None:
        """One chunk, with a fitting head but for what is given."""
        body = self.content(number) if content is None else content
        told = {"first": number, "count": 1, "size": len(body), "tags": tag_of(memoryview(body), SECRET), **head}
        self.stream.send(Kind.CHUNK, told, [memoryview(body)])

    def send_all(self) -> None:
        for number in range(self.numbering.chunks):
            self.send(number)


IDENTITY = Identity("bad", 1, "", "bad")


@contextmanager
def scripted(source: Host, act: Callable[[Scripted], None]) -> Iterator[Upstream]:
    listener = Listener("127.0.0.1")
    listener.open(Scripted(source, act).serve, 5.0)
    try:
        yield Upstream("bad", 1, listener.address)
    finally:
        listener.close()


def after_chunks(share: float) -> Callable[[Scripted], None]:
    def act(upstream: Scripted) -> None:
        upstream.begin()
        for number in range(int(upstream.numbering.chunks * share)):
            upstream.send(number)

    return act


def after(*acts: Callable[[Scripted], object]) -> Callable[[Scripted], None]:
    def act(upstream: Scripted) -> None:
        for each in acts:
            each(upstream)

    return act


def fetched(upstream: Scripted) -> None:
    upstream.meet()
    upstream.hear(Kind.FETCH)


DEATHS = {
    "as it connects": lambda _: None,
    "once it is known": Scripted.meet,
    "as it is asked": fetched,
    "after its manifest": after(fetched, Scripted.show),
    "before a chunk": Scripted.begin,
    "after a chunk": after(Scripted.begin, lambda upstream: upstream.send(0)),
    "in the middle": after_chunks(0.5),
    "before its last word": after_chunks(1.0),
}


@pytest.mark.parametrize("death", DEATHS)
def test_an_upstream_that_dies_is_left_for_the_next(hosts: list[Host], death: str) -> None:
    source, target = hosts
    name = publish(source.store, 1)
    with scripted(source, DEATHS[death]) as dying:
        target.fetch(name, dying, source)
        arrived = target.arrived()
    assert arrived.upstream == "h0" and same(source.store, target.store, 1)
    assert arrived.came_bytes == source.store.manifest(1).total_bytes, "no chunk came twice"


def test_what_has_come_serves_a_later_order_and_a_follower(tmp_path: Path, model: Path) -> None:
    with hosts_of(tmp_path, model, 3, wait_s=0.2) as (source, target, behind):
        name = publish(source.store, 1)
        half = source.store.manifest(1).total_bytes // 2
        with scripted(source, after_chunks(0.5)) as dying:
            target.fetch(name, dying)
            target.failed()
        assert target.store.versions() == (0,)
        behind.fetch(name, target)
        assert "nothing more" in behind.failed().reason
        assert behind.store.versions() == (0,)
        behind.fetch(name, source)
        assert behind.arrived().came_bytes <= half + 2 * SMALL
        target.fetch(name, source)
        assert target.arrived().came_bytes <= half + 2 * SMALL
        assert all(same(source.store, each.store, 1) for each in (target, behind))


def test_an_order_that_the_store_cannot_obey_fails_with_the_reason(hosts: list[Host]) -> None:
    source, target = hosts
    name = publish(source.store, 1)
    receiving = target.store.root / RECEIVING_FOLDER
    receiving.rmdir()
    target.fetch(name, source)
    failed = target.failed()
    assert "FileNotFoundError" in failed.reason and str(receiving) in failed.reason and not failed.culprits
    receiving.mkdir()
    target.fetch(name, source)
    target.arrived()
    assert same(source.store, target.store, 1)


def flipped(upstream: Scripted, number: int = 3) -> bytes:
    content = bytearray(upstream.content(number))
    content[7] ^= 1
    return bytes(content)


def other_manifest(upstream: Scripted) -> None:
    fetched(upstream)
    changed = upstream.manifest.to_json().replace('"version":1', '"version":2')
    upstream.show(changed)


def of_another_name(upstream: Scripted) -> None:
    fetched(upstream)
    upstream.show(manifest.Manifest(2, upstream.manifest.files, upstream.manifest.tensors).to_json())


def no_json(upstream: Scripted) -> None:
    fetched(upstream)
    upstream.show("\x00")


WRONG: dict[str, Callable[[Scripted], object]] = {
    "a flipped bit": lambda upstream: upstream.send(3, flipped(upstream)),
    "a flipped bit under the tag of the chunk": lambda upstream: upstream.send(
        3, flipped(upstream), tags=tag_of(memoryview(upstream.content(3)), SECRET)
    ),
    "another chunk": lambda upstream: upstream.send(3, upstream.content(5)),
    "a chunk twice": lambda upstream: (upstream.send(3), upstream.send(3)),
    "a chunk that there is not": lambda upstream: upstream.send(0, first=upstream.numbering.chunks),
    "a chunk below all": lambda upstream: upstream.send(0, first=-1),
    "no chunk": lambda upstream: upstream.send(0, count=0),
    "too few bytes": lambda upstream: upstream.send(0, upstream.content(0)[:-1]),
    "a size that is not so": lambda upstream: upstream.send(0, size=1),
    "no tag": lambda upstream: upstream.send(0, tags=b""),
    "a word out of turn": lambda upstream: upstream.stream.send(Kind.OPENED, {}),
}
WRONG_MANIFESTS = {"an altered one": other_manifest, "another version's": of_another_name, "no JSON": no_json}


@pytest.mark.parametrize("harm", [*WRONG, *WRONG_MANIFESTS])
def test_wrong_bytes_are_refused_and_their_sender_is_named(hosts: list[Host], harm: str) -> None:
    source, target = hosts
    name = publish(source.store, 1)

    def act(upstream: Scripted) -> None:
        if harm in WRONG_MANIFESTS:
            WRONG_MANIFESTS[harm](upstream)
        else:
            upstream.begin()
            WRONG[harm](upstream)
        upstream.hear(Kind.COMPLETE)  # it never comes: the follower leaves

    with scripted(source, act) as wrong:
        target.fetch(name, wrong)
        failed = target.failed()
        assert failed.culprits == ("bad",), failed
        assert failed.reason.startswith("bad: ")
        assert target.store.versions() == (0,)
        target.fetch(name, wrong, source)
        assert target.arrived().upstream == "h0"
    assert same(source.store, target.store, 1)


FAULTS: dict[str, Callable[[Scripted], object]] = {
    "it says too early that all was sent": after(
        Scripted.begin, lambda upstream: upstream.stream.send(Kind.COMPLETE, {})
    ),
    "it refuses": after(fetched, lambda upstream: upstream.stream.send(Kind.REFUSED, {"reason": "busy"})),
    "it is silent": after(Scripted.begin, lambda upstream: upstream.hear(Kind.COMPLETE)),
    "it stops in a chunk": after(
        Scripted.begin, lambda upstream: upstream.send(0, upstream.content(0) * 2, size=SMALL)
    ),
}


def drips(upstream: Scripted) -> None:
    """A byte of a chunk now and then, as PACED_BYTES says."""
    upstream.begin()
    body = upstream.content(0)
    told = {"first": 0, "count": 1, "size": len(body), "tags": tag_of(memoryview(body), SECRET)}
    upstream.stream.send(Kind.CHUNK, told, [memoryview(body)], lambda count: upstream.stopping.wait(0.02))


def awaits(upstream: Scripted) -> None:
    """It says again and again that it lives, and that more will come."""
    upstream.begin()
    while not upstream.stopping.wait(0.02):
        upstream.stream.send(Kind.AWAITED, {"here": 0})


@pytest.mark.parametrize("sign", [drips, awaits])
def test_an_upstream_that_gives_only_signs_of_life_is_left(
    tmp_path: Path, model: Path, sign: Callable[[Scripted], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PACED_BYTES", 1)
    with hosts_of(tmp_path, model, 2, timeout_s=0.4, wait_s=0.1) as (source, target):
        name = publish(source.store, 1)
        with scripted(source, sign) as idle:
            target.fetch(name, idle, source)
            arrived = target.arrived()
        assert arrived.upstream == "h0" and same(source.store, target.store, 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_upstream_that_gives_nothing_is_left(hosts: list[Host], fault: str) -> None:
    source, target = hosts
    name = publish(source.store, 1)
    with scripted(source, lambda upstream: FAULTS[fault](upstream) and None) as idle:
        target.fetch(name, idle, source)
        assert target.arrived().upstream == "h0" and same(source.store, target.store, 1)


def test_a_chunk_that_is_wrong_is_not_passed_on(tmp_path: Path, model: Path) -> None:
    with hosts_of(tmp_path, model, 3, wait_s=0.2) as (source, target, behind):
        name = publish(source.store, 1)

        def act(upstream: Scripted) -> None:
            upstream.begin()
            for number in range(upstream.numbering.chunks):
                upstream.send(number, flipped(upstream) if number == 3 else None)
            upstream.hear(Kind.COMPLETE)

        with scripted(source, act) as wrong:
            target.fetch(name, wrong)
            assert target.failed().culprits == ("bad",)
        behind.fetch(name, target)
        assert behind.failed().culprits == ()
        holding = behind.relay.find(name)
        assert holding is not None and 3 in holding.lacked()
        behind.fetch(name, source)
        behind.arrived()
        assert same(source.store, behind.store, 1)


def test_a_version_that_is_dropped_in_the_middle_blames_nobody(hosts: list[Host]) -> None:
    source, target = hosts
    name = publish(source.store, 1)
    half_sent = threading.Event()

    def act(upstream: Scripted) -> None:
        after_chunks(0.5)(upstream)
        half_sent.set()
        upstream.hear(Kind.COMPLETE)

    with scripted(source, act) as slow:
        target.fetch(name, slow)
        assert half_sent.wait(WAIT_S)
        target.relay.drop(name)
        failed = target.failed()
    assert failed.culprits == () and "retired" in failed.reason
    assert target.store.held_bytes == 0 and target.relay.find(name) is None
    target.fetch(name, source)
    target.arrived()
    assert same(source.store, target.store, 1)


# The other way round: a follower that is faulty.


@contextmanager
def a_follower(source: Host) -> Iterator[Stream]:
    host, _, port = source.relay.address.rpartition(":")
    stream = Stream(socket.create_connection((host, int(port))), WAIT_S)
    try:
        greet(stream, IDENTITY, Peer("h0", 1, source.relay.address, ()), SECRET)
        yield stream
    finally:
        stream.close()


def refusal(stream: Stream) -> str:
    frame = stream.receive()
    assert frame.kind is Kind.REFUSED, frame
    return str(frame.head["reason"])


@pytest.mark.parametrize("body", [b"x", packed([1 << 20]), packed([5]) + packed([4]), packed([1]) * 2, bytes(8)])
def test_a_list_of_chunks_that_makes_no_sense_is_refused(hosts: list[Host], body: bytes) -> None:
    name = publish(hosts[0].store, 1)
    with a_follower(hosts[0]) as stream:
        stream.send(Kind.FETCH, {"name": name, "piece_bytes": SMALL})
        stream.drain(stream.receive().body_bytes)
        stream.send(Kind.LACKED, {}, [memoryview(body)])
        assert "a list of chunks" in refusal(stream)


@pytest.mark.parametrize("head", [{}, {"name": 1, "piece_bytes": 1}, {"name": "v1", "piece_bytes": 1}])
def test_a_question_that_makes_no_sense_ends_the_connection(hosts: list[Host], head: dict[str, Any]) -> None:
    with a_follower(hosts[0]) as stream:
        stream.send(Kind.FETCH, head)
        with pytest.raises(TransferFailed):
            stream.drain(stream.receive().body_bytes or 1)
    hosts[1].fetch(publish(hosts[0].store, 1), hosts[0])
    hosts[1].arrived()


def test_a_follower_that_leaves_costs_nothing(hosts: list[Host], caplog: pytest.LogCaptureFixture) -> None:
    name = publish(hosts[0].store, 1)
    with caplog.at_level(logging.ERROR), a_follower(hosts[0]) as stream:
        stream.send(Kind.FETCH, {"name": name, "piece_bytes": SMALL})
        stream.drain(stream.receive().body_bytes)
        stream.send(Kind.LACKED, {}, [memoryview(packed(range(3)))])
    publish_anew(hosts[0].store)
    hosts[0].relay.drop(name)
    assert not caplog.records


def test_what_packs_unpacks() -> None:
    assert list(unpacked(packed([0, 1, 2, 7, 9, 10]), 11)) == [(0, 3), (7, 1), (9, 2)]
    assert unpacked(packed([]), 4) == []
