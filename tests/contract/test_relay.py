"""A relay delivers a version whole and equal, from any host that has it, or not at all."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dora.errors import InvalidValue, NotFound, TransferFailed
from dora.models.tiny import make_tiny
from dora.relay.holding import Holding
from dora.weights.holds import NAME_FILE, VERSIONS_FOLDER
from dora.weights.host_store import HostStore
from dora.weights.manifest import Manifest
from dora.weights.receiving import Receiving
from dora.weights.store import WeightStore
from dora.weights.whole import MANIFEST_FILE
from tests.contract.relays import (  # noqa: F401
    CHUNK_BYTES,
    FILE,
    SMALL,
    WAIT_S,
    Host,
    a_host,
    hosts_of,
    publish,
    publish_anew,
    same,
    small_chunks,
    tiny_model,
)
from tests.refusals import refused


@pytest.fixture
def hosts(tmp_path: Path, model: Path) -> Iterator[list[Host]]:
    with hosts_of(tmp_path, model, 3) as three:
        yield three


def test_a_version_goes_down_a_chain_of_eight(tmp_path: Path, model: Path) -> None:
    with hosts_of(tmp_path, model, 9) as hosts:
        name = publish(hosts[0].store, 1)
        for at in range(8, 0, -1):  # the last asks first: each waits for its upstream, which has nothing yet
            hosts[at].fetch(name, hosts[at - 1])
        for host in hosts[1:]:
            arrived = host.arrived()
            assert arrived.name == name and arrived.came_bytes == hosts[0].store.manifest(1).total_bytes
            assert same(hosts[0].store, host.store, 1)


def test_what_came_meanwhile_is_seen_the_next_time(hosts: list[Host]) -> None:
    """The chunks that a follower is shown do not grow under its hands: it would count chunks that it has not sent."""
    publish(hosts[0].store, 1)
    manifest = hosts[0].store.manifest(1)
    holding = Holding(hosts[1].store, manifest, hosts[1].store.receive(manifest))
    for number in range(4):
        holding.add(number)
    come = holding.wait(1, 0.0)
    holding.add(4)
    assert list(come) == [1, 2, 3] and list(holding.wait(1 + len(come), 0.0)) == [4]
    assert not holding.wait(5, 0.0)
    holding.end("the test ends")


@pytest.mark.parametrize("piece_bytes", [1, SMALL, 3 * SMALL + 1, CHUNK_BYTES])
def test_pieces_of_any_size(hosts: list[Host], piece_bytes: int) -> None:
    name = publish(hosts[0].store, 1)
    hosts[1].fetch(name, hosts[0], piece_bytes=piece_bytes)
    assert hosts[1].arrived().upstream == "h0" and same(hosts[0].store, hosts[1].store, 1)


def test_hosts_of_one_machine(tmp_path: Path, model: Path) -> None:
    with hosts_of(tmp_path, model, 2, machine="one") as (source, target):
        target.fetch(publish(source.store, 1), source)
        target.arrived()
        assert same(source.store, target.store, 1)


def test_any_holder_is_an_upstream(hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    hosts[1].fetch(name, hosts[0])
    hosts[1].arrived()
    hosts[0].relay.close()
    hosts[2].fetch(name, hosts[0], hosts[1])
    assert hosts[2].arrived().upstream == "h1" and same(hosts[1].store, hosts[2].store, 1)


def test_only_what_differs_travels(hosts: list[Host]) -> None:
    first = publish(hosts[0].store, 1, changed="model.norm.weight")
    hosts[1].fetch(first, hosts[0])
    hosts[1].arrived()
    hosts[1].fetch(publish(hosts[0].store, 2, changed="model.norm.weight"), hosts[0])
    assert 0 < hosts[1].arrived().came_bytes <= 2 * SMALL and same(hosts[0].store, hosts[1].store, 2)


HARMS: dict[str, Callable[[Path], object]] = {
    "no file": lambda folder: (folder / FILE).unlink(),
    "no name": lambda folder: (folder / NAME_FILE).unlink(),
    "no manifest": lambda folder: (folder / MANIFEST_FILE).write_bytes(bytes(100)),
    "a folder in its place": lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_base_that_cannot_be_read_costs_the_whole_way_and_no_version(hosts: list[Host], harm: str) -> None:
    source, target = hosts[:2]
    target.fetch(publish(source.store, 1, changed="model.norm.weight"), source)
    target.arrived()
    HARMS[harm](target.store.folder(1))
    target.fetch(publish(source.store, 2, changed="model.norm.weight"), source)
    assert target.arrived().came_bytes == source.store.manifest(2).total_bytes
    assert same(source.store, target.store, 2)


def test_what_goes_wrong_as_a_version_begins_to_come_leaves_no_room_taken(hosts: list[Host]) -> None:
    source, target = hosts[:2]
    name, receive = publish(source.store, 1), target.store.receive

    def faulty(found: Manifest) -> Receiving:
        receiving = receive(found)
        shutil.rmtree(target.store.root / VERSIONS_FOLDER)  # the look for a base finds no folder of versions
        return receiving

    target.store.receive = faulty  # type: ignore[method-assign]
    target.fetch(name, source)
    assert "FileNotFoundError" in target.failed().reason and target.store.held_bytes == 0
    target.store.receive = receive  # type: ignore[method-assign]
    (target.store.root / VERSIONS_FOLDER).mkdir()
    target.fetch(name, source)
    target.arrived()
    assert same(source.store, target.store, 1)


class Taking(HostStore):
    """Takes the room of a version only when it may, and nothing else of the store changes meanwhile."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder, model)
        self.began, self.may = threading.Event(), threading.Event()

    def receive(self, manifest: Manifest) -> Receiving:
        with self._changing:
            self.began.set()
            assert self.may.wait(WAIT_S)
            return super().receive(manifest)


