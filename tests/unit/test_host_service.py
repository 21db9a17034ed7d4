"""Hosts that come while the service is starting: they wait until it knows what is live, and keep what is."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dora.data.types import EngineCapability
from dora.host.processes import Processes
from dora.orchestrator.assembly import services_of
from dora.release import __version__
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import SESSION, ServiceTokens
from tests.contract.relays import publish
from tests.unit.test_runtime import Shell


@pytest.fixture
async def shell(tmp_path: Path, tiny_dense: Path) -> AsyncIterator[Shell]:
    made = Shell(tmp_path, tiny_dense, None)
    yield made
    await asyncio.to_thread(made.runtime.hosts.close_relay)
    await made.runtime.close()


async def test_a_host_that_comes_early_waits_and_keeps_what_is_live(shell: Shell, tmp_path: Path) -> None:
    """Version 1 is kept for trainers to refer to, and in no window any more: no host is to have it."""
    names = [publish(shell.store, version) for version in (1, 2, 3)]

    async def said() -> AsyncIterator[pb.HostMessage]:
        capacity = pb.HostCapacity(store_free_bytes=1 << 40)
        yield pb.HostMessage(hello=pb.HostHello(name="h1", dora_version=__version__, capacity=capacity))
        yield pb.HostMessage(ready=pb.HostReady(relay_address="127.0.0.1:1", held=names[:2]))
        await asyncio.Event().wait()

    SESSION.set(bytes(32))
    orders = services_of(shell.runtime, shell.model, tmp_path / "kv", ServiceTokens("")).hosts.Join(said(), None)
    first = asyncio.create_task(anext(orders))
    await asyncio.sleep(0)
    assert not first.done()
    hosts = shell.runtime.hosts
    launcher = Processes(shell.runtime.config.workers, lambda _: [], lambda _: {}, tmp_path)  # which starts none
    hosts.begin(launcher, tmp_path, ServiceTokens(""))
    hosts.open_relay("127.0.0.1", oldest=2)
    assert (await first).HasField("welcome")
    told = [await anext(orders), await anext(orders)]
    assert [order.drop_version.name or order.fetch_version.name for order in told] == [names[0], names[2]]
    assert [order.WhichOneof("kind") for order in told] == ["drop_version", "fetch_version"]
    assert shell.state.arrived["h1"] == {0, 2}
    await orders.aclose()


async def test_an_examination_waits_for_the_relay_of_a_host_that_has_just_joined(shell: Shell, tmp_path: Path) -> None:
    listens = asyncio.Event()

    async def said() -> AsyncIterator[pb.HostMessage]:
        capacity = pb.HostCapacity(store_free_bytes=1 << 40)
        yield pb.HostMessage(hello=pb.HostHello(name="h1", dora_version=__version__, capacity=capacity))
        await listens.wait()
        yield pb.HostMessage(ready=pb.HostReady(relay_address="127.0.0.1:1"))
        await asyncio.Event().wait()

    SESSION.set(bytes(32))
    hosts = shell.runtime.hosts
    hosts.begin(
        Processes(shell.runtime.config.workers, lambda _: [], lambda _: {}, tmp_path), tmp_path, ServiceTokens("")
    )
    hosts.open_relay("127.0.0.1")
    orders = services_of(shell.runtime, shell.model, tmp_path / "kv", ServiceTokens("")).hosts.Join(said(), None)
    assert (await anext(orders)).HasField("welcome")
    assert [each.host for each in await hosts.relays(0.01)] == ["local"], "its wait is bounded"
    relays = asyncio.create_task(hosts.relays(60.0))
    await asyncio.sleep(0)
    assert not relays.done()
    listens.set()
    assert {each.host for each in await relays} == {"local", "h1"}
    await orders.aclose()


async def test_an_agent_that_reports_and_obeys_nothing_is_lost(shell: Shell, tmp_path: Path) -> None:
    async def said() -> AsyncIterator[pb.HostMessage]:
        capacity = pb.HostCapacity(store_free_bytes=1 << 40)
        yield pb.HostMessage(hello=pb.HostHello(name="h1", dora_version=__version__, capacity=capacity, workers=2))
        await asyncio.Event().wait()

    SESSION.set(bytes(32))
    hosts = shell.runtime.hosts
    hosts.begin(
        Processes(shell.runtime.config.workers, lambda _: [], lambda _: {}, tmp_path), tmp_path, ServiceTokens("")
    )
    hosts.open_relay("127.0.0.1")
    orders = services_of(shell.runtime, shell.model, tmp_path / "kv", ServiceTokens("")).hosts.Join(said(), None)
    kinds = [(await anext(orders)).WhichOneof("kind") for _ in range(3)]
    assert kinds == ["welcome", "start_worker", "start_worker"]
    session = hosts._hosts["h1"].session
    assert session is not None
    limit_s = shell.runtime.config.workers.start_timeout_s

    def later() -> None:
        hosts.look(60.0)
        session.absent_s = {name: since_s - limit_s - 1.0 for name, since_s in session.absent_s.items()}
        hosts.look(60.0)

    session.troubles = {"h1-w1": "it died, and is started again"}
    later()
    again = await anext(orders)
    assert (again.stop_worker.worker_id, again.stop_worker.again) == ("h1-w0", True)
    assert session.absent_s.keys() == {"h1-w0"} and hosts.has("h1")
    hosts.look(60.0)
    assert hosts.has("h1"), "its second time has just begun"
    later()
    assert not hosts.has("h1")
    shown = next(each for each in hosts.statuses() if each.name == "h1")
    assert shown.state == "lost" and "h1-w0" in shown.reason
    await orders.aclose()


async def test_a_host_is_lost_once_nothing_of_it_is_heard(shell: Shell, tmp_path: Path) -> None:
    """A worker that is heard keeps a host whose agent is silent, as it does not tell of its machine's end."""

    async def said() -> AsyncIterator[pb.HostMessage]:
        capacity = pb.HostCapacity(store_free_bytes=1 << 40)
        yield pb.HostMessage(hello=pb.HostHello(name="h1", dora_version=__version__, capacity=capacity, workers=1))
        await asyncio.Event().wait()

    SESSION.set(bytes(32))
    hosts, lease_s = shell.runtime.hosts, shell.runtime.config.host.lease_s
    hosts.begin(
        Processes(shell.runtime.config.workers, lambda _: [], lambda _: {}, tmp_path), tmp_path, ServiceTokens("")
    )
    hosts.open_relay("127.0.0.1")
    orders = services_of(shell.runtime, shell.model, tmp_path / "kv", ServiceTokens("")).hosts.Join(said(), None)
    await anext(orders)
    await anext(orders)
    agent = hosts._hosts["h1"].session
    assert agent is not None
    capability = EngineCapability("f" * 64, 4, 4096, 32, 2048, 64, "float32")
    worker = shell.runtime.sessions.open("h1-w0", 1, "h1", capability)
    agent.heard_s -= lease_s + 0.1
    hosts.look(60.0)
    assert hosts.has("h1"), "its worker is heard"
    worker.heard_s -= lease_s + 0.1
    hosts.look(60.0)
    shown = next(each for each in hosts.statuses() if each.name == "h1")
    assert shown.state == "lost" and shown.reason == f"lease lost: silent for {lease_s:g} s"
    await orders.aclose()
