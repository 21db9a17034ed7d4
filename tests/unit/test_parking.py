"""The host tier in the core: requests are parked, wait, and are resumed or re-prefilled, never lost."""

from typing import Any

import pytest

from dora.core import commands as do
from dora.core import events as on
from dora.core.observation import view_of
from dora.errors import Conflict, InvalidValue, NotFound
from dora.lab.sim.invariants import check_empty
from tests.refusals import refused
from tests.unit.test_machine import Bench


class PoolBench(Bench):
    """One worker with a request of 5 prompt tokens, ``g0.0``, and a pool."""

    def __init__(self, kv_tokens: int = 1000, **balance: Any) -> None:
        super().__init__(**balance)
        self.start("w0")
        self.offer(1)
        self.obey(do.StartRequest)
        self.report("g0.0", 7)
        self.post(on.PoolJoined("pool-0", 1, kv_tokens))
        self.row = self.state.request_row["g0.0"]

    @property
    def pool(self) -> Any:
        return self.state.pools["pool-0"]

    @property
    def parked(self) -> bool:
        return bool(self.state.requests["pool"][self.row])

    def ask(self) -> None:
        self.post(on.MigrationRequested("g0.0", "pool-0"))

    def freeze(self, kind: type[do.CopyOut]) -> None:
        """Grants the reservation that was asked for, and the other end copies."""
        self.obey(do.ReserveSlot)
        self.answer(self.given(kind)[-1], locator="snapshot", tokens=7)

    def park(self) -> None:
        """The request lies in the pool, and is asked for by the worker that has a slot."""
        self.ask()
        self.freeze(do.Park)
        self.answer(self.given(do.CopyIn)[-1])

    def park_and_lose_worker(self) -> None:
        """The request lies in the pool, and nobody is there who could take it."""
        self.park()
        self.post(on.WorkerLost("w0", 1, "killed"))

    def sent(self, kind: type, name: str) -> list[Any]:
        return [command for command in self.given(kind) if command.worker_id == name]


def test_a_request_is_parked_and_resumed_with_its_kv() -> None:
    bench = PoolBench()
    bench.ask()
    assert [(c.worker_id, c.epoch) for c in bench.given(do.ReserveSlot)] == [("pool-0", 1)]
    assert (bench.pool.inbound, bench.pool.kv_claimed) == (1, 12)
    bench.freeze(do.Park)
    assert bench.given(do.Park)[0].worker_id == "w0" and bench.owner("g0.0") == "w0"
    bench.answer(bench.given(do.CopyIn)[-1])
    assert bench.parked and bench.pool.kv_claimed == 12 and bench.machine.counters.requests_parked == 1
    assert bench.sent(do.RemoveRequest, "w0"), "the source frees its blocks"
    bench.freeze(do.Resume)  # a slot is free, so it is placed at once
    assert bench.given(do.Resume)[0].worker_id == "pool-0"
    bench.answer(bench.given(do.CopyIn)[-1])
    assert bench.owner("g0.0") == "w0" and bench.pool.kv_claimed == 0 and not bench.parked
    assert bench.sent(do.RemoveRequest, "pool-0"), "the pool frees its memory"
    counters = bench.machine.counters
    assert (counters.requests_resumed, counters.migrations_reprefill, counters.parked_lost) == (1, 0, 0)


def test_a_parked_request_survives_its_worker_and_resumes_on_another() -> None:
    bench = PoolBench()
    bench.park_and_lose_worker()
    assert bench.parked and not bench.state.handoffs and not bench.sent(do.RemoveRequest, "pool-0")
    bench.join("w1")
    bench.load_all()
    bench.freeze(do.Resume)
    bench.answer(bench.given(do.CopyIn)[-1])
    assert bench.owner("g0.0") == "w1" and bench.machine.counters.migrations_reprefill == 0


