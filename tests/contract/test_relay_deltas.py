"""Between zones a version's chunks cross as deltas from a version that both hosts have; what arrives is the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dora.client.publication import place_weights
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.wire import Kind
from dora.relay.deltas import Encoder, base_of
from dora.relay.holding import tag_of
from dora.relay.numbering import packed
from dora.relay.orders import Upstream
from dora.weights.delta import decode
from dora.weights.files import hash_file, preamble
from dora.weights.host_store import HostStore
from dora.weights.manifest import version_name
from dora.weights.reference import TensorHeader
from dora.weights.store import WeightStore
from dora.weights.whole import MANIFEST_FILE
from tests.contract.relays import (  # noqa: F401
    FILE,
    SECRET,
    SMALL,
    Host,
    a_host,
    hosts_of,
    publish,
    publish_step,
    same,
    small_chunks,
    tiny_model,
)
from tests.contract.test_relay_faults import Scripted, a_follower

SHARE = 0.75  # of its bytes that a step in float32 needs at most, in such small chunks


@pytest.fixture
def hosts(tmp_path: Path, model: Path) -> Iterator[list[Host]]:
    """Two hosts that have version 1; the first has version 2 as well, after a small step."""
    with hosts_of(tmp_path, model, 2, timeout_s=2.0) as two:
        give(two[1], publish(two[0].store, 1), two[0])
        publish_step(two[0].store, 2)
        yield two


def give(target: Host, name: str, source: Host) -> None:
    target.fetch(name, source)
    target.arrived()


def size_of(host: Host, version: int = 2) -> int:
    return host.store.manifest(version).total_bytes


def test_deltas_cross_between_zones_and_whole_chunks_go_on_within_one(tmp_path: Path, model: Path) -> None:
    with hosts_of(tmp_path, model, 3) as (source, first, second):
        base = publish(source.store, 1)
        for host in (first, second):
            give(host, base, source)
        name = publish_step(source.store, 2)
        second.fetch(name, first)
        first.fetch(name, source.across(base))
        crossed, beside = first.arrived(), second.arrived()
        assert crossed.came_bytes < SHARE * size_of(source) and beside.came_bytes == size_of(source)
        assert crossed.link is None, "encoding takes part of the time"
        assert all(same(source.store, each.store, 2) for each in (first, second))


def test_hosts_of_one_machine_in_two_zones(tmp_path: Path, model: Path) -> None:
    with hosts_of(tmp_path, model, 2, machine="one") as (source, target):
        base = publish(source.store, 1)
        give(target, base, source)
        target.fetch(publish_step(source.store, 2), source.across(base))
        assert target.arrived().came_bytes < SHARE * size_of(source) and same(source.store, target.store, 2)


def test_an_older_version_comes_as_a_delta_from_a_newer_one(hosts: list[Host], tmp_path: Path, model: Path) -> None:
    source = hosts[0]
    with a_host(HostStore(tmp_path / "late", model), "late") as late:
        give(late, source.store.name(2), source)
        late.fetch(source.store.name(1), source.across(source.store.name(2)))
        assert late.arrived().came_bytes < SHARE * size_of(source) and same(source.store, late.store, 1)


def damaged(host: Host, content: bytes = b"") -> None:
    """Alters the base's file, but for its header, or replaces its content."""
    file = host.store.folder(1) / FILE
    found = bytearray(file.read_bytes())
    found[SMALL * 4 :] = bytes(byte ^ 1 for byte in found[SMALL * 4 :])
    file.write_bytes(content or found)


WITHOUT: dict[str, Callable[[Host, Host], object]] = {
    "the follower has dropped it": lambda source, target: target.relay.drop(target.store.name(1)),
    "the upstream has dropped it": lambda source, target: source.relay.drop(source.store.name(1)),
    "the follower cannot read it": lambda source, target: (target.store.folder(1) / FILE).unlink(),
    "the upstream cannot read it": lambda source, target: (source.store.folder(1) / FILE).unlink(),
    "the follower's is cut": lambda source, target: damaged(target, b"x"),
    "the upstream's is cut": lambda source, target: damaged(source, b"x"),
}