def test_an_order_does_not_wait_for_the_room_of_another_version(tmp_path: Path, model: Path) -> None:
    with hosts_of(tmp_path, model, 1) as (source,), ThreadPoolExecutor(1) as caller:
        store = Taking(tmp_path / "taking", model)
        with a_host(store, "taking") as target:
            target.fetch(publish(source.store, 1), source)
            assert store.began.wait(WAIT_S)
            try:
                caller.submit(target.fetch, publish(source.store, 2), source).result(timeout=WAIT_S)
                assert target.relay.find(source.store.name(1)) is None
            finally:
                store.may.set()
            target.arrived(), target.arrived()
            assert all(same(source.store, store, version) for version in (1, 2))


def test_several_versions_at_once(hosts: list[Host]) -> None:
    names = [publish(hosts[0].store, version) for version in (1, 2, 3)]
    for name in names:
        hosts[1].fetch(name, hosts[0])
        hosts[2].fetch(name, hosts[1], hosts[0])
    for host in hosts[1:]:
        assert sorted(host.arrived().name for _ in names) == sorted(names)
        assert host.store.versions() == (0, 1, 2, 3) and all(
            same(hosts[0].store, host.store, each) for each in (1, 2, 3)
        )


def test_an_order_for_what_is_here_is_answered_at_once(hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    hosts[0].fetch(name)
    assert hosts[0].arrived().came_bytes == 0
    hosts[1].fetch(name, hosts[0])
    hosts[1].fetch(name, hosts[0])
    hosts[1].arrived()
    hosts[1].fetch(name, hosts[0])
    assert hosts[1].arrived().name == name


def test_nobody_has_it(tmp_path: Path, model: Path, hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    hosts[1].fetch(name)
    assert hosts[1].failed().reason == "no host is known that has it"
    with a_host(HostStore(tmp_path / "quick", model), "quick", wait_s=0.1) as quick:
        hosts[1].fetch(name, quick)
        assert f"{name} is not here" in hosts[1].failed().reason
    assert hosts[1].store.versions() == (0,)
    hosts[1].fetch(name, quick, hosts[0])  # one that is gone
    hosts[1].arrived()


def test_an_order_moves_who_waits_to_another(hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    hosts[2].fetch(name, hosts[1])  # which never gets it
    hosts[2].fetch(name, hosts[0])
    assert hosts[2].arrived().upstream == "h0"


def test_a_version_that_is_dropped_comes_no_more(hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    hosts[2].fetch(name, hosts[1])
    hosts[2].relay.drop(name)
    assert "retired" in hosts[2].failed().reason
    hosts[1].fetch(name, hosts[0])
    hosts[1].arrived()
    for _ in range(2):
        hosts[1].relay.drop(name)
        assert hosts[1].store.versions() == (0,)
    assert hosts[1].relay.find(name) is None
    hosts[1].fetch(name, hosts[0])
    hosts[1].arrived()


class AskedLate(WeightStore):
    """A follower asks for a version at the last moment before it is retired."""

    ask: Callable[[str], Holding | None]
    late: Holding | None = None

    def retire(self, version: int) -> None:
        self.late = self.ask(self.name(version))
        super().retire(version)


def test_a_version_that_a_follower_asks_for_as_it_is_dropped_is_given_up(tmp_path: Path, model: Path) -> None:
    store = AskedLate(tmp_path / "asked", model)
    with a_host(store, "asked") as host:
        store.ask = host.relay.find
        name = publish(store, 1)
        host.relay.drop(name)
        assert store.late is not None
        with refused(TransferFailed, field="version", value=name):
            store.late.wait(0, 0.0)
        assert host.relay.find(name) is None


def test_a_version_that_is_published_anew_takes_the_place_of_the_first(hosts: list[Host]) -> None:
    hosts[1].fetch(publish(hosts[0].store, 1), hosts[0])
    hosts[1].arrived()
    store = hosts[0].store
    hosts[0].relay.drop(store.name(1))
    again, before = publish_anew(store), hosts[1].store.name(1)
    hosts[1].fetch(again, hosts[0])
    assert f"is here as {before}" in hosts[1].failed().reason  # until it is dropped
    hosts[1].relay.drop(before)
    hosts[1].fetch(again, hosts[0])
    hosts[1].arrived()
    assert hosts[1].store.name(1) == again and same(store, hosts[1].store, 1)


def test_another_run_is_refused(tmp_path: Path, model: Path, hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    with a_host(HostStore(tmp_path / "x", model), "stranger", secret=bytes(32)) as stranger:
        stranger.fetch(name, hosts[0])
        assert "secret" in stranger.failed().reason
        stale = hosts[0].upstream.__class__("h0", 7, hosts[0].relay.address)
        hosts[1].fetch(name, stale)
        assert "epoch" in hosts[1].failed().reason


def test_no_room(tmp_path: Path, model: Path, hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    with a_host(HostStore(tmp_path / "small", model, bound_bytes=1000), "small") as small:
        small.fetch(name, hosts[0])
        assert "limited to 1,000" in small.failed().reason
        assert small.store.held_bytes == 0


def test_another_model_is_refused(tmp_path: Path, hosts: list[Host]) -> None:
    other = make_tiny("moe", tmp_path / "moe")
    name = publish(hosts[0].store, 1)
    with a_host(HostStore(tmp_path / "other", other), "other") as host:
        host.fetch(name, hosts[0])
        assert "lm_head.weight is missing" in host.failed().reason and host.store.versions() == (0,)


@pytest.mark.parametrize("name", ["", "v1", "../v1", "v1-xyz"])
def test_a_name_that_is_none(hosts: list[Host], name: str) -> None:
    for act in (lambda: hosts[0].fetch(name), lambda: hosts[0].relay.drop(name)):
        named: Callable[[], None] = act
        with refused(InvalidValue, field="version's name", value=name):
            named()


def test_an_end_in_the_middle_leaves_nothing(tmp_path: Path, model: Path, hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    store = HostStore(tmp_path / "ends", model)
    with a_host(store, "ends") as ends:
        ends.fetch(name, hosts[1])
    assert ends.failed().name == name
    ends.fetch(name, hosts[0])
    assert ends.failed().reason == "this relay ends"
    assert store.versions() == (0,) and store.held_bytes == 0
    with pytest.raises(NotFound):
        store.folder(1)


def test_who_takes_keeps_a_version_until_it_is_done(hosts: list[Host]) -> None:
    name = publish(hosts[0].store, 1)
    holding = hosts[0].relay.find(name)
    assert holding is not None
    with holding.reader() as reader:
        before = bytes(reader.chunk(0))
        hosts[0].store.retire(1)
        assert bytes(reader.chunk(1)) and bytes(reader.chunk(0)) == before
    hosts[0].store.sweep()
    assert hosts[0].store.held_bytes == 0
    assert WAIT_S


def test_what_was_published_anew_is_not_replaced_by_what_was_there_before(tmp_path: Path, model: Path) -> None:
    with hosts_of(tmp_path, model, 2) as (source, target):
        name = publish(source.store, 1)
        with a_host(WeightStore(tmp_path / "late", model), "late") as late:
            late.fetch(name, target)  # it waits: nobody has given it to the target
            anew = publish_anew(late.store)
            target.fetch(name, source)
            target.arrived()
            assert f"is here as {anew}" in late.failed().reason
            assert late.store.name(1) == anew and late.relay.find(name) is None
            late.relay.drop(anew)
            late.fetch(name, source)
            late.arrived()
            assert same(source.store, late.store, 1)
