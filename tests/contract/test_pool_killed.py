"""A pool is killed at every point of a handoff into it and out of it, as messages between loops: nothing is lost.

What the core orders next is in its handoff table (core/handoff_table.py); the loops then have to leave nothing behind.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from dora.models.tiny import make_tiny
from dora.rpc import convert
from dora.rpc import dora_pb2 as pb
from tests.contract.planes import HERE, a_plane, until
from tests.contract.pools import a_pool, reserve
from tests.contract.test_pool import a_request, copied_out, loaded, park, resume, sent_on
from tests.contract.test_worker_handoff import Worker, alone, peer_of, started

PHASES = ("planned", "reserved", "copying", "frozen", "committed")
MOVER, OTHER = a_request(1), a_request(2)


class Ends:
    """A source with two requests, ``r1`` and ``r2``, a target, and a pool that a test kills."""

    def __init__(self, folder: Path, transport: str, stack: ExitStack) -> None:
        self.model = make_tiny("dense", folder / "model", seed=1)
        self._pool_life = stack.enter_context(ExitStack())
        planes = [stack.enter_context(a_plane(folder, epoch, (transport,), timeout_s=1.0)) for epoch in (1, 2)]
        self.source, self.target = (loaded(Worker(plane, self.model), self.model) for plane in planes)
        self.pool = self._pool_life.enter_context(a_pool(folder, 3, (transport,), spill=folder / "spill"))
        started(self.source, [MOVER, OTHER], 5)

    def kill_pool(self) -> None:
        """It obeys nothing more, and its connections break."""
        self._pool_life.close()

    def goes_on(self, worker: Worker, *, reprefilled: bool) -> None:
        """As if nothing had happened, and so does the request that was never touched."""
        assert worker.finish("r1") == alone(self.model, MOVER)
        assert bool(worker.engine.load().reprefilled_tokens) == reprefilled
        assert self.source.finish("r2") == alone(self.model, OTHER)
        for each in (self.source, self.target):
            assert each.end is not None and each.engine.reserved == 0 and not each.loop.endpoint.copies
            plane = each.end.plane
            until(lambda plane=plane: sum(plane.held_bytes()) == 0)  # type: ignore[misc]

    def reprefill(self, tokens: list[int]) -> None:
        """The request goes on at the target after the tokens that were delivered."""
        self.target.tokens["r1"] = list(tokens)
        known = replace(MOVER, output_token_ids=tuple(tokens), logprobs=(0.0,) * len(tokens))
        assert self.target.obey(start_request=convert.request_to_wire(known)).ok
        self.goes_on(self.target, reprefilled=True)


@pytest.fixture(params=HERE)
def ends(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(tmp_path, str(request.param), stack)


@pytest.mark.parametrize("phase", PHASES)
def test_a_pool_killed_while_a_request_is_parked(ends: Ends, phase: str) -> None:
    source, pool = ends.source, ends.pool
    copying = None
    match phase:
        case "planned":
            pool.order(reserve_slot=reserve("r1", 1))
        case "reserved":
            assert pool.let_in("r1", 1).ok
        case "copying":
            assert pool.let_in("r1", 1).ok
            copying = source.order(copy_out=pb.CopyOut(request_id="r1", target=peer_of(pool.end)))
            source.turn()
            assert source.began == {copying}
        case "frozen":
            assert pool.let_in("r1", 1).ok
            assert copied_out(source, pool, "r1").ok
        case "committed":
            park(source, pool, "r1")
    ends.kill_pool()
    if phase == "committed":
        ends.reprefill(source.tokens["r1"])
        return
    if phase != "planned":
        assert source.obey(thaw=pb.Thaw(request_id="r1")).ok
    if copying is not None:
        assert not source.outcome(copying).ok
    ends.goes_on(source, reprefilled=False)


@pytest.mark.parametrize("phase", PHASES)
def test_a_pool_killed_while_a_request_is_resumed(ends: Ends, phase: str) -> None:
    source, target, pool = ends.source, ends.target, ends.pool
    park(source, pool, "r1")
    tokens = source.tokens["r1"]
    assert target.end is not None
    asked = pb.ReserveSlot(request_id="r1", version=1, kv_tokens=64, source_epoch=pool.end.identity.epoch)
    locator = ""
    match phase:
        case "planned":
            target.order(reserve_slot=asked)
        case "reserved":
            assert target.obey(reserve_slot=asked).ok
        case "copying":
            assert target.obey(reserve_slot=asked).ok
            pool.order(copy_out=pb.CopyOut(request_id="r1", target=peer_of(target.end)))
            pool.turn()
        case "frozen":
            locator = sent_on(pool, target, "r1").locator
        case "committed":
            resume(pool, target, "r1", tokens)
    ends.kill_pool()
    if phase == "frozen":
        target.tokens["r1"] = list(tokens)
        assert target.obey(copy_in=pb.CopyIn(request_id="r1", version=1, locator=locator)).ok
    if phase in ("frozen", "committed"):
        ends.goes_on(target, reprefilled=False)
        return
    assert target.obey(cancel_reservation=pb.CancelReservation(request_id="r1")).ok
    ends.reprefill(tokens)


def test_a_worker_finds_out_by_itself_that_the_pool_it_copies_to_is_dead(ends: Ends) -> None:
    """The rounds before have arrived; the last one finds nobody."""
    source, pool = ends.source, ends.pool
    assert pool.let_in("r1", 1).ok
    copying = source.order(copy_out=pb.CopyOut(request_id="r1", target=peer_of(pool.end)))
    source.turn()
    source.await_round("r1")
    ends.kill_pool()
    outcome = source.outcome(copying)
    assert not outcome.ok and outcome.error_kind == "refused" and "w3" in outcome.error
    assert source.obey(thaw=pb.Thaw(request_id="r1")).ok
    ends.goes_on(source, reprefilled=False)