@pytest.mark.parametrize("harm", WITHOUT)
def test_without_the_base_the_chunks_come_whole(hosts: list[Host], harm: str) -> None:
    source, target = hosts
    base = source.store.name(1)
    WITHOUT[harm](source, target)
    target.fetch(source.store.name(2), source.across(base))
    chunks = sum(file.chunks for file in source.store.manifest(2).files)
    assert 0 <= target.arrived().came_bytes - size_of(source) <= chunks, "at most one byte more a chunk"
    assert same(source.store, target.store, 2)


@pytest.mark.parametrize("content", ["{", None])
def test_a_host_whose_manifest_of_the_base_is_damaged(
    hosts: list[Host], tmp_path: Path, model: Path, content: str | None
) -> None:
    source, target = hosts
    base, file = source.store.name(1), target.store.folder(1) / MANIFEST_FILE
    target.relay.close()
    file.unlink() if content is None else file.write_text(content)
    with a_host(HostStore(tmp_path / "h1", model), "again") as again:
        again.fetch(source.store.name(2), source.across(base))
        assert again.arrived().came_bytes == size_of(source) and same(source.store, again.store, 2)


@pytest.mark.parametrize("base", ["v1", "../v1", version_name(1, "0" * 32), version_name(0, "0" * 32)])
def test_a_base_that_nobody_has_or_that_is_none(hosts: list[Host], base: str) -> None:
    source, target = hosts
    target.fetch(source.store.name(2), source.across(base))
    assert target.arrived().came_bytes == size_of(source) and same(source.store, target.store, 2)


def test_a_base_that_is_still_on_its_way(hosts: list[Host]) -> None:
    source, target = hosts
    third = publish_step(source.store, 3)
    assert source.store.manifest(2).name == source.store.name(2)
    target.store.receive(source.store.manifest(2))
    target.fetch(third, source.across(source.store.name(2)))
    assert target.arrived().came_bytes == size_of(source, 3) and same(source.store, target.store, 3)


@pytest.mark.parametrize("wide", [True, False])
def test_another_layout_comes_whole(hosts: list[Host], wide: bool) -> None:
    """The tensors in other places of a file of the same size, or in two files."""
    source, target = hosts
    store = source.store
    assert isinstance(store, WeightStore)
    tensors = load_file(store.folder(2) / FILE)
    names, folder = list(tensors), store.begin(1, 3)
    if wide:
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, part in halves.items():
            save_file({name: tensors[name] for name in part}, folder / file)
    else:
        halves = {FILE: names}
        (folder / FILE).write_bytes(laid_out(tensors, names[::-1]))
    store.publish(1, 3, [hash_file(folder / file) for file in halves], None)
    with base_of(store.manifest(3), store.name(2), source.relay.find) as base:
        assert base is None
    target.fetch(store.name(3), source.across(store.name(1)))
    assert target.arrived().came_bytes == size_of(source, 3) and same(store, target.store, 3)


def laid_out(tensors: dict[str, np.ndarray], names: list[str]) -> bytes:
    """A safetensors file with the tensors in this order."""
    head = preamble(TensorHeader(name, "F32", tensors[name].shape) for name in names)
    return head + b"".join(tensors[name].tobytes() for name in names)


