"""Versions that are on their way to a host: its workers load them once they are there, and nobody waits for them."""

import numpy as np

from dora.config import validated
from dora.core import Machine
from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.arrival import is_within_reach
from tests.unit.test_machine import Bench
from tests.unit.test_rejection import Publications


class TwoHosts(Publications):
    """Window 1: both workers are to load version 1. ``near`` shares the service's store, ``far`` has one of its own."""

    def start(self, *names: str) -> None:
        self.post(on.HostJoined("there", (0,)))
        self.join("far", host="there")
        super().start("near")


def test_a_worker_loads_a_version_once_it_has_arrived_at_its_host() -> None:
    bench = TwoHosts(window=1)
    assert [load.worker_id for load in bench.loads(1)] == ["near"]
    bench.load_all()
    far = bench.state.workers["far"]
    assert far.target == 1 and far.loading == -1 and not is_within_reach(bench.state, far)
    assert not bench.loads(1), "it waits, and no time limit of a load runs"
    (load,) = [each for each in bench.post(on.VersionArrived("there", 1)) if isinstance(each, do.LoadVersion)]
    assert (load.worker_id, load.version) == ("far", 1)
    bench.load_all()
    assert far.hosts == 1
    assert bench.state.arrived == {"there": {1}}, "version 0 has retired"


def test_what_comes_late_or_from_a_host_that_is_not_there_is_no_news() -> None:
    bench = TwoHosts(window=1)
    bench.post(on.VersionArrived("elsewhere", 1))
    bench.load_all()
    bench.post(on.VersionArrived("there", 0))
    assert 0 not in bench.state.arrived["there"]
    assert not bench.loads(1) and bench.state.workers["far"].hosts == -1


def test_a_version_that_is_published_anew_has_to_arrive_anew() -> None:
    bench = TwoHosts(window=1)
    bench.post(on.VersionArrived("there", 1))
    bench.reject(1)
    bench.post(on.VersionRepublished(1, 1))
    assert {load.worker_id for load in bench.loads(1)} == {"near"}
    bench.post(on.VersionArrived("there", 1))
    bench.load_all()
    assert {worker.hosts for worker in bench.state.workers.values()} == {1}


def test_a_host_that_comes_back_has_what_it_says() -> None:
    bench = TwoHosts(window=1)
    bench.post(on.VersionArrived("there", 1))
    bench.load_all()
    bench.post(on.HostLost("there"))
    bench.post(on.WorkerLost("far", bench.state.workers["far"].epoch, "its host is gone"))
    assert bench.state.arrived == {}
    bench.post(on.HostJoined("there", (0,)))
    bench.join("far", host="there")
    assert not bench.loads(1)
    bench.post(on.VersionArrived("there", 1))
    assert [load.worker_id for load in bench.loads(1)] == ["far"]


def test_what_a_worker_does_not_find_on_its_host_has_to_arrive_there_again() -> None:
    bench = TwoHosts(window=1)
    bench.post(on.VersionArrived("there", 1))
    near, far = sorted(bench.loads(1), key=lambda load: load.worker_id, reverse=True)
    bench.answer(far, ok=False, error="not there", error_kind="missing")
    assert [load.worker_id for load in bench.loads(1)] == ["near"]
    bench.answer(near, ok=False, error="not there", error_kind="missing")
    bench.post(on.Tick())
    assert not bench.loads(1) and not bench.state.suspects and not bench.given(do.EvictWorker)
    bench.post(on.VersionArrived("elsewhere", 1))
    assert not bench.loads(1)
    bench.post(on.VersionArrived("", 1))
    assert [load.worker_id for load in bench.loads(1)] == ["near"]
    bench.post(on.VersionArrived("there", 1))
    bench.load_all()
    assert {worker.hosts for worker in bench.state.workers.values()} == {1}


def test_a_worker_that_does_not_find_the_model_is_replaced() -> None:
    bench = Bench()
    bench.join("w0")
    for _ in range(3):
        bench.answer(bench.given(do.LoadVersion)[-1], ok=False, error="not there", error_kind="missing")
    assert [evict.worker_id for evict in bench.given(do.EvictWorker)] == ["w0"] and not bench.state.missing


def test_a_worker_that_never_finds_a_version_which_is_there_is_replaced() -> None:
    bench = TwoHosts(window=1)
    for _ in range(3):
        (load,) = bench.loads(1)
        bench.answer(load, ok=False, error="not there", error_kind="missing")
        bench.post(on.VersionArrived("", 1))
    assert [evict.worker_id for evict in bench.given(do.EvictWorker)] == ["near"]


def test_after_a_restart_a_host_whose_agent_is_not_back_yet_loads_nothing_but_the_model() -> None:
    """The content of its store is unknown; a worker of it that is told to load a version might not find it."""
    config = validated({"window": {"size": 2}})
    none = np.zeros(0, np.int32)
    requests = on.RestoredRequests(none, none, none.astype(np.uint8))
    workers = tuple(
        on.WorkerJoined(name, at, 8, 4096, host) for at, (name, host) in [(1, ("w0", "")), (2, ("w1", "h"))]
    )
    event = on.Restored(1, 1, 2, 2, 2, 0, 1, 0, 0, (), requests, hosts=(on.HostJoined("h", (0,)),), workers=workers)
    machine = Machine(config)
    loads = [each for each in machine.handle(event, 1.0) if isinstance(each, do.LoadVersion)]
    assert [(load.worker_id, load.version) for load in loads] == [("w0", 1)]
    machine.handle(on.HostJoined("h", (0,)), 2.0)
    loads = [each for each in machine.handle(on.VersionArrived("h", 1), 2.0) if isinstance(each, do.LoadVersion)]
    assert [(load.worker_id, load.version) for load in loads] == [("w1", 1)]
