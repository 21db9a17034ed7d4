"""Hosts of an earlier life of the service: who of them comes back with what it has, and who does not."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dora.config import Config
from dora.core import events as on
from dora.core.state import State
from dora.errors import Conflict
from dora.host.launcher import LOCAL
from dora.journal import records
from dora.journal.durable import Durable
from dora.orchestrator.hosts.hosts import Hosts
from dora.orchestrator.hosts.remote import HostSession
from dora.orchestrator.rollout.streams import MemberSessions
from dora.release import __version__
from dora.rpc import dora_pb2 as pb
from dora.rpc.roles import ServiceTokens
from dora.weights.host_store import HostStore
from tests.proofs import caller_of
from tests.refusals import refused
from tests.service import configured

DIGEST = "digest"


class Empty:
    """The launcher of the service's own host, which has no workers."""

    workers = ()

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Incarnation:
    """One life of a service, as far as its hosts are concerned; the durable state is what the next one finds."""

    def __init__(self, folder: Path, config: Config, durable: Durable) -> None:
        self.tokens, self.durable, self.posted = ServiceTokens(), durable, list[on.Event]()
        store = HostStore(folder / "store", Path(config.model))
        self.sessions = MemberSessions(lambda session, reason: None)
        self.hosts = Hosts(config, store, self.sessions, State(config), self.posted.append, self.note)
        self.awaited = self.hosts.expect(durable.hosts, durable.host_epoch, self.tokens)
        self.hosts.begin(Empty(), folder, self.tokens)  # type: ignore[arg-type]

    def note(self, record: records.LogRecord) -> None:
        self.durable.apply(record)

    def join(self, workers: int = 2, kept: pb.KeptHost | None = None, free_bytes: int = 1 << 40) -> HostSession:
        hello = pb.HostHello(name="h1", dora_version=__version__, workers=workers, kept=kept)
        hello.capacity.store_free_bytes = free_bytes
        session = self.hosts.join(hello, DIGEST)
        self.welcome = self.hosts.welcome(session, DIGEST, 300.0)
        self.hosts.welcomed(session, workers)
        return session

    def good(self, *names: str) -> list[str]:
        """Returns those whose tokens of the first incarnation are valid for their names."""
        return [name for name in names if caller_of(self.tokens, FIRST[name], name) is not None]


FIRST: dict[str, str] = {}  # tokens that the first life gave


def orders(session: HostSession) -> list[pb.HostOrder]:
    """All that are queued."""
    found = []
    while not session._outbox.empty():
        order = session._outbox.get_nowait()
        assert order is not None
        found.append(order)
    return found


@pytest.fixture
def incarnations(tiny_dense: Path, tmp_path: Path) -> Callable[[], Incarnation]:
    """Makes the first life, in which h1 joins with two workers and a pool, then those that follow it."""
    durable = Durable()
    config = configured(tiny_dense, workers__engine="fake", kv__pool_mb=64)
    return lambda: Incarnation(tmp_path, config, durable)


def begin(incarnations: Callable[[], Incarnation]) -> tuple[Incarnation, HostSession]:
    first = incarnations()
    assert not first.awaited
    session = first.join()
    FIRST.update({each.start_worker.worker_id: each.start_worker.token for each in orders(session)})
    FIRST["h1-pool-0"] = first.welcome.pool_token
    assert sorted(FIRST) == ["h1-pool-0", "h1-w0", "h1-w1"] and not first.welcome.goes_on
    return first, session


KEPT = pb.KeptHost(epoch=1, worker_ids=["h1-w0", "h1-w1"])


async def test_an_agent_with_the_processes_of_the_epoch_that_stood_goes_on(
    incarnations: Callable[[], Incarnation],
) -> None:
    begin(incarnations)
    second = incarnations()
    assert second.awaited == set(FIRST), "they are in the roll call"
    assert second.good(*FIRST) == list(FIRST) and second.hosts.host_of("h1-w1") == "h1"
    assert second.hosts.stood() == (on.HostJoined("h1", (0,)),)
    session = second.join(workers=7, kept=KEPT, free_bytes=0)  # what it holds has its room already
    assert second.welcome.goes_on and second.welcome.epoch == 2 and not second.welcome.pool_token
    assert second.welcome.orphan_timeout_s == 300.0
    assert not orders(session), "it has all that it is to have"
    assert second.hosts.host_of("h1-w0") == "h1" and second.good(*FIRST) == list(FIRST)
    third = incarnations()
    assert third.good(*FIRST) == list(FIRST)
    third.join(kept=KEPT)
    assert not third.welcome.goes_on, "that epoch was over as the second life began another"
    assert not third.good(*FIRST)


