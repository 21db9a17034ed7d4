"""The service's own host finds versions that are missing or no longer as published."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest

from dora.host.launcher import LOCAL
from dora.models.tiny import make_tiny
from dora.orchestrator.hosts import weight_distributor
from dora.orchestrator.hosts.weight_distributor import WeightDistributor
from dora.rpc import dora_pb2 as pb
from dora.weights.host_store import MANIFEST_FILE
from dora.weights.store import WeightStore
from tests.contract.relays import FILE, Host, a_host, publish

COMPLAINING = ("h1", "h2")


class Told:
    """The messages of a spread. ``orders``: to other hosts, by host."""

    def __init__(self) -> None:
        self.ready: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.lost: asyncio.Queue[int] = asyncio.Queue()
        self.orders: asyncio.Queue[tuple[str, pb.HostOrder]] = asyncio.Queue()

    def made(self, store: WeightStore) -> WeightDistributor:
        return WeightDistributor(
            store,
            lambda host, version: self.ready.put_nowait((host, version)),
            lambda version, _reason: self.lost.put_nowait(version),
            lambda host, _epoch, order: self.orders.put_nowait((host, order)),
        )


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "own", make_tiny("dense", tmp_path / "model"))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(weight_distributor, "REMIND_S", 0.0)
    return Told()


@pytest.fixture
async def own(store: WeightStore, told: Told) -> AsyncIterator[WeightDistributor]:
    """With version 1 published, and two hosts that lack it."""
    made = told.made(store)
    made.begin("127.0.0.1")
    for host in COMPLAINING:
        made.joined(host, 1, f"{host}:1", [])
    publish(store, 1)
    made.published(1, anew=False)
    assert await told.ready.get() == (LOCAL, 1)
    yield made
    await asyncio.to_thread(made.close)


def complain(own: WeightDistributor) -> None:
    """Both say that they got wrong bytes from here, and nobody else has the version."""
    for host in COMPLAINING:
        own.failed(host, 1, pb.VersionFailed(name=own.name_of(1), reason="wrong bytes", culprits=[LOCAL]))


@contextmanager
def another(own: WeightDistributor, store: WeightStore, folder: Path) -> Iterator[Host]:
    """One more host, which has version 1 whole."""
    other = WeightStore(folder / "h3", store.reference.folder)
    publish(other, 1)
    with a_host(other, "h3", secret=own.secret) as host:
        own.joined("h3", 1, host.relay.address, [other.name(1)])
        yield host


async def test_what_is_missing_here_and_nowhere_else_to_be_had_is_lost(
    own: WeightDistributor, store: WeightStore, told: Told
) -> None:
    rmtree(store.folder(1))
    own.remind()
    assert await told.lost.get() == 1
    own.remind()
    assert told.lost.empty()
    publish(store, 1)
    own.published(1, anew=True)
    assert await told.ready.get() == (LOCAL, 1)


async def test_what_is_missing_here_comes_back_from_a_host_that_has_it(
    own: WeightDistributor, store: WeightStore, told: Told, tmp_path: Path
) -> None:
    with another(own, store, tmp_path):
        assert await told.ready.get() == ("h3", 1)
        rmtree(store.folder(1))
        own.remind()
        assert await told.ready.get() == (LOCAL, 1)
    assert store.is_sound(1) and told.lost.empty()


async def test_what_is_damaged_here_is_found_where_hosts_complain(
    own: WeightDistributor, store: WeightStore, told: Told
) -> None:
    with (store.folder(1) / FILE).open("r+b") as damaged:
        damaged.seek(-4, 2)
        damaged.write(b"\xff\xff\xff\x7f")
    complain(own)
    assert await told.lost.get() == 1
    assert 1 not in store.versions(), "nobody is to load it"


async def test_wrong_complaints_of_what_is_sound_lose_nothing(
    own: WeightDistributor, store: WeightStore, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, is_sound, looked = asyncio.get_running_loop(), store.is_sound, asyncio.Event()

    def look(version: int) -> bool:
        loop.call_soon_threadsafe(looked.set)
        return is_sound(version)

    monkeypatch.setattr(store, "is_sound", look)
    complain(own)
    await looked.wait()
    while not told.orders.empty():
        told.orders.get_nowait()
    own.remind()
    asked = {told.orders.get_nowait()[0] for _ in COMPLAINING}
    assert asked == set(COMPLAINING), "they try again"
    assert is_sound(1) and told.lost.empty()


async def test_a_folder_that_is_gone_as_a_whole_is_a_fault_of_the_storage(
    own: WeightDistributor, store: WeightStore, told: Told
) -> None:
    """A fault that may pass: no version is given up for it."""
    aside = store.root.with_name("aside")
    store.root.rename(aside)
    own.missed_here(1)  # a worker has not found it
    own.remind()
    assert told.lost.empty() and told.ready.empty()
    aside.rename(store.root)
    own.remind()
    assert await told.ready.get() == (LOCAL, 1)
    assert store.is_sound(1) and told.lost.empty()
    own.remind()
    assert told.ready.empty()


async def test_what_was_lost_and_is_here_again_may_be_loaded(
    own: WeightDistributor, store: WeightStore, told: Told, tmp_path: Path
) -> None:
    folder = store.folder(1)
    folder.rename(tmp_path / "aside")
    own.remind()
    assert await told.lost.get() == 1
    (tmp_path / "aside").rename(folder)
    own.remind()
    assert await told.ready.get() == (LOCAL, 1)
    assert {(await told.orders.get())[0] for _ in COMPLAINING} == set(COMPLAINING)


async def test_a_host_that_misses_a_version_is_to_fetch_it(own: WeightDistributor, told: Told) -> None:
    own.arrived("h1", 1, pb.VersionArrived(name=own.name_of(1)))
    assert await told.ready.get() == ("h1", 1)
    while not told.orders.empty():
        told.orders.get_nowait()
    own.missed("h1", 1, 1)
    orders = [told.orders.get_nowait() for _ in range(told.orders.qsize())]
    assert [order.WhichOneof("kind") for host, order in orders if host == "h1"] == ["drop_version", "fetch_version"]
    own.missed("h1", 1, 7)
    assert told.orders.empty(), "no such version is live"


async def test_nobody_hears_of_a_version_while_it_is_published_anew(
    own: WeightDistributor, store: WeightStore, told: Told
) -> None:
    """Its bytes are here by then, and it is not published yet: it may be given up."""
    name = own.name_of(1)
    rmtree(store.folder(1))
    own.remind()
    assert await told.lost.get() == 1
    with own.publishing(1):
        own.joined("h3", 1, "h3:1", [name])
        publish(store, 1)
        own.remind()
        assert told.ready.empty()
    assert {told.ready.get_nowait() for _ in range(told.ready.qsize())} == {(LOCAL, 1), ("h3", 1)}


async def test_what_fails_to_be_published_anew_leaves_what_others_have(
    own: WeightDistributor, store: WeightStore, told: Told
) -> None:
    name = own.name_of(1)
    rmtree(store.folder(1))
    own.remind()
    with pytest.raises(ZeroDivisionError), own.publishing(1):
        own.joined("h3", 1, "h3:1", [name])
        raise ZeroDivisionError
    assert {told.ready.get_nowait() for _ in range(told.ready.qsize())} == {("h3", 1)}


@pytest.mark.parametrize("how", ["vanished", "cut", "manifest"])
async def test_what_a_worker_could_not_load_is_read_and_missing_where_it_is_not_what_was_published(
    own: WeightDistributor, store: WeightStore, told: Told, how: str
) -> None:
    assert not await own.is_damaged(1) and not await own.is_damaged(7)
    own.missed_here(1)
    assert told.lost.empty() and await told.ready.get() == (LOCAL, 1)
    file = store.folder(1) / (MANIFEST_FILE if how == "manifest" else FILE)
    if how == "vanished":
        file.unlink()
    else:
        os.truncate(file, 100)
    own.remind()
    assert told.lost.empty(), "a look at its name finds nothing"
    assert await asyncio.gather(own.is_damaged(1), own.is_damaged(1)) == [True, True]
    own.missed_here(1)
    assert await told.lost.get() == 1 and 1 not in store.versions()
    publish(store, 1)
    own.published(1, anew=True)
    assert await told.ready.get() == (LOCAL, 1) and not await own.is_damaged(1)
    own.remind()
    assert told.lost.empty()


async def test_a_check_that_a_publication_overtakes_says_nothing_of_what_came(
    own: WeightDistributor, store: WeightStore, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, is_sound = threading.Event(), store.is_sound

    def read(version: int) -> bool:
        found = is_sound(version)
        assert gate.wait(30)
        return found

    monkeypatch.setattr(store, "is_sound", read)
    (store.folder(1) / FILE).unlink()
    check = asyncio.create_task(own.is_damaged(1))
    await asyncio.to_thread(lambda: None)
    publish(store, 1)
    own.published(1, anew=True)
    gate.set()
    assert await check
    own.missed_here(1)
    assert told.lost.empty() and 1 in store.versions()


async def test_a_whole_store_that_cannot_be_read_is_not_damaged(own: WeightDistributor, store: WeightStore) -> None:
    aside = store.root.with_name("aside")
    store.root.rename(aside)
    assert not await own.is_damaged(1)
    aside.rename(store.root)


async def test_who_else_has_a_version(own: WeightDistributor) -> None:
    assert own.has_elsewhere("h1", 1) and not own.has_elsewhere(LOCAL, 1) and not own.has_elsewhere("h1", 7)
