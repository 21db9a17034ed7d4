"""Kinds of machines are as fast as their responses show; KV crosses zones where that is faster than its prefill."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora.core import commands as do
from dora.core import events as on
from dora.core.fleet.partition import WorkerCandidate, assign, proportional
from dora.core.fleet.places import Places
from dora.core.forecast.cost import CostModel
from dora.core.policies.throughput import RoutingBoard
from dora.journal.durable import Durable
from tests.service import configured
from tests.unit.test_expected_hosts import DIGEST, Incarnation
from tests.unit.test_link import CAPABILITY
from tests.unit.test_notice import Machines
from tests.unit.test_zones import hello
from tests.unit.views import make_view

COST = CostModel(kv_token_s=1e-7, weights_s=1e-3, request_s=1e-5, step_s=1e-3, prefill_token_s=1e-4)


def ended(places: Places, host: str, scale: float, tokens: int = 1000) -> None:
    """Responses of four requests that took ``scale`` times what the cost model gives."""
    for _ in range(40):
        places.generated(host, tokens, scale * tokens * COST.decode_step_s(4, 5000), 4, 5000)


def test_the_speed_of_a_kind_is_measured_once_there_are_two() -> None:
    places = Places(COST, COST)
    ended(places, "a", 1.5)
    assert places.step_scale("a") == 1.0, "nobody has said what machines there are"
    for host, kind in (("a", "slow"), ("b", "slow"), ("c", "fast")):
        places.describe(on.HostDescribed(host, kind))
    ended(places, "a", 1.5)
    assert places.step_scale("a") == 1.0, "one kind is as fast as the cost model says"
    ended(places, "c", 0.8)
    assert [places.step_scale(host) for host in "abc"] == [1.5, 1.5, 0.8]
    assert places.pace_s("b", 0.0) == pytest.approx(1.5 * COST.decode_step_s(4, 5000))


def test_without_a_cost_model_speeds_are_relative_to_the_mean() -> None:
    places = Places(None, COST)
    for host in "ab":
        places.describe(on.HostDescribed(host, host))
    ended(places, "a", 1.0)
    ended(places, "b", 2.0)
    assert places.step_scale("b") == pytest.approx(2.0 * places.step_scale("a"), rel=0.02)
    assert places.step_scale("a") < 1.0 < places.step_scale("b")


@pytest.mark.parametrize(
    ("kv_token_s", "latency_s", "crosses"),
    [(1e-5, 0.0, (True, True)), (1e-5, 0.05, (False, True)), (1e-3, 0.0, (False, False))],
)
def test_kv_crosses_if_its_copy_is_faster_than_its_prefill(
    kv_token_s: float, latency_s: float, crosses: tuple[bool, bool]
) -> None:
    places = Places(COST, COST)
    places.describe(on.HostDescribed("near"))
    places.describe(on.HostDescribed("far", "", "far", kv_token_s, latency_s))
    assert tuple(places.crosses("near", "far", tokens) for tokens in (100, 1000)) == crosses
    assert places.crosses("near", "near", 1) and places.crosses("", "near", 1)


def zoned(latency_s: float) -> Machines:
    """One request on w0; a worker of its version in another zone, and one beside w0 that has no slot."""
    bench = Machines()
    bench.post(on.HostDescribed("here"))
    bench.post(on.HostDescribed("there", "", "far", 0.0, latency_s))
    bench.beside()
    return bench


@pytest.mark.parametrize("latency_s", [0.0, 1.0])
def test_a_drained_worker_gives_its_request_to_another_zone(latency_s: float) -> None:
    bench = zoned(latency_s)
    bench.report("g0.0", 7)
    bench.post(on.DrainRequested("w0"))
    if latency_s:
        assert not bench.asked() and bench.owner("g0.0") == "w1"
        assert bench.given(do.StartRequest)[-1].arrival == "re-prefilled"
        assert bench.machine.counters.migrations_reprefill == 1
    else:
        assert bench.asked() == [("g0.0", "w1")]


@pytest.mark.parametrize("latency_s", [0.0, 1.0])
def test_a_notice_moves_kv_within_the_zone_first(latency_s: float) -> None:
    bench = zoned(latency_s)
    bench.post(on.HostDescribed("beside"))
    bench.join("w2", 1, "beside")
    bench.load_all()
    bench.notice()
    assert bench.asked() == [("g0.0", "w2")]


def test_a_notice_leaves_kv_that_would_take_longer_than_its_prefill() -> None:
    bench = zoned(1.0)
    bench.pool("pool-there", "there")
    bench.notice()
    assert not bench.asked() and bench.owner("g0.0") == "w0"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 999), st.floats(0.1, 10.0)), min_size=4, max_size=24),
    st.lists(st.floats(0.0, 1e6), min_size=4, max_size=4),
)
def test_a_partition_of_unlike_workers_covers_every_version(
    rows: list[tuple[int, int, float]], work: list[float]
) -> None:
    candidates = [WorkerCandidate(at, loaded, loaded, kv, speed) for at, (loaded, kv, speed) in enumerate(rows)]
    counts = proportional(dict(enumerate(work)), len(candidates), 3)
    chosen = assign(candidates, counts)
    assert set(chosen) == set(range(len(candidates))) and set(chosen.values()) == set(counts)


def test_a_fast_worker_counts_for_as_many_as_it_replaces() -> None:
    candidates = [WorkerCandidate(at, -1, -1, at, capacity) for at, capacity in enumerate((1.0, 1.0, 2.0))]
    assert assign(candidates, {0: 1, 1: 2}) == {0: 0, 1: 1, 2: 1}


def test_a_trajectory_is_routed_to_the_larger_gain() -> None:
    workers = [{"loaded": 0, "step_scale": 2.0}, {"loaded": 0}, {"loaded": 0, "step_scale": 2.0}]
    board = RoutingBoard(make_view(workers, [(0, 0, 500)], cost=COST), {})
    assert board.route(0, [1, 2])
    assert [move.target for move in board.moves()] == [1]


async def test_the_link_between_zones_decides_whether_kv_crosses(tiny_dense: Path, tmp_path: Path) -> None:
    link: dict[str, Any] = {"host__zone_link_bytes_per_s": 1e6, "host__zone_link_latency_s": 0.25}
    service = Incarnation(tmp_path, configured(tiny_dense, workers__engine="fake", **link), Durable())
    service.sessions.open("w0", 1, "h1", replace(CAPABILITY, kv_token_bytes=2000))
    joining = hello("h1", "far")
    joining.capacity.gpus.extend(["H800", "H800"])
    service.hosts.join(joining, DIGEST)
    for _ in range(2):
        service.hosts.look(60.0)
    described = [event for event in service.posted if isinstance(event, on.HostDescribed) and event.host == "h1"]
    assert described == [on.HostDescribed("h1", "H800", "far", 0.002, 0.25)]
    assert [host.kind for host in service.hosts.statuses()][1:] == [""], "the core has not taken the event here"


async def test_a_host_that_comes_back_is_described_again(tiny_dense: Path, tmp_path: Path) -> None:
    """The core forgets a lost host's machine, so its zone would be the service's."""
    service = Incarnation(tmp_path, configured(tiny_dense, workers__engine="fake"), Durable())
    for _ in range(2):
        session = service.hosts.join(hello("h1", "far"), DIGEST)
        service.hosts.look(60.0)
        service.hosts.lose(session, "its machine died")
    told = [event for event in service.posted if getattr(event, "host", "") == "h1"]
    assert [type(event) for event in told] == 2 * [on.HostJoined, on.HostDescribed, on.HostLost]


def test_machines_that_are_alike_cost_policies_nothing() -> None:
    places = Places(COST, COST)
    for host in "ab":
        places.describe(on.HostDescribed(host, "H800"))
    assert not places.are_unlike
    places.describe(on.HostDescribed("c", "H800", "far"))
    assert places.are_unlike
    places.forget("c")
    assert not places.are_unlike