async def test_a_host_that_was_lost_may_not_come_back_with_what_it_has(incarnations: Callable[[], Incarnation]) -> None:
    first, session = begin(incarnations)
    first.hosts.lose(session, "silent for 60 s")
    second = incarnations()
    assert not second.awaited and not second.good(*FIRST) and not second.hosts.stood()
    session = second.join(kept=KEPT)
    assert not second.welcome.goes_on and second.welcome.epoch == 2
    assert [each.start_worker.worker_id for each in orders(session)] == ["h1-w0", "h1-w1"], "new ones, with new tokens"


async def test_an_end_that_keeps_the_state_is_no_loss(incarnations: Callable[[], Incarnation]) -> None:
    first, session = begin(incarnations)
    first.hosts.suspend()
    first.hosts.lose(session, "its agent's connection broke")
    second = incarnations()
    second.join(kept=KEPT)
    assert second.welcome.goes_on


async def test_one_that_comes_without_its_processes_begins_anew(incarnations: Callable[[], Incarnation]) -> None:
    begin(incarnations)
    second = incarnations()
    second.join()
    assert not second.welcome.goes_on and second.welcome.epoch == 2
    assert not second.good(*FIRST), "those of before are let in no more"
    with refused(Conflict, field="name", value="h1"):
        second.join(kept=KEPT)


async def test_one_that_does_not_come_is_lost_in_the_end(incarnations: Callable[[], Incarnation]) -> None:
    begin(incarnations)
    second = incarnations()
    second.hosts.look(1e9)  # from now on agents are let in
    second.hosts.look(1e9)
    (_, awaited) = second.hosts.statuses()
    assert (awaited.name, awaited.state, awaited.workers) == ("h1", "expected", 2)
    assert second.good("h1-w0") == ["h1-w0"]
    second.hosts.look(0.0)
    assert not second.good(*FIRST) and on.HostLost("h1") in second.posted
    (local, lost) = second.hosts.statuses()
    assert (local.name, lost.name, lost.state, lost.epoch) == (LOCAL, "h1", "lost", 1)
    assert "has not returned" in lost.reason
    second.join(kept=KEPT)
    assert not second.welcome.goes_on
    assert not incarnations().good(*FIRST)


async def test_orders_that_did_not_reach_the_agent_are_given_again(incarnations: Callable[[], Incarnation]) -> None:
    """One worker was to start and one to stop as the service died; two were found out to be bad before it came back."""
    first, session = begin(incarnations)
    first.hosts.worker_counts.scale(3, "h1")
    first.hosts._hosts["h1"].launcher.stop("h1-w0")
    second = incarnations()
    assert "h1-w2" in second.awaited and not second.good("h1-w0")
    second.hosts.kill("h1-w1")
    second.hosts.kill("h1-pool-0")
    assert not second.good("h1-w1", "h1-pool-0")
    session = second.join(kept=KEPT)
    found = orders(session)
    assert [each.start_worker.worker_id for each in found if each.HasField("start_worker")] == ["h1-w2"]
    stops = {each.stop_worker.worker_id: each.stop_worker for each in found if each.HasField("stop_worker")}
    assert {name: stop.again for name, stop in stops.items()} == {"h1-w0": False, "h1-w1": True, "h1-pool-0": True}
    assert all(caller_of(second.tokens, stops[name].token, name) for name in ("h1-w1", "h1-pool-0"))


async def test_a_worker_that_is_replaced_has_another_token(incarnations: Callable[[], Incarnation]) -> None:
    """The process of before may live on where the order to kill it is lost: nobody lets it in."""
    first, session = begin(incarnations)
    first.hosts.kill("h1-w1")
    (order,) = orders(session)
    assert order.stop_worker.again and caller_of(first.tokens, order.stop_worker.token, "h1-w1") is not None
    assert not first.good("h1-w1") and first.good("h1-w0")
    assert not incarnations().good("h1-w1")


async def test_a_host_with_a_pool_is_not_awaited_where_there_are_none_any_more(
    incarnations: Callable[[], Incarnation], tiny_dense: Path, tmp_path: Path
) -> None:
    first, _ = begin(incarnations)
    config = configured(tiny_dense, workers__engine="fake", kv__pool_mb=0)
    second = Incarnation(tmp_path, config, first.durable)
    assert not second.awaited and not second.good(*FIRST)
    assert first.durable.hosts == {} and first.durable.host_epoch == 1
