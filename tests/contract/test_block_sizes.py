"""A request moves between engines whose blocks differ in size, or whose layers have a window: whole, and in rounds."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora.data.types import SamplingParams
from dora.errors import LayoutMisfit, SnapshotRefused
from dora.models.tiny import make_tiny
from dora.rpc import dora_pb2 as pb
from dora.session.failure import fail
from dora.worker.fake.engine import FakeEngine
from tests.contract.driver import Driver, Response, make_request, over_the_wire, run
from tests.contract.planes import WAIT_S, End, a_plane
from tests.contract.workers import copying_of
from tests.refusals import refused

LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=150, ignore_eos=True)
REQUEST = make_request(1, LONG, 60)
MOST_BYTES = 1 << 20
SIZES = [(4, 4, 0), (4, 6, 0), (6, 4, 0), (4, 4, 24), (4, 7, 24), (16, 4, 9)]  # source's, target's block; window


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("dense", tmp_path / "model", seed=1)


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[tuple[End, End]]:
    with a_plane(tmp_path, 1, ("shm",)) as source, a_plane(tmp_path, 2, ("shm",)) as target:
        yield source, target


def an_engine(model: Path, block_tokens: int, window_tokens: int = 0) -> FakeEngine:
    engine = FakeEngine(
        slots=4,
        kv_tokens=1024,
        block_tokens=block_tokens,
        max_model_len_tokens=256,
        mean_tokens=25,
        model=model,
        window_tokens=window_tokens,
    )
    engine.load_weights(1, model, None)
    return engine


def moved_in_rounds(planes: tuple[End, End], driver: Driver, taker: FakeEngine, steps: list[int]) -> str:
    source, target = planes
    target.plane.expect("r1", 1, MOST_BYTES, taker.reserve("r1", 100))
    copying = copying_of(driver.engine, source.plane, target.peer, "r1")
    for count in steps:
        assert copying.advance() is None and copying.is_ahead and copying.current is not None
        driver.step(count)
        copying.current.done.result(WAIT_S)
    assert copying.advance() is not None and copying.current is not None
    return copying.current.done.result(WAIT_S).key


def finished_at(target: FakeEngine, driver: Driver) -> Response:
    rest = Driver(target)
    rest.responses = driver.responses
    return rest.finish()["r1"]


@pytest.mark.parametrize(("ours", "theirs", "window"), SIZES)
def test_a_request_goes_on_in_blocks_of_another_size(
    planes: tuple[End, End], model: Path, ours: int, theirs: int, window: int
) -> None:
    untouched = run(an_engine(model, ours, window), [REQUEST])["r1"]
    driver, target = Driver(an_engine(model, ours, window)), an_engine(model, theirs, window)
    driver.add(REQUEST)
    driver.step()
    key = moved_in_rounds(planes, driver, target, [40, 8] if ours < 16 else [8])
    snapshot = planes[1].plane.take(key)
    assert (snapshot.ahead > 0) == (ours == theirs and not window), "other blocks wait in host memory"
    target.take_in(snapshot)
    driver.engine.remove("r1")
    assert finished_at(target, driver) == untouched
    assert target.load().reprefilled_tokens == 0


def test_engines_differ_in_what_they_read_and_not_in_how_they_store_it(model: Path) -> None:
    four, six, windowed = (an_engine(model, *sizes) for sizes in ((4,), (6,), (4, 24)))
    assert four.capability.fingerprint == six.capability.fingerprint != windowed.capability.fingerprint
    assert run(four, [REQUEST]) == run(six, [REQUEST]) != run(windowed, [REQUEST])


def test_what_does_not_fit_is_computed_again_and_the_outcome_says_why(model: Path) -> None:
    driver, target = Driver(an_engine(model, 4)), an_engine(model, 6)
    driver.add(REQUEST)
    driver.step(5)
    driver.engine.freeze("r1")
    snapshot = driver.engine.export("r1")
    assert snapshot is not None
    packed = over_the_wire(replace(snapshot, layout=replace(snapshot.layout, interiors=())))
    with refused(LayoutMisfit, field="layout.block_tokens", value=4, names=("6",)) as caught:
        target.take_in(packed)
    assert not target.has_work()
    outcome = pb.WorkerOutcome()
    fail("copy_in", outcome, caught.value)
    assert (outcome.error_kind, outcome.ok) == ("not_movable", False), "no other try would fare better"
    fail("copy_in", outcome, SnapshotRefused("checksum"))
    assert outcome.error_kind == "refused"