def test_a_base_that_the_upstream_retires_meanwhile(hosts: list[Host]) -> None:
    source = hosts[0]
    base, numbers = source.store.name(1), [3, 5]
    old = (source.store.folder(1) / FILE).read_bytes()
    new = (source.store.folder(2) / FILE).read_bytes()
    with a_follower(source) as stream:
        stream.send(Kind.FETCH, {"name": source.store.name(2), "piece_bytes": SMALL})
        stream.drain(stream.receive().body_bytes)
        stream.send(Kind.LACKED, {"base": base}, [memoryview(packed(numbers))])
        for number in numbers:
            frame = stream.receive()
            place = slice(number * SMALL, (number + 1) * SMALL)
            found = decode(stream.read(frame.body_bytes), old[place], SMALL)
            assert frame.field("delta", bool) and found == new[place]
            source.relay.drop(base)
        assert stream.receive().kind is Kind.COMPLETE
    assert source.store.versions() == (0, 2)


class Crossing(Scripted):
    """An upstream in another zone, which sends deltas if it is told of a base."""

    def begin(self) -> None:
        self.meet()
        self.hear(Kind.FETCH)
        self.show()
        frame = self.stream.receive()
        self.stream.drain(frame.body_bytes)
        self.base = frame.field("base", str)

    def send_encoded(self, number: int, body: bytes, **head: Any) -> None:
        content = self.content(number)
        told = {"first": number, "count": 1, "size": len(content), "tags": tag_of(memoryview(content), SECRET)}
        self.stream.send(Kind.CHUNK, {**told, "delta": True, **head}, [memoryview(body)])

    def deltas(self, numbers: range, harm: Callable[[bytes], bytes] = bytes, **head: Any) -> None:
        with base_of(self.manifest, self.base, self.source.relay.find) as base:
            assert base is not None
            holding = self.source.relay.find(self.manifest.name)
            assert holding is not None
            encoder = Encoder(holding, base)
            for number in numbers:
                body = harm(bytes(encoder.encoded(number, memoryview(self.content(number)))))
                self.send_encoded(number, body, **head)


@contextmanager
def crossing(source: Host, act: Callable[[Crossing], None]) -> Iterator[Callable[[str], Upstream]]:
    """``act`` as an upstream that has version 2 of ``source``; gives it with a base."""
    listener = Listener("127.0.0.1")
    listener.open(lambda stream, stopping: Crossing(source, act, 2).serve(stream, stopping), 5.0)
    try:
        yield partial(Upstream, "bad", 1, listener.address)
    finally:
        listener.close()


def test_a_base_that_the_follower_retires_meanwhile(hosts: list[Host]) -> None:
    source, target = hosts
    base, name = source.store.name(1), source.store.name(2)

    def act(upstream: Crossing) -> None:
        upstream.begin()
        half = upstream.numbering.chunks // 2
        upstream.deltas(range(half))
        target.relay.drop(base)
        upstream.deltas(range(half, upstream.numbering.chunks))
        upstream.stream.send(Kind.COMPLETE, {})

    with crossing(source, act) as upstream:
        target.fetch(name, upstream(base))
        assert target.arrived().came_bytes < SHARE * size_of(source)
    assert same(source.store, target.store, 2) and target.store.versions() == (0, 2)
    target.store.sweep()
    assert target.store.held_bytes == size_of(source), "the base is freed"


