"""A pool outlives its service: what is parked there goes on under its next epoch, from the same memory."""

from pathlib import Path
from typing import cast

import pytest

from dora.errors import InvalidValue
from dora.kvtransfer.listener import Listener
from dora.kvtransfer.peer import ANY_MODEL, Identity, this_host
from dora.kvtransfer.plane import DataPlane, PlaneSettings
from dora.models.tiny import make_tiny
from dora.rpc import dora_pb2 as pb
from tests.contract.incarnations import Incarnation, Unhurried
from tests.contract.planes import SECRET, End, a_plane, until
from tests.contract.pools import ARENA_BYTES, a_pool, reserve
from tests.contract.test_pool import a_request, alone, loaded, park, resume, started
from tests.contract.workers import Worker
from tests.refusals import refused


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_is_parked_goes_on_under_the_next_epoch(tmp_path: Path, transport: str) -> None:
    model, transports = make_tiny("dense", tmp_path / "model", seed=1), (transport,)
    with a_plane(tmp_path, 1, transports) as one, a_pool(tmp_path, 3, transports) as pool:
        worker = loaded(Worker(one, model), model)
        started(worker, [a_request()], 5)
        park(worker, pool, "r1")
        tokens = worker.tokens.pop("r1")
        pool.order(reserve_slot=reserve("r2", 1))
        pool.turn()
        pool.loop.leave()
        assert pool.store.parked() == {"r1": len(tokens)}
        assert pool.store.held().memory_bytes == pool.arena.lent_bytes()
        listener = Listener("127.0.0.1")
        settings = PlaneSettings(SECRET, tmp_path, transports)
        identity = Identity("w3", 4, ANY_MODEL, this_host())
        plane = DataPlane(listener, identity, settings, arena=pool.end.plane.give_arena())
        try:
            pool.end = End(plane, identity, listener.address, transports)
            pool.loop.come_back(pool, plane)
            resume(pool, worker, "r1", tokens)
            assert worker.finish("r1") == alone(model, a_request())
        finally:
            pool.store.close()
            plane.close()


def test_a_snapshot_that_is_sent_late_is_not_told_to_the_next_service(tmp_path: Path) -> None:
    model, transports = make_tiny("dense", tmp_path / "model", seed=1), ("shm",)
    first, second, slow = Incarnation(), Incarnation(), Unhurried()
    with a_plane(tmp_path, 1, transports) as one, a_pool(tmp_path, 3, transports) as pool:
        worker = loaded(Worker(one, model), model)
        started(worker, [a_request()], 5)
        park(worker, pool, "r1")
        pool.loop.come_back(first, cast(DataPlane, slow))
        first.commands = [pb.WorkerCommand(command_id=7, copy_out=pb.CopyOut(request_id="r1"))]

        def is_on_its_way() -> bool:
            pool.loop.turn()
            return bool(slow.sent)

        until(is_on_its_way)
        pool.loop.leave()
        pool.loop.come_back(second, cast(DataPlane, slow))
        slow.sent[0].fail("it was cancelled")
        assert [outcome.command_id for outcome in first.outcomes] == [7]
        assert not second.outcomes


def test_an_arena_stays_where_it_cannot_be_moved(tmp_path: Path) -> None:
    """In another service's folder there is none of its owners."""
    with a_plane(tmp_path, 1, ("shm",), ANY_MODEL, arena_bytes=ARENA_BYTES) as end:
        assert end.plane.arena is not None
        with refused(InvalidValue, field="snapshot folder", value=tmp_path / "elsewhere"):
            end.plane.arena.move(tmp_path / "elsewhere", "2")
        assert (tmp_path / end.plane.arena.name).exists()
