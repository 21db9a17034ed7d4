"""Requests that leave their engine and come back at steps of a seed's, by rounds, some given up on the way."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dora.errors import NotFound
from dora.kvtransfer.copying import Copying, NotMovable
from dora.kvtransfer.snapshot import KvSnapshot
from dora.worker.engine import RolloutEngine
from tests.contract.driver import SLOTS, Driver, mixed_requests, run
from tests.contract.planes import HERE, WAIT_S, End, a_plane, until
from tests.contract.workers import copying_of
from tests.sweeps import some_of

SEEDS = 3
MOVES_MIN = 10  # of each seed
MOST_BYTES = 1 << 30
GIVEN_UP_SHARE = 0.25
STEPS_MAX = 6  # between one thing and the next


@dataclass
class Leaving:
    copying: Copying
    gives_up: bool


@dataclass
class Ends:
    """The engine's plane, and that of another worker, which keeps what comes and sends it back."""

    engine: End
    other: End


@pytest.fixture(params=[name for name in HERE if name != "nixl"])
def ends(request: pytest.FixtureRequest, tmp_path: Path, engine: RolloutEngine) -> Iterator[Ends]:
    transports, fingerprint = (str(request.param),), engine.layout.fingerprint
    with (
        a_plane(tmp_path, 1, transports, fingerprint=fingerprint) as one,
        a_plane(tmp_path, 2, transports, fingerprint=fingerprint) as two,
    ):
        yield Ends(one, two)


@pytest.mark.parametrize("seed", some_of(range(SEEDS), 0))
def test_no_timing_costs_a_token(engine: RolloutEngine, driver: Driver, ends: Ends, seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=60, ignore_eos=True, stop_token_ids=()))
        for request in mixed_requests(SLOTS)
    ]
    untouched, before = run(engine, requests), engine.load().reprefilled_tokens
    for request in requests:
        driver.add(request)
    leaving: dict[str, Leaving] = {}
    away: dict[str, KvSnapshot] = {}
    due: dict[str, int] = {}
    moved = step = 0
    while driver.unfinished():
        step += 1
        for name in list(leaving):
            if due[name] <= step:
                _continue(engine, ends, name, leaving, away)
                due[name] = step + chance.randint(1, STEPS_MAX)
        for name in [name for name in away if due[name] <= step]:
            engine.take_in(_sent_back(ends, name, away.pop(name)))
            moved += 1
        here = [name for name in driver.unfinished() if name not in leaving and name not in away]
        if here and step > 1 and chance.random() < 0.5:
            name = chance.choice(here)
            ends.other.plane.expect(name, 1, MOST_BYTES)
            copying = copying_of(engine, ends.engine.plane, ends.other.peer, name)
            leaving[name] = Leaving(copying, chance.random() < GIVEN_UP_SHARE)
            due[name] = step
        driver.step()
    for name in leaving:
        leaving[name].copying.cancel()
        ends.other.plane.forget(name)
    leaving.clear()
    assert driver.responses == untouched
    assert moved >= MOVES_MIN
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens, engine.reserved) == (0, 0, 0, 0)
    assert load.reprefilled_tokens == before
    until(lambda: ends.engine.plane.held_bytes() == ends.other.plane.held_bytes() == (0, 0))


def _continue(
    engine: RolloutEngine, ends: Ends, name: str, leaving: dict[str, Leaving], away: dict[str, KvSnapshot]
) -> None:
    """The next round. When all of it is there, it is away, and the engine has it no more."""
    each = leaving[name]
    try:
        last = each.copying.advance()
    except (NotFound, NotMovable):  # the response has ended
        last = None
        each.gives_up = True
    if last is None and each.copying.is_ahead and not each.gives_up:
        assert each.copying.current is not None
        each.copying.current.done.result(WAIT_S)
        return
    if each.gives_up:
        each.copying.cancel()
        ends.other.plane.forget(name)
        del leaving[name]
        if each.copying.tokens >= 0:
            engine.thaw(name)
        return
    assert last is not None
    away[name] = ends.other.plane.take(last.done.result(WAIT_S).key)
    engine.remove(name)
    del leaving[name]


def _sent_back(ends: Ends, name: str, snapshot: KvSnapshot) -> KvSnapshot:
    ends.engine.plane.expect(name, 2, MOST_BYTES)
    sent = ends.other.plane.send(ends.engine.peer, name, snapshot).done.result(WAIT_S)
    return ends.engine.plane.take(sent.key)