@pytest.mark.parametrize("worker_first", [False, True])
def test_what_a_lost_pool_held_is_reprefilled(worker_first: bool) -> None:
    bench = PoolBench()
    bench.park_and_lose_worker()
    bench.post(on.PoolLost("pool-0", 2, "of another epoch"))
    assert bench.parked
    if worker_first:
        bench.join("w1")
        bench.load_all()
    bench.post(on.PoolLost("pool-0", 1, "killed"))
    if not worker_first:
        bench.join("w1")
        bench.load_all()
    assert bench.sent(do.StartRequest, "w1")[-1].arrival == "re-prefilled" and bench.owner("g0.0") == "w1"
    assert bench.machine.counters.parked_lost == 1


def test_what_a_pool_drops_is_reprefilled_and_what_it_never_had_is_ignored() -> None:
    bench = PoolBench()
    bench.post(on.PoolDropped("pool-0", 1, ("g0.0", "g9.9")))
    assert bench.owner("g0.0") == "w0"
    bench.park_and_lose_worker()
    bench.post(on.PoolDropped("pool-0", 7, ("g0.0",)))
    assert bench.parked
    bench.post(on.PoolDropped("pool-0", 1, ("g0.0",), "the disk is full"))
    assert not bench.parked and bench.pool.kv_claimed == 0
    bench.join("w1")
    bench.load_all()
    assert bench.sent(do.StartRequest, "w1") and bench.machine.counters.parked_lost == 1


@pytest.mark.parametrize("error_kind", ["unknown_request", "not_movable", "refused"])
def test_what_a_pool_cannot_give_out_is_reprefilled(error_kind: str) -> None:
    bench = PoolBench()
    bench.park()
    bench.obey(do.ReserveSlot)
    bench.answer(bench.given(do.Resume)[-1], ok=False, error="lost", error_kind=error_kind)
    assert bench.sent(do.CancelReservation, "w0") and bench.sent(do.RemoveRequest, "pool-0")
    assert bench.given(do.StartRequest)[-1].arrival == "re-prefilled" and bench.owner("g0.0") == "w0"
    assert bench.pool.kv_claimed == 0 and bench.machine.counters.parked_lost == 1


def test_a_pool_lost_once_all_is_copied_changes_nothing() -> None:
    bench = PoolBench()
    bench.park()
    bench.freeze(do.Resume)
    bench.post(on.PoolLost("pool-0", 1, "killed"))
    bench.answer(bench.given(do.CopyIn)[-1])
    assert bench.owner("g0.0") == "w0" and bench.machine.counters.parked_lost == 0


def test_a_source_lost_once_all_is_copied_leaves_a_parked_request() -> None:
    bench = PoolBench()
    bench.ask()
    bench.freeze(do.Park)
    bench.post(on.WorkerLost("w0", 1, "killed"))
    bench.answer(bench.given(do.CopyIn)[-1])
    assert bench.parked and bench.pool.kv_claimed == 12


def test_a_resume_that_takes_too_long_ends_in_a_reprefill() -> None:
    bench = PoolBench()
    bench.park()
    bench.obey(do.ReserveSlot)
    bench.now_s += bench.state.config.balance.handoff_timeout_s
    bench.post(on.Tick())
    assert bench.sent(do.CancelReservation, "w0") and bench.sent(do.RemoveRequest, "pool-0")
    assert bench.owner("g0.0") == "w0" and not bench.state.handoffs


@pytest.mark.parametrize("resumed", [False, True])
def test_a_cancelled_group_leaves_its_pool(resumed: bool) -> None:
    bench = PoolBench()
    if resumed:
        bench.park()
    else:
        bench.park_and_lose_worker()
    bench.post(on.GroupCancelled("g0", "asked for"))
    assert bench.sent(do.RemoveRequest, "pool-0") and bench.pool.kv_claimed == 0
    for pending in list(bench.state.pending.values()):
        bench.answer(pending.command)
    check_empty(bench.state)


