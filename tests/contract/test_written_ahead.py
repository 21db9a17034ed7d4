"""Rounds are written into the target's blocks as they come; whatever undoes the handoff gives all of them back."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora.kvtransfer.checksum import digest_with
from dora.kvtransfer.codec import opening_of
from dora.kvtransfer.snapshot import KvLayout
from dora.kvtransfer.wire import Kind, Stream
from dora.models.tiny import make_tiny
from dora.rpc import dora_pb2 as pb
from dora.worker.reservation import Reservation
from tests.contract.planes import SECRET, a_plane, until
from tests.contract.test_transport import hostile
from tests.contract.test_worker_handoff import Worker, alone, long_request, peer_of, reserved, started

FULL_BLOCKS = 4  # of the request when its copy begins


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("dense", tmp_path / "model", seed=1)


@pytest.fixture(params=["shm", "tcp"])
def workers(tmp_path: Path, request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Worker, Worker]]:
    transports = (str(request.param),)
    with a_plane(tmp_path, 1, transports, timeout_s=1.0) as one, a_plane(tmp_path, 2, transports) as two:
        both = Worker(one, model), Worker(two, model)
        for worker in both:
            assert worker.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
        yield both


def reservation(worker: Worker) -> Reservation:
    return worker.engine._reserved["r1"]


def is_empty(worker: Worker) -> bool:
    """No block and no byte is held for anybody."""
    assert worker.end is not None
    return (worker.engine.load().kv_used_tokens, worker.engine.reserved, worker.end.plane.held_bytes()) == (
        0,
        0,
        (0, 0),
    )


def copying(source: Worker, target: Worker) -> int:
    """Up to a round that has arrived; the number of the copy."""
    assert target.end is not None
    started(source, [long_request()], 5)
    reserved(target, "r1")
    number = source.order(copy_out=pb.CopyOut(request_id="r1", target=peer_of(target.end)))
    source.turn()
    source.await_round("r1")
    return number


def test_a_round_is_in_the_targets_blocks_as_soon_as_it_has_arrived(
    workers: tuple[Worker, Worker], model: Path
) -> None:
    source, target = workers
    number = copying(source, target)
    assert source.end is not None and target.end is not None
    assert reservation(target).written == FULL_BLOCKS
    opening = reservation(target).opening
    assert opening is not None and len(opening.request.output_token_ids) == 5, "as it was when the copy began"
    until(lambda: (source.end.plane.held_bytes()[0], target.end.plane.held_bytes()[1]) == (0, 0))
    copied = source.outcome(number)
    target.tokens["r1"] = list(source.tokens["r1"])
    assert target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=copied.locator)).ok
    assert source.obey(remove_request=pb.RemoveRequest(request_id="r1")).ok
    assert target.finish("r1") == alone(model, long_request())
    assert is_empty(source) and is_empty(target)


UNDONE: dict[str, Callable[[Worker, Worker, int], object]] = {
    "while rounds travel": lambda source, target, number: None,
    "when the last round has arrived": lambda source, target, number: source.outcome(number),
    "when it was taken in": lambda source, target, number: taken_in(source, target, number),
}


def taken_in(source: Worker, target: Worker, number: int) -> None:
    locator = source.outcome(number).locator
    target.tokens["r1"] = list(source.tokens["r1"])
    assert target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=locator)).ok


@pytest.mark.parametrize("phase", UNDONE)
def test_a_handoff_that_is_undone_returns_every_block(workers: tuple[Worker, Worker], model: Path, phase: str) -> None:
    source, target = workers
    UNDONE[phase](source, target, copying(source, target))
    assert target.engine.load().kv_used_tokens > 0
    assert target.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
    assert source.obey(thaw=pb.Thaw(request_id="r1")).ok
    assert source.finish("r1") == alone(model, long_request())
    until(lambda: is_empty(source) and is_empty(target))
    reserved(target, "r1")
    assert reservation(target).written == 0, "a later try begins anew"


def test_a_snapshot_that_the_target_refuses_leaves_its_reservation_to_be_cancelled(
    workers: tuple[Worker, Worker],
) -> None:
    source, target = workers
    number = copying(source, target)
    locator = source.outcome(number).locator
    refused = target.obey(copy_in=pb.CopyIn(request_id="r1", version=7, locator=locator))
    assert not refused.ok and "version" in refused.error
    assert target.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
    assert (target.engine.load().kv_used_tokens, target.engine.reserved) == (0, 0)


def test_a_source_that_dies_leaves_blocks_until_its_handoff_is_cancelled(tmp_path: Path, model: Path) -> None:
    with a_plane(tmp_path, 2) as two:
        target = Worker(two, model)
        assert target.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
        with a_plane(tmp_path, 1) as one:
            source = Worker(one, model)
            assert source.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
            copying(source, target)
        assert reservation(target).written == FULL_BLOCKS
        refused = target.obey(load_version=pb.LoadVersion(version=2, name=str(model)))
        assert not refused.ok and "requests held" in refused.error, "not under blocks that are kept"
        assert target.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
        until(lambda: is_empty(target))
        assert target.obey(load_version=pb.LoadVersion(version=2, name=str(model))).ok


def test_a_target_without_room_refuses_with_the_reason(workers: tuple[Worker, Worker]) -> None:
    _, target = workers
    kept = target.engine.reserve("another", target.engine.capability.kv_tokens - 64)
    assert len(kept.block_ids) == 64
    reserve = pb.ReserveSlot(request_id="r1", version=1, kv_tokens=64, source_epoch=1)
    refused = target.obey(reserve_slot=reserve)
    assert not refused.ok and refused.error_kind == "refused" and "kv blocks" in refused.error
    target.engine.release("another")
    assert target.obey(reserve_slot=reserve).ok


# A peer that holds the secret, and sends what it likes.


def test_what_a_bad_peer_sends_is_never_written(tmp_path: Path, model: Path) -> None:
    """A round with a wrong checksum, one that is short, of no whole blocks, that follows on none, of another layout."""
    with a_plane(tmp_path, 2, ("tcp",)) as end:
        target = Worker(end, model)
        assert target.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
        reserve = pb.ReserveSlot(request_id="r1", version=1, kv_tokens=64, source_epoch=9)
        assert target.obey(reserve_slot=reserve).ok
        with hostile(end) as stream:
            stream.send(Kind.ATTACH, {"transport": "tcp"})
            assert stream.receive().kind is Kind.ATTACHED
            for number, damage in enumerate(("wrong", "short", "odd", "late", "foreign")):
                assert a_round(stream, number, damage, target.engine.layout) is (
                    Kind.ARRIVED if damage in ("odd", "foreign") else Kind.REFUSED
                )
                assert reservation(target).written == 0
        assert target.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
        until(lambda: is_empty(target))


@pytest.mark.parametrize("prefix", [{"prefix_blocks": 1}, {"prefix": "7-nobody.kv", "prefix_blocks": -1}])
def test_a_prefix_that_is_none_is_refused_before_anything_is_sent(
    tmp_path: Path, model: Path, prefix: dict[str, object]
) -> None:
    """Named by no key, or by that of another worker. This engine shares nothing, so a right one is refused too."""
    with a_plane(tmp_path, 2, ("tcp",)) as end:
        target = Worker(end, model)
        assert target.obey(load_version=pb.LoadVersion(version=1, name=str(model))).ok
        reserve = pb.ReserveSlot(request_id="r1", version=1, kv_tokens=64, source_epoch=9)
        assert target.obey(reserve_slot=reserve).ok
        block_bytes = target.engine.layout.block_bytes
        with hostile(end) as stream:
            stream.send(Kind.ATTACH, {"transport": "tcp"})
            assert stream.receive().kind is Kind.ATTACHED
            for number, named in enumerate([prefix, {"prefix": f"9-{77:032x}.kv", "prefix_blocks": 1}]):
                opening = {"key": f"9-{number:032x}.kv", "ticket": "r1", "transport": "tcp", "size": block_bytes}
                stream.send(Kind.OPEN, {**opening, "goes_on": True, **named})
                assert stream.receive().kind is Kind.REFUSED
            assert a_round(stream, 2, "wrong", target.engine.layout) is Kind.REFUSED, "the stream lives on"
        assert target.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
        until(lambda: is_empty(target))


def a_round(stream: Stream, number: int, damage: str, layout: KvLayout) -> Kind:
    """Sends a round of two blocks that is wrong; what the target says to it."""
    key = f"9-{number:032x}.kv"
    body = np.arange(2 * layout.block_bytes, dtype=np.uint8)[: 2 * layout.block_bytes - (damage == "odd")]
    opening = {"key": key, "ticket": "r1", "transport": "tcp", "size": body.nbytes, "goes_on": True}
    stream.send(Kind.OPEN, {**opening, "after": "9-nothing.kv" if damage == "late" else ""})
    if (answer := stream.receive().kind) is not Kind.OPENED:
        return answer
    if damage != "short":
        stream.send(Kind.CHUNK, {"key": key, "at": 0, "size": body.nbytes}, [body.data])
    digest = digest_with("xxh3", SECRET)
    sums = digest([body.data])
    head = opening_of(layout if damage != "foreign" else replace(layout, block_tokens=1), long_request()).raw
    total = bytes(16) if damage == "wrong" else digest([sums, head])
    stream.send(Kind.COMMIT, {"key": key, "sum": total, "chunks": 1}, [memoryview(sums), memoryview(head)])
    return stream.receive().kind


def test_a_source_goes_on_when_the_target_does_not_answer_in_the_middle(
    workers: tuple[Worker, Worker], model: Path
) -> None:
    source, _ = workers
    assert source.end is not None
    started(source, [long_request()], 5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        peer = pb.KvPeer(worker_id="w9", epoch=9, address=address, transports=list(source.end.transports))
        outcome = source.obey(copy_out=pb.CopyOut(request_id="r1", target=peer))
    assert not outcome.ok
    assert source.finish("r1") == alone(model, long_request())
    until(lambda: is_empty(source))
