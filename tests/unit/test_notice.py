"""Hosts that leave by a deadline: their KV goes to workers of its version, then to pools; the rest is lost."""

from typing import Any

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core.rules.notice import is_emptied
from dora.errors import InvalidValue
from tests.refusals import refused
from tests.unit.test_machine import Bench

FAR_S = 25.0  # a deadline that is not near yet


class Machines(Bench):
    """``here`` has worker w0 with requests g0.0, g1.0, ...; ``there`` has what a test adds."""

    def __init__(self, requests: int = 1, slots: int = 8, **balance: Any) -> None:
        super().__init__(**balance)
        self.join("w0", slots, "here")
        self.load_all()
        self.post(on.TrainerAttached(1, max(2, requests)))
        self.offer(requests)
        self.obey(do.StartRequest)

    def beside(self, name: str = "w1", slots: int = 8) -> None:
        self.join(name, slots, "there")
        self.load_all()

    def pool(self, name: str, host: str, kv_tokens: int = 1000) -> None:
        self.post(on.PoolJoined(name, 1, kv_tokens, host))

    def notice(self, within_s: float = 5.0, host: str = "here") -> list[do.Command]:
        return self.post(on.HostNoticed(host, within_s, "preempted by notice"))

    def asked(self) -> list[tuple[str, str]]:
        """The requests that were to move, with their targets, in order."""
        return [(command.request_id, command.worker_id) for command in self.given(do.ReserveSlot)]

    def carry_through(self, kind: type[do.CopyOut]) -> None:
        self.obey(do.ReserveSlot)
        for command in [each.command for each in self.state.pending.values() if type(each.command) is kind]:
            self.answer(command, locator=f"{command.command_id}", tokens=7)
        self.obey(do.CopyIn)
        self.obey(do.RemoveRequest)

    def parked_in(self, request_id: str) -> str:
        pool = self.state.pool_of(self.state.request_row[request_id])
        return pool.pool_id if pool is not None else ""


def test_requests_leave_to_a_worker_of_their_version_and_the_host_is_empty() -> None:
    bench = Machines(2)
    bench.beside()
    bench.notice()
    assert bench.asked() == [("g0.0", "w1"), ("g1.0", "w1")]
    assert not is_emptied(bench.state, "here")
    bench.carry_through(do.CopyOut)
    assert bench.owner("g0.0") == bench.owner("g1.0") == "w1"
    assert [stop.worker_id for stop in bench.given(do.StopWorker)] == ["w0"]
    bench.post(on.WorkerLost("w0", 1, "drained"))
    assert is_emptied(bench.state, "here") and bench.machine.counters.migrations_reprefill == 0
    assert bench.machine.counters.hosts_noticed == 1 and bench.machine.counters.workers_lost == 0


def test_the_longest_context_goes_first_and_a_response_that_ends_in_time_last() -> None:
    bench = Machines(3, moves_at_once=1, predictor="statistics")
    for request_id, tokens in (("g0.0", 5), ("g1.0", 20), ("g2.0", 12)):
        bench.report(request_id, tokens)
    bench.beside()
    bench.state.rates.pace_s = 0.1
    rows = bench.state.request_row
    bench.state.requests["expected"][rows["g1.0"]] = 21  # the longest ends within the notice
    for name in ("g0.0", "g2.0"):
        bench.state.requests["expected"][rows[name]] = 1000
    bench.notice()
    for _ in range(3):
        bench.carry_through(do.CopyOut)
    assert [name for name, _ in bench.asked()] == ["g2.0", "g0.0", "g1.0"]


def test_a_running_request_without_a_slot_elsewhere_is_parked_once_the_deadline_is_near() -> None:
    bench = Machines()
    bench.pool("pool-here", "here")
    bench.pool("pool-there", "there")
    bench.notice(FAR_S)
    assert not bench.asked(), "it decodes on"
    bench.now_s += FAR_S - 5.0
    bench.post(on.Tick())
    assert bench.asked() == [("g0.0", "pool-there")]
    bench.carry_through(do.Park)
    assert bench.parked_in("g0.0") == "pool-there"


def test_what_does_not_leave_is_lost_with_the_host_and_resumes_elsewhere() -> None:
    bench = Machines()
    bench.report("g0.0", 7)
    bench.notice()
    bench.join("w9", host="here")
    assert bench.state.workers["w9"].draining, "a worker that comes late drains, too"
    bench.post(on.WorkerLost("w0", 1, "its host is lost"))
    bench.post(on.WorkerLost("w9", 2, "its host is lost"))
    bench.post(on.HostLost("here"))
    assert not bench.state.notices
    bench.beside()
    (start,) = [each for each in bench.given(do.StartRequest) if each.worker_id == "w1"]
    assert (start.request_id, start.arrival) == ("g0.0", "re-prefilled")
    bench.join("w0", host="here")
    assert not bench.state.workers["w0"].draining, "the machine has come again"