def test_a_request_that_cannot_move_exactly_waits_to_be_reprefilled() -> None:
    bench = PoolBench()
    bench.ask()
    bench.obey(do.ReserveSlot)
    bench.answer(bench.given(do.Park)[-1], ok=False, error="in mid-prefill", error_kind="not_movable")
    assert bench.sent(do.CancelReservation, "pool-0") and bench.pool.kv_claimed == 0
    assert bench.given(do.StartRequest)[-1].arrival == "re-prefilled" and bench.owner("g0.0") == "w0"


def test_a_pool_takes_no_more_than_it_holds() -> None:
    bench = PoolBench(kv_tokens=11)
    with refused(Conflict, field="--to", value="pool-0", names=("11", "12")):
        bench.ask()
    bench = PoolBench(kv_tokens=12)
    bench.ask()
    bench.obey(do.ReserveSlot)
    bench.answer(bench.given(do.Park)[-1], locator="snapshot", tokens=8)  # it has grown meanwhile
    bench.answer(bench.given(do.CopyIn)[-1])
    assert bench.sent(do.CancelReservation, "pool-0") and bench.sent(do.Thaw, "w0") and bench.owner("g0.0") == "w0"
    assert bench.pool.kv_claimed == 0


def test_a_pool_has_an_id_of_its_own_and_some_memory() -> None:
    bench = PoolBench()
    for pool_id in ("pool-0", "w0"):
        with refused(Conflict, field="pool_id"):
            bench.post(on.PoolJoined(pool_id, 2, 100))
    with refused(Conflict, field="worker_id", value="pool-0"):
        bench.post(on.WorkerJoined("pool-0", 9, 8, 100))
    with refused(InvalidValue, field="kv_tokens", value=0):
        bench.post(on.PoolJoined("pool-1", 2, 0))
    bench.post(on.PoolLost("pool-0", 1, "killed"))
    bench.post(on.PoolJoined("pool-0", 2, 100))
    assert bench.pool.epoch == 2


def drained(*pools: on.PoolJoined) -> Bench:
    """A worker on host a that is to leave with two requests, while the other one's slots are taken."""
    bench = Bench(window=2, groups=4, policy="dora")
    bench.join("w0", slots=2, host="a")
    bench.join("w1", slots=2, host="b")
    bench.load_all()
    bench.post(on.TrainerAttached(1, bench.groups))
    bench.offer(4)
    for group in range(4):
        bench.report(f"g{group}.0", 3)
    for pool in pools:
        bench.post(pool)
    bench.post(on.DrainRequested("w0"))
    return bench


def test_a_drained_worker_parks_what_finds_no_slot_and_leaves() -> None:
    """Without a pool its two requests stay until they end."""
    assert not drained().given(do.Park)
    bench = drained(on.PoolJoined("pool-0", 1, 1000))
    bench.obey(do.ReserveSlot)
    parks = bench.given(do.Park)
    assert [park.worker_id for park in parks] == ["w0", "w0"]
    for park in parks:
        bench.answer(park, locator=f"snapshot {park.request_id}", tokens=3)
    bench.obey(do.CopyIn)
    assert [stop.worker_id for stop in bench.given(do.StopWorker)] == ["w0"]
    assert len(bench.state.pools["pool-0"].rows) == 2
    (row, *_) = bench.state.workers["w1"].rows
    bench.report(bench.state.request_id[row], 9, end=True)
    assert [each.target for each in bench.state.handoffs.values()] == ["w1"], "one resumes as soon as a slot is free"


@pytest.mark.parametrize("own_tokens, chosen", [(100, "pool-1"), (5, "pool-2")])
def test_a_request_is_parked_on_its_own_host_or_else_where_there_is_most_room(own_tokens: int, chosen: str) -> None:
    pools = (("pool-0", 500, "b"), ("pool-1", own_tokens, "a"), ("pool-2", 1000, "b"))
    bench = drained(*(on.PoolJoined(pool_id, 1, kv_tokens, host) for pool_id, kv_tokens, host in pools))
    assert [command.worker_id for command in bench.given(do.ReserveSlot)] == [chosen, chosen]


