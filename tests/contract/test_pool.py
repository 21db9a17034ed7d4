"""Requests are parked in a pool and go on from there, as messages between loops: in memory, on disk, and when lost."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora.data.types import RequestSpec
from dora.models.tiny import make_tiny
from dora.pool.loop import PoolLoop
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from tests.contract.driver import make_request
from tests.contract.planes import HERE, WAIT_S, a_plane, until
from tests.contract.pools import PoolEnd, a_pool
from tests.contract.test_worker_handoff import LONG, Worker, alone, peer_of, started

Ends = tuple[Worker, Worker, PoolEnd]


@pytest.fixture(params=HERE)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("dense", tmp_path / "model", seed=1)


@pytest.fixture
def ends(tmp_path: Path, transport: str, model: Path) -> Iterator[Ends]:
    """Two workers with version 1, and a pool that spills."""
    transports = (transport,)
    with (
        a_plane(tmp_path, 1, transports) as one,
        a_plane(tmp_path, 2, transports) as two,
        a_pool(tmp_path, 3, transports, spill=tmp_path / "spill") as pool,
    ):
        yield loaded(Worker(one, model), model), loaded(Worker(two, model), model), pool


def loaded(worker: Worker, model: Path) -> Worker:
    assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
    return worker


def a_request(index: int = 1, prompt_tokens: int = 140) -> RequestSpec:
    return make_request(index, replace(LONG, seed=index), prompt_tokens)


def park(worker: Worker, pool: PoolEnd, request_id: str, kv_bytes: int = 1 << 16) -> pb.WorkerOutcome:
    """As the core orders it. Returns what came of the copy."""
    assert worker.end is not None
    assert pool.let_in(request_id, worker.end.identity.epoch, kv_bytes).ok
    copied = copied_out(worker, pool, request_id)
    assert copied.ok, copied.error
    assert pool.obey(copy_in=pb.CopyIn(request_id=request_id, version=1, locator=copied.locator)).ok
    assert worker.obey(remove_request=pb.RemoveRequest(request_id=request_id)).ok
    return copied


def copied_out(worker: Worker, pool: PoolEnd, request_id: str) -> pb.WorkerOutcome:
    """Round by round: no step is done while one is on its way."""
    number = worker.order(copy_out=pb.CopyOut(request_id=request_id, target=peer_of(pool.end)))
    worker.turn()
    copy = worker.loop.endpoint.copies[request_id]
    while (current := copy.current) and current.done.exception(WAIT_S) is None and not copy.is_last:
        worker.turn()
    return worker.outcome(number)


def sent_on(pool: PoolEnd, worker: Worker, request_id: str) -> pb.WorkerOutcome:
    """The snapshot on its way to a worker, which is not told to take it in yet."""
    assert worker.end is not None
    reserve = pb.ReserveSlot(request_id=request_id, version=1, kv_tokens=64, source_epoch=pool.end.identity.epoch)
    assert worker.obey(reserve_slot=reserve).ok
    return pool.obey(copy_out=pb.CopyOut(request_id=request_id, target=peer_of(worker.end)))


def resume(pool: PoolEnd, worker: Worker, request_id: str, tokens: list[int]) -> pb.WorkerOutcome:
    copied = sent_on(pool, worker, request_id)
    assert copied.ok, copied.error
    worker.tokens[request_id] = list(tokens)
    assert worker.obey(copy_in=pb.CopyIn(request_id=request_id, version=1, locator=copied.locator)).ok
    assert pool.obey(remove_request=pb.RemoveRequest(request_id=request_id)).ok
    return copied


def drained(pool: PoolEnd) -> bool:
    pool.turn()
    return (pool.report.parked, pool.report.memory_bytes, pool.report.spill_bytes) == (0, 0, 0)


@pytest.mark.parametrize("other", [False, True], ids=["same worker", "another worker"])
def test_a_parked_request_goes_on_as_if_nothing_had_happened(
    ends: Ends, transport: str, model: Path, other: bool
) -> None:
    source, target, pool = ends
    request = a_request()
    started(source, [request], 5)
    parked = park(source, pool, "r1")
    tokens = source.tokens.pop("r1")
    assert parked.kv_transport == transport and parked.tokens == len(tokens)
    pool.turn()
    assert pool.report.parked == 1 and pool.report.memory_bytes >= parked.snapshot_bytes
    back = target if other else source
    resumed = resume(pool, back, "r1", tokens)
    assert (resumed.tokens, resumed.snapshot_bytes) == (parked.tokens, parked.snapshot_bytes)
    assert back.finish("r1") == alone(model, request)
    assert back.engine.load().reprefilled_tokens == 0
    until(lambda: drained(pool))


def test_many_are_parked_at_once_and_come_back_in_any_order(ends: Ends, model: Path) -> None:
    source, target, pool = ends
    requests = [a_request(index, 40 + 30 * index) for index in range(1, 5)]
    started(source, requests, 3)
    for request in requests:
        park(source, pool, request.request_id)
    assert not source.engine.has_work()
    for request in (requests[2], requests[0], requests[3], requests[1]):
        resume(pool, target, request.request_id, source.tokens[request.request_id])
    for request in requests:
        assert target.finish(request.request_id) == alone(model, request)
    until(lambda: drained(pool))


def test_what_is_parked_outlives_its_worker(tmp_path: Path, transport: str, model: Path) -> None:
    request = a_request()
    with a_pool(tmp_path, 3, (transport,)) as pool:
        with a_plane(tmp_path, 1, (transport,)) as one:
            source = loaded(Worker(one, model), model)
            started(source, [request], 5)
            park(source, pool, "r1")
        with a_plane(tmp_path, 2, (transport,)) as two:
            target = loaded(Worker(two, model), model)
            resume(pool, target, "r1", source.tokens["r1"])
            assert target.finish("r1") == alone(model, request)


def test_it_may_be_parked_again(ends: Ends, model: Path) -> None:
    source, target, pool = ends
    request = a_request()
    started(source, [request], 5)
    park(source, pool, "r1")
    resume(pool, target, "r1", source.tokens["r1"])
    while len(target.tokens["r1"]) < 12:
        target.turn()
    park(target, pool, "r1")
    resume(pool, source, "r1", target.tokens["r1"])
    assert source.finish("r1") == alone(model, request)


def test_it_may_be_carried_to_another_pool_which_outlives_the_first(
    tmp_path: Path, transport: str, model: Path
) -> None:
    """As from a host that leaves. The bytes and their checksums stay those that the worker made."""
    request = a_request()
    with a_pool(tmp_path, 4, (transport,)) as other, a_plane(tmp_path, 1, (transport,)) as one:
        worker = loaded(Worker(one, model), model)
        with a_pool(tmp_path, 3, (transport,)) as pool:
            started(worker, [request], 5)
            parked = park(worker, pool, "r1")
            assert other.let_in("r1", pool.end.identity.epoch, parked.snapshot_bytes).ok
            carried = pool.obey(copy_out=pb.CopyOut(request_id="r1", target=peer_of(other.end)))
            assert carried.ok, carried.error
            assert (carried.tokens, carried.snapshot_bytes) == (parked.tokens, parked.snapshot_bytes)
            assert other.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=carried.locator)).ok
            assert pool.obey(remove_request=pb.RemoveRequest(request_id="r1")).ok
            until(lambda: drained(pool))
        resume(other, worker, "r1", worker.tokens["r1"])
        assert worker.finish("r1") == alone(model, request)
        assert worker.engine.load().reprefilled_tokens == 0


# Undone.


def test_a_resume_that_is_undone_leaves_it_parked(ends: Ends, model: Path) -> None:
    source, target, pool = ends
    request = a_request()
    started(source, [request], 5)
    park(source, pool, "r1")
    assert sent_on(pool, target, "r1").ok
    assert target.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
    assert pool.obey(thaw=pb.Thaw(request_id="r1")).ok
    pool.turn()
    assert pool.report.parked == 1
    resume(pool, target, "r1", source.tokens["r1"])
    assert target.finish("r1") == alone(model, request)


def test_a_park_that_is_undone_leaves_nothing(ends: Ends, model: Path) -> None:
    source, _, pool = ends
    request = a_request()
    started(source, [request], 5)
    assert pool.let_in("r1", 1).ok
    assert copied_out(source, pool, "r1").ok
    assert pool.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
    assert source.obey(thaw=pb.Thaw(request_id="r1")).ok
    until(lambda: drained(pool))
    assert source.finish("r1") == alone(model, request)


def test_a_target_that_is_not_there_leaves_it_parked(ends: Ends, transport: str, model: Path) -> None:
    source, target, pool = ends
    request = a_request()
    started(source, [request], 5)
    park(source, pool, "r1")
    nobody = pb.KvPeer(worker_id="w9", epoch=9, address="127.0.0.1:1", transports=[transport])
    failed = pool.obey(copy_out=pb.CopyOut(request_id="r1", target=nobody))
    assert not failed.ok and failed.error_kind == "refused" and "w9" in failed.error
    assert pool.obey(thaw=pb.Thaw(request_id="r1")).ok
    resume(pool, target, "r1", source.tokens["r1"])
    assert target.finish("r1") == alone(model, request)


def test_what_a_pool_does_not_have_is_to_be_prefilled_again(ends: Ends) -> None:
    _, target, pool = ends
    absent = sent_on(pool, target, "r1")
    assert not absent.ok and absent.error_kind == "not_movable"


def test_a_pool_runs_nothing(ends: Ends, model: Path) -> None:
    _, _, pool = ends
    refused = pool.obey(load_version=pb.LoadVersion(version=1, name=str(model)))
    assert not refused.ok and refused.error_kind == "refused" and "load_version" in refused.error


def test_another_requests_snapshot_is_not_kept(ends: Ends) -> None:
    source, _, pool = ends
    started(source, [a_request()], 5)
    assert pool.let_in("r1", 1).ok
    copied = copied_out(source, pool, "r1")
    for wrong in ({"request_id": "r2", "version": 1}, {"request_id": "r1", "version": 2}):
        refused = pool.obey(copy_in=pb.CopyIn(locator=copied.locator, **wrong))
        assert not refused.ok
    until(lambda: drained(pool))


def test_a_worker_of_another_host_gets_it_under_strong_checksums(tmp_path: Path, model: Path) -> None:
    """Those that it came with are not for what leaves the host: it is checked here, and new ones are made."""
    requests = [a_request(index) for index in (1, 2)]
    with (
        a_plane(tmp_path, 1) as one,
        a_plane(tmp_path, 2, host="another") as two,
        a_pool(tmp_path, 3, ("shm", "tcp")) as pool,
    ):
        source, target = loaded(Worker(one, model), model), loaded(Worker(two, model), model)
        started(source, requests, 5)
        for request in requests:
            park(source, pool, request.request_id)
        assert resume(pool, target, "r1", source.tokens["r1"]).kv_transport == "tcp"
        assert target.finish("r1") == alone(model, requests[0])
        damage(pool, "r2")
        damaged = sent_on(pool, target, "r2")
        assert damaged.error_kind == "not_movable" and "chunk 1" in damaged.error


# Damage.


def damage(pool: PoolEnd, request_id: str) -> None:
    """Changes one byte of what is parked."""
    body = pool.store._parked[request_id].bodies[0]
    body.flags.writeable = True
    body[100] ^= 1


def test_damage_in_memory_is_seen_at_the_target(ends: Ends) -> None:
    """Checksums travel on from where the bytes were made: whoever changes them here is found out."""
    source, target, pool = ends
    started(source, [a_request()], 5)
    park(source, pool, "r1")
    damage(pool, "r1")
    damaged = sent_on(pool, target, "r1")
    assert not damaged.ok and damaged.error_kind == "not_movable" and "chunk 1" in damaged.error
    until(lambda: drained(pool))
    assert "r1" in pool.dropped


class Leaving:
    """A stream that brings the order to leave, and ends."""

    def __init__(self) -> None:
        self._commands = [pb.WorkerCommand(shutdown=pb.Shutdown())]

    def take(self, timeout_s: float) -> pb.WorkerCommand | None:
        if not self._commands:
            raise ServiceUnavailable("the stream has ended")
        return self._commands.pop()

    def send(self, message: pb.WorkerMessage) -> None:
        raise ServiceUnavailable("the stream has ended")


def test_a_stream_that_ends_after_the_order_to_leave_is_no_fault(tmp_path: Path) -> None:
    orders = Leaving()
    with a_pool(tmp_path, 2, ("tcp",)) as pool:
        PoolLoop(orders, pool.end.plane, pool.store).run(threading.Event())
        with pytest.raises(ServiceUnavailable):
            PoolLoop(orders, pool.end.plane, pool.store).run(threading.Event())