def test_of_two_notices_the_earlier_deadline_counts() -> None:
    bench = Machines()
    for within_s in (30.0, 10.0, 60.0):
        bench.notice(within_s)
    assert bench.state.notices["here"].deadline_s == pytest.approx(bench.now_s - 0.01 + 10.0)
    assert bench.machine.counters.hosts_noticed == 1
    for within_s in (0.0, -1.0, float("inf"), float("nan")):
        with refused(InvalidValue, field="within_s"):
            bench.notice(within_s)


class Parked(Machines):
    """g0.0 lies in the pool of ``here``, which no worker can resume; the pool of ``there`` has room."""

    def __init__(self, **balance: Any) -> None:
        super().__init__(**balance)
        self.report("g0.0", 7)
        self.pool("pool-here", "here")
        self.post(on.MigrationRequested("g0.0", "pool-here"))
        self.obey(do.ReserveSlot)
        (park,) = self.given(do.Park)
        self.answer(park, locator="snapshot", tokens=7)
        self.answer(self.given(do.CopyIn)[-1])
        self.post(on.WorkerLost("w0", 1, "killed"))
        assert self.parked_in("g0.0") == "pool-here" and not self.state.handoffs
        self.pool("pool-there", "there")
        self.notice()
        assert self.asked()[-1] == ("g0.0", "pool-there")

    def resumed_as(self) -> str:
        """How a worker that comes gets the request: with its KV from a pool, or by computing it again."""
        self.beside()
        if starts := [each for each in self.given(do.StartRequest) if each.worker_id == "w1"]:
            return str(starts[0].arrival)
        self.obey(do.ReserveSlot)
        return self.given(do.Resume)[-1].worker_id


def test_a_state_takes_its_room_in_a_pool_once_and_its_time_on_the_link() -> None:
    """Layers that keep a state: ``cost`` says what its copy takes, and so what room it has."""
    cost = {"kv_token_s": 1e-7, "weights_s": 0.01, "request_s": 1e-4, "step_s": 0.01, "prefill_token_s": 1e-4}
    of_states = {"cost": {**cost, "copy_token_s": 0.01, "copy_state_s": 0.3}}
    late = Machines(**of_states)
    late.pool("pool-1", "there")
    late.notice(0.3)
    assert not late.asked(), "the copy of the state alone takes longer"
    full = Machines(**of_states)
    full.pool("pool-1", "there", kv_tokens=30)
    full.notice()
    assert not full.asked(), "it has room for 30 tokens' worth of state, and none for KV"
    bench = Parked(**of_states)
    here, there = (bench.state.pools[name] for name in ("pool-here", "pool-there"))
    room = here.kv_claimed
    assert there.kv_claimed == room == 30 + bench.state.kv_of(bench.state.request_row["g0.0"])
    bench.carry_through(do.Resume)
    assert bench.parked_in("g0.0") == "pool-there" and (here.kv_claimed, there.kv_claimed) == (0, room)


def test_a_parked_request_is_carried_to_a_pool_elsewhere() -> None:
    bench = Parked()
    bench.carry_through(do.Resume)
    assert bench.parked_in("g0.0") == "pool-there" and is_emptied(bench.state, "here")
    bench.post(on.PoolLost("pool-here", 1, "its machine was taken"))
    assert bench.resumed_as() == "pool-there" and bench.machine.counters.parked_lost == 0


@pytest.mark.parametrize("phase", ["asked", "copies", "copied"])
@pytest.mark.parametrize("end", ["pool-here", "pool-there"])
def test_a_carried_request_survives_the_loss_of_either_pool(phase: str, end: str) -> None:
    bench = Parked()
    if phase != "asked":
        bench.obey(do.ReserveSlot)
    if phase == "copied":
        bench.answer(bench.given(do.Resume)[-1], locator="snapshot", tokens=7)
    bench.post(on.PoolLost(end, 1, "killed"))
    if phase == "copied" and end == "pool-here":
        bench.obey(do.CopyIn)
        assert bench.parked_in("g0.0") == "pool-there", "the target has all of it"
        return
    bench.post(on.HostLost("here"))
    kept = "pool-here" if end == "pool-there" else "re-prefilled"
    assert bench.parked_in("g0.0") == ("pool-here" if end == "pool-there" else "")
    assert bench.resumed_as() == kept


@pytest.mark.parametrize(
    ("error_kind", "kept"), [("refused", True), ("not_movable", False), ("unknown_request", False)]
)
def test_a_copy_between_pools_that_fails_leaves_the_request_where_it_is_or_to_be_computed(
    error_kind: str, kept: bool
) -> None:
    bench = Parked()
    bench.obey(do.ReserveSlot)
    bench.answer(bench.given(do.Resume)[-1], ok=False, error="it failed", error_kind=error_kind)
    assert bench.parked_in("g0.0") == ("pool-here" if kept else "")
    assert bench.machine.counters.parked_lost == (not kept)


def test_a_cancelled_group_ends_a_copy_between_pools() -> None:
    bench = Parked()
    bench.obey(do.ReserveSlot)
    bench.post(on.GroupCancelled("g0", "asked for"))
    assert not bench.state.handoffs and not bench.state.pools["pool-here"].rows
    assert bench.state.pools["pool-there"].kv_claimed == 0