def test_an_upstream_that_dies_is_followed_by_another_one(hosts: list[Host]) -> None:
    source, target = hosts
    base = source.store.name(1)

    def act(upstream: Crossing) -> None:
        upstream.begin()
        upstream.deltas(range(upstream.numbering.chunks // 2))

    with crossing(source, act) as dying:
        target.fetch(source.store.name(2), dying(base), source.across(base))
        arrived = target.arrived()
    assert arrived.upstream == "h0" and same(source.store, target.store, 2)
    assert arrived.came_bytes < SHARE * size_of(source), "all of it as deltas, once"


WRONG: dict[str, Callable[[Crossing], object]] = {
    "a flipped bit": lambda upstream: upstream.deltas(range(3, 4), lambda body: body[:-1] + bytes([body[-1] ^ 1])),
    "too short": lambda upstream: upstream.deltas(range(3, 4), lambda body: body[:-1]),
    "too long": lambda upstream: upstream.deltas(range(3, 4), lambda body: body + bytes(1)),
    "longer than a whole chunk": lambda upstream: upstream.deltas(range(3, 4), lambda body: bytes(SMALL + 2)),
    "nothing": lambda upstream: upstream.deltas(range(3, 4), lambda body: b""),
    "of another kind": lambda upstream: upstream.deltas(range(3, 4), lambda body: b"\7" + body[1:]),
    "a bomb": lambda upstream: upstream.deltas(range(3, 4), lambda body: b"\1\1" + bytes([255] * 4) + body[6:]),
    "of another chunk": lambda upstream: upstream.deltas(range(3, 4), first=5),
    "of two chunks": lambda upstream: upstream.deltas(range(3, 4), count=2, size=2 * SMALL, tags=bytes(32)),
    "twice": lambda upstream: [upstream.deltas(range(3, 4)) for _ in range(2)],
}


@pytest.mark.parametrize("harm", WRONG)
def test_a_wrong_delta_is_refused_and_its_sender_is_named(hosts: list[Host], harm: str) -> None:
    source, target = hosts
    base, name = source.store.name(1), source.store.name(2)
    bases: list[str] = []

    def act(upstream: Crossing) -> None:
        upstream.begin()
        bases.append(upstream.base)
        if upstream.base:
            WRONG[harm](upstream)
            upstream.hear(Kind.COMPLETE)  # it never comes: the follower leaves

    with crossing(source, act) as wrong:
        target.fetch(name, wrong(base))
        assert target.failed().culprits == ("bad",)
        assert bases[:2] == [base, ""] and target.store.versions() == (0, 1)
        target.fetch(name, wrong(base), source.across(base))
        assert target.arrived().upstream == "h0"
    assert same(source.store, target.store, 2)


def test_a_delta_without_a_base_is_refused(hosts: list[Host]) -> None:
    source, target = hosts

    def act(upstream: Crossing) -> None:
        upstream.begin()
        upstream.base = source.store.name(1)
        upstream.deltas(range(3, 4))
        upstream.hear(Kind.COMPLETE)

    with crossing(source, act) as wrong:
        target.fetch(source.store.name(2), wrong(""))
        assert target.failed().culprits == ("bad",)


@pytest.mark.parametrize("at", [0, 1])
def test_a_damaged_base_costs_deltas_and_no_version(hosts: list[Host], at: int) -> None:
    source, target = hosts
    damaged(hosts[at])
    target.fetch(source.store.name(2), source.across(source.store.name(1)))
    target.arrived()
    assert same(source.store, target.store, 2)


def test_whatever_has_changed_arrives(tmp_path: Path, model: Path) -> None:
    changes = st.lists(
        st.tuples(st.integers(0, 1 << 30), st.integers(1, 3000), st.sampled_from([1e-7, 1e-2, 1e30])), max_size=8
    )
    newest = 1
    with hosts_of(tmp_path, model, 2) as (source, target):
        store = source.store
        assert isinstance(store, WeightStore)
        give(target, publish(store, 1), source)

        @settings(max_examples=25, deadline=None)
        @given(changes)
        def arrives(changed: list[tuple[int, int, float]]) -> None:
            nonlocal newest
            base, newest = store.name(newest), newest + 1
            tensors = {name: tensor.copy() for name, tensor in load_file(store.folder(newest - 1) / FILE).items()}
            for place, count, by in changed:
                tensor = tensors[sorted(tensors)[place % len(tensors)]].reshape(-1)
                at = place % len(tensor)
                tensor[at : at + count] = np.float32(by)
            store.publish(1, newest, place_weights(tensors, (), store.begin(1, newest)), None)
            target.fetch(store.name(newest), source.across(base))
            target.arrived()
            assert same(store, target.store, newest)
            for host in (source, target):
                host.relay.drop(base)

        arrives()
