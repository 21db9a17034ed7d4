"""A handoff between the loops of two workers, as messages: beside the engine's steps, and undone at any point."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora.data.types import RequestSpec, SamplingParams
from dora.models.tiny import make_tiny
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from dora.rpc.errors import ServiceUnavailable
from tests.contract.driver import make_request
from tests.contract.planes import HERE, a_plane
from tests.contract.workers import Worker, peer_of

LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)


@pytest.fixture(params=HERE)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("dense", tmp_path / "model", seed=1)


@pytest.fixture
def workers(tmp_path: Path, transport: str, model: Path) -> Iterator[tuple[Worker, Worker]]:
    """Source and target, both with version 1."""
    with a_plane(tmp_path, 1, (transport,), timeout_s=1.0) as one, a_plane(tmp_path, 2, (transport,)) as two:
        both = Worker(one, model), Worker(two, model)
        for worker in both:
            load = pb.LoadVersion(version=1, name=str(model))
            assert worker.obey(load_version=load).ok
        yield both


def started(worker: Worker, requests: list[RequestSpec], tokens: int) -> None:
    for request in requests:
        assert worker.obey(start_request=convert.request_to_wire(request)).ok
    while min(len(worker.tokens.get(request.request_id, [])) for request in requests) < tokens:
        worker.turn()


def reserved(target: Worker, request_id: str) -> None:
    reserve = pb.ReserveSlot(request_id=request_id, version=1, kv_tokens=64, source_epoch=1)
    assert target.obey(reserve_slot=reserve).ok


def alone(model: Path, request: RequestSpec) -> list[int]:
    """Returns the tokens of the request without a handoff."""
    worker = Worker(None, model)
    assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
    started(worker, [request], 1)
    return worker.finish(request.request_id)


def two_requests() -> tuple[RequestSpec, RequestSpec]:
    return tuple(replace(make_request(index), sampling=replace(LONG, seed=index)) for index in (1, 2))  # type: ignore[return-value]


def test_a_request_goes_on_at_its_target(workers: tuple[Worker, Worker], transport: str, model: Path) -> None:
    source, target = workers
    mover, other = two_requests()
    assert target.end is not None
    started(source, [mover, other], 5)
    reserved(target, "r1")
    copied = source.obey(copy_out=pb.CopyOut(request_id="r1", target=peer_of(target.end)))
    assert copied.ok and copied.kv_transport == transport and not copied.kv_fallbacks
    target.tokens["r1"] = moved = list(source.tokens["r1"])
    assert copied.tokens == len(moved), "what the source told is what the snapshot has"
    assert copied.snapshot_bytes > 0
    assert target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=copied.locator)).ok
    assert source.obey(remove_request=pb.RemoveRequest(request_id="r1")).ok
    assert target.finish("r1") == alone(model, mover)
    assert source.finish("r2") == alone(model, other)
    assert target.engine.load().reprefilled_tokens == 0
    assert not target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=copied.locator)).ok, "taken once"


def test_the_source_decodes_others_while_it_copies_and_thaws_what_did_not_arrive(
    workers: tuple[Worker, Worker], transport: str, model: Path
) -> None:
    """The target accepts, and says nothing: until the time limit the copy is under way."""
    source, _ = workers
    mover, other = two_requests()
    started(source, [mover, other], 5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        peer = pb.KvPeer(worker_id="w9", epoch=9, address=f"127.0.0.1:{deaf.getsockname()[1]}", transports=[transport])
        copying = source.order(copy_out=pb.CopyOut(request_id="r1", target=peer))
        frozen_at = None
        while not source.ends.get("r2"):
            source.turn()
            frozen_at = len(source.tokens["r1"]) if frozen_at is None else frozen_at
        assert len(source.tokens["r1"]) == frozen_at and copying not in source.outcomes
        outcome = source.outcome(copying)
    assert not outcome.ok and outcome.error_kind == "refused" and "w9" in outcome.error
    assert source.obey(thaw=pb.Thaw(request_id="r1")).ok
    assert source.finish("r1") == alone(model, mover)
    assert source.finish("r2") == alone(model, other)


def long_request() -> RequestSpec:
    """With blocks that are full from the start."""
    return make_request(1, LONG, 140)


def test_full_blocks_are_copied_while_the_request_decodes(workers: tuple[Worker, Worker], model: Path) -> None:
    source, target = workers
    mover = long_request()
    assert target.end is not None
    started(source, [mover], 5)
    reserved(target, "r1")
    assert target.engine.reserved == 1
    copying = source.order(copy_out=pb.CopyOut(request_id="r1", target=peer_of(target.end)))
    source.turn()
    assert source.began == {copying} and copying not in source.outcomes
    source.await_round("r1")
    copied = source.outcome(copying)
    target.tokens["r1"] = moved = list(source.tokens["r1"])
    assert copied.ok and copied.tokens == len(moved) > 5, "a token came while its blocks travelled"
    assert copied.snapshot_bytes == 5 * source.engine.layout.block_bytes, "of all rounds"
    assert target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=copied.locator)).ok
    assert target.engine.reserved == 0
    assert source.obey(remove_request=pb.RemoveRequest(request_id="r1")).ok
    assert target.finish("r1") == alone(model, mover)
    assert target.engine.load().reprefilled_tokens == 0


def test_the_first_token_at_the_target_is_reported_at_once(tmp_path: Path, model: Path) -> None:
    with a_plane(tmp_path, 1) as one, a_plane(tmp_path, 2) as two:
        source, target = Worker(one, model), Worker(two, model, clock=lambda: 0.0)  # no report is ever due by time
        for worker in (source, target):
            assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
        started(source, list(two_requests()), 5)
        reserved(target, "r1")
        copied = source.obey(copy_out=pb.CopyOut(request_id="r1", target=peer_of(two)))
        target.tokens["r1"] = list(source.tokens["r1"])
        assert target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=copied.locator)).ok
        assert len(target.tokens["r1"]) == copied.tokens + 1
        target.turn()
        assert len(target.tokens["r1"]) == copied.tokens + 1, "the next ones with their period"


def test_a_request_that_ends_while_its_blocks_travel_is_told_before_the_copys_end(
    workers: tuple[Worker, Worker], transport: str, model: Path
) -> None:
    source, _ = workers
    mover = long_request()
    started(source, [mover], 5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        peer = pb.KvPeer(worker_id="w9", epoch=9, address=f"127.0.0.1:{deaf.getsockname()[1]}", transports=[transport])
        copying = source.order(copy_out=pb.CopyOut(request_id="r1", target=peer))
        assert source.finish("r1") == alone(model, mover)
        outcome = source.outcome(copying)
    assert not outcome.ok and outcome.error_kind == "unknown_request"


@pytest.mark.parametrize("order", ["thaw", "remove_request"])
def test_an_undone_copy_ahead_is_answered_at_once(workers: tuple[Worker, Worker], transport: str, order: str) -> None:
    source, _ = workers
    started(source, [long_request()], 5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        peer = pb.KvPeer(worker_id="w9", epoch=9, address=f"127.0.0.1:{deaf.getsockname()[1]}", transports=[transport])
        copying = source.order(copy_out=pb.CopyOut(request_id="r1", target=peer))
        undo = {"thaw": pb.Thaw(request_id="r1"), "remove_request": pb.RemoveRequest(request_id="r1")}[order]
        source.turn()
        assert source.obey(**{order: undo}).ok
        outcome = source.outcomes[copying]
    assert not outcome.ok and "cancelled" in outcome.error
    assert source.engine.has_work() == (order == "thaw")


def test_an_undone_handoff_leaves_nothing_at_the_target(workers: tuple[Worker, Worker], model: Path) -> None:
    source, target = workers
    mover, other = two_requests()
    assert target.end is not None and source.end is not None
    started(source, [mover, other], 5)
    reserved(target, "r1")
    copied = source.obey(copy_out=pb.CopyOut(request_id="r1", target=peer_of(target.end)))
    assert target.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
    late = target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=copied.locator))
    assert not late.ok and not target.engine.has_work()
    again = source.obey(copy_out=pb.CopyOut(request_id="r1", target=peer_of(target.end)))
    assert not again.ok and "not expected" in again.error, "nobody has reserved"
    assert source.obey(thaw=pb.Thaw(request_id="r1")).ok
    assert source.finish("r1") == alone(model, mover)
    assert (sum(source.end.plane.held_bytes()), sum(target.end.plane.held_bytes())) == (0, 0)


def test_a_copy_ends_with_its_request(workers: tuple[Worker, Worker], transport: str) -> None:
    """Its group was cancelled while the target was still being reached."""
    source, _ = workers
    mover, other = two_requests()
    started(source, [mover, other], 5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        peer = pb.KvPeer(worker_id="w9", epoch=9, address=f"127.0.0.1:{deaf.getsockname()[1]}", transports=[transport])
        copying = source.order(copy_out=pb.CopyOut(request_id="r1", target=peer))
        source.turn()
        assert source.obey(remove_request=pb.RemoveRequest(request_id="r1")).ok
        assert not source.outcome(copying).ok
    source.finish("r2")


def test_a_worker_without_a_free_slot_refuses_who_could_wait_in_a_pool(workers: tuple[Worker, Worker]) -> None:
    _, target = workers
    started(target, [replace(make_request(index), sampling=LONG) for index in range(3)], 1)

    def asked(name: str, needs_slot: bool) -> pb.WorkerOutcome:
        reserve = pb.ReserveSlot(request_id=name, version=1, kv_tokens=64, source_epoch=1, needs_slot=needs_slot)
        return target.obey(reserve_slot=reserve)

    assert asked("s1", True).ok, "the fourth slot"
    refused = asked("s2", True)
    assert (refused.ok, refused.error_kind) == (False, "refused") and "requests held = 4" in refused.error
    assert target.engine.reserved == 1
    assert asked("s2", False).ok, "without a pool it may queue"
    for name in ("s1", "s2"):
        assert target.obey(cancel_reservation=pb.CancelReservation(request_id=name)).ok
    assert asked("s2", True).ok


def test_a_worker_without_a_data_plane_takes_part_in_no_handoff(model: Path) -> None:
    worker = Worker(None, model)
    assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
    reserve = pb.ReserveSlot(request_id="r1", version=1, kv_tokens=64, source_epoch=1)
    refused = worker.obey(reserve_slot=reserve)
    assert not refused.ok and refused.error_kind == "refused"


def test_a_stream_that_ends_after_the_order_to_leave_is_no_fault(model: Path) -> None:
    class Leaving(Worker):
        def take(self, timeout_s: float) -> pb.WorkerCommand | None:
            command = super().take(timeout_s)
            if command is None:
                raise ServiceUnavailable("the stream has ended")
            return command

    worker = Leaving(None, model)
    worker.order(shutdown=pb.Shutdown())
    worker.loop.run(threading.Event())
    with pytest.raises(ServiceUnavailable):
        Leaving(None, model).loop.run(threading.Event())