def test_a_policy_sees_how_much_room_pools_have() -> None:
    bench = PoolBench()
    assert view_of(bench.state).pools == (1000,)
    bench.park_and_lose_worker()
    view = view_of(bench.state)
    assert view.pools == (988,) and view.requests.worker[bench.row] == -1


def test_a_worker_without_room_is_asked_once_more_after_a_rest() -> None:
    bench = PoolBench()
    bench.park()

    def refuse() -> None:
        (reserve,) = (p.command for p in bench.state.pending.values() if isinstance(p.command, do.ReserveSlot))
        bench.answer(reserve, ok=False, error="no room", error_kind="refused")

    refuse()
    assert bench.parked and not bench.state.handoffs
    bench.post(on.Tick())
    assert not bench.state.handoffs, "the worker rests"
    bench.now_s += 1.0
    bench.post(on.Tick())
    refuse()
    assert not bench.parked and bench.sent(do.RemoveRequest, "pool-0")
    bench.now_s += 1.0
    bench.post(on.Tick())
    assert bench.given(do.StartRequest)[-1].arrival == "re-prefilled" and bench.owner("g0.0") == "w0"


def test_an_operator_says_where_a_parked_request_goes_on() -> None:
    bench = PoolBench()
    bench.park()
    (reserve,) = (p.command for p in bench.state.pending.values() if isinstance(p.command, do.ReserveSlot))
    bench.answer(reserve, ok=False, error="no room", error_kind="refused")
    assert bench.parked and not bench.state.handoffs, "the worker rests, so nobody resumes it"
    bench.post(on.PoolJoined("pool-1", 1, 1000))
    for target, kind, why in (
        ("pool-0", Conflict, "is where g0.0 is"),
        ("pool-1", Conflict, "is a pool"),
        ("w9", NotFound, "is not known"),
    ):
        with refused(kind, field="--to", value=target, why=why):
            bench.post(on.MigrationRequested("g0.0", target))
    assert bench.parked and bench.row in bench.state.waiting[0]
    bench.post(on.MigrationRequested("g0.0", "w0"))
    bench.freeze(do.Resume)
    bench.answer(bench.given(do.CopyIn)[-1])
    assert bench.owner("g0.0") == "w0" and bench.machine.counters.requests_resumed == 1
    assert bench.row not in bench.state.waiting[0] and bench.pool.kv_claimed == 0


def test_beside_a_pool_an_operator_sends_no_request_onto_taken_slots() -> None:
    bench = PoolBench()
    bench.join("w1", slots=1)
    bench.load_all()
    bench.offer(2)
    bench.obey(do.StartRequest)
    (taken,) = bench.state.workers["w1"].rows
    assert taken != bench.row
    with refused(Conflict, field="--to", value="w1"):
        bench.post(on.MigrationRequested("g0.0", "w1"))
    bench.post(on.PoolLost("pool-0", 1, "killed"))
    bench.post(on.MigrationRequested("g0.0", "w1"))
    assert bench.sent(do.ReserveSlot, "w1"), "without a pool it may queue there"


def test_a_parked_state_takes_the_room_of_so_many_tokens_and_no_blocks_at_a_worker() -> None:
    full = PoolBench(kv_tokens=41)
    full.state.state_tokens = 30
    with refused(Conflict, names=[42]):
        full.ask()
    bench = PoolBench(kv_tokens=50)
    bench.state.state_tokens = 30
    bench.park()
    assert bench.pool.free == 8 and view_of(bench.state).state_tokens == 30
    assert {command.kv_tokens for command in bench.given(do.ReserveSlot)} == {12}
    bench.freeze(do.CopyOut)
    bench.answer(bench.given(do.CopyIn)[-1])
    assert not bench.parked and bench.pool.free == 50
