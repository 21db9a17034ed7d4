"""One request on its way out, round by round: a test steps the engine between them, and waits for each to arrive."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import NotFound, TransferFailed
from dora.kvtransfer.copying import Copying, NotMovable
from dora.kvtransfer.transfer import Sent
from dora.models.tiny import make_tiny
from dora.worker.fake.engine import FakeEngine
from dora.worker.rounds import LEFT_BLOCKS, ROUNDS_MAX
from tests.contract.driver import Driver, Response, make_request, run
from tests.contract.planes import WAIT_S, End, a_plane, until
from tests.contract.workers import copying_of
from tests.refusals import refused

BLOCK_TOKENS = 4
PROMPT_TOKENS = 60
MOST_BYTES = 1 << 20
LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=150, ignore_eos=True)


@dataclass
class Ends:
    """An engine with one request that decodes, its plane and the target's."""

    driver: Driver
    source: End
    target: End
    model: Path
    request: RequestSpec = field(default_factory=lambda: make_request(1, LONG, PROMPT_TOKENS))

    def copying(self) -> Copying:
        self.target.plane.expect("r1", 1, MOST_BYTES)
        return copying_of(self.driver.engine, self.source.plane, self.target.peer, "r1")

    def start(self, steps: int = 1) -> None:
        self.driver.add(self.request)
        self.driver.step(steps)

    def untouched(self) -> Response:
        return run(an_engine(self.model), [self.request])["r1"]


def an_engine(model: Path, kv_tokens: int = 1024, version: int = 1) -> FakeEngine:
    engine = FakeEngine(
        slots=4, kv_tokens=kv_tokens, block_tokens=BLOCK_TOKENS, max_model_len_tokens=256, mean_tokens=25, model=model
    )
    engine.load_weights(version, model, None)
    return engine


def arrived(copying: Copying) -> Sent:
    assert copying.current is not None
    return copying.current.done.result(WAIT_S)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("dense", tmp_path / "model", seed=1)


@pytest.fixture(params=["shm", "tcp"])
def ends(request: pytest.FixtureRequest, tmp_path: Path, model: Path) -> Iterator[Ends]:
    transports = (str(request.param),)
    with a_plane(tmp_path, 1, transports) as source, a_plane(tmp_path, 2, transports) as target:
        yield Ends(Driver(an_engine(model)), source, target, model)


def rounds_until_frozen(ends: Ends, copying: Copying, steps: list[int]) -> str:
    """The key of the last round. ``steps`` between the rounds that come before it."""
    for count in steps:
        assert copying.advance() is None and copying.is_ahead
        ends.driver.step(count)
        arrived(copying)
    assert copying.advance() is not None and not copying.is_ahead
    return arrived(copying).key


def test_rounds_shrink_to_the_tail_and_are_one_snapshot_at_the_target(ends: Ends) -> None:
    ends.start()
    copying = ends.copying()
    key = rounds_until_frozen(ends, copying, [40, 20, 4])
    first, second, third = (sent.body_bytes for sent in copying.arrived)
    block_bytes = ends.driver.engine.layout.block_bytes
    assert (first, second, third) == (14 * block_bytes, 10 * block_bytes, 5 * block_bytes)
    assert arrived(copying).body_bytes <= (LEFT_BLOCKS + 2) * block_bytes, "what the freeze has to wait for"
    snapshot = ends.target.plane.take(key)
    assert copying.tokens == len(snapshot.request.output_token_ids) == 65
    ends.driver.engine.remove("r1")
    ends.driver.engine.take_in(snapshot)
    assert ends.driver.finish()["r1"] == ends.untouched()
    assert ends.driver.engine.load().reprefilled_tokens == 0


def test_what_does_not_shrink_is_copied_while_frozen(ends: Ends) -> None:
    """The request grows as fast as it is copied: further rounds would bring nothing."""
    ends.start()
    copying = ends.copying()
    key = rounds_until_frozen(ends, copying, [20, 20])
    assert [sent.body_bytes for sent in copying.arrived][1:] == [5 * ends.driver.engine.layout.block_bytes]
    assert ends.target.plane.take(key).kv_tokens == PROMPT_TOKENS + 40


def test_the_rounds_have_an_end(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.worker.rounds.LEFT_BLOCKS", -1)  # it never counts as little
    ends.start()
    copying = ends.copying()
    counts = [36, 32, 28, 20, 12, 8, 4, 0]
    assert len(counts) == ROUNDS_MAX
    rounds_until_frozen(ends, copying, counts)


@pytest.mark.parametrize("steps", [3, 20], ids=["shrinks", "grows as fast"])
def test_a_round_travels_in_parts(ends: Ends, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """If the request grows as fast as it is copied, the rest, too, travels in parts, while it is frozen."""
    most_bytes = 3 * ends.driver.engine.layout.block_bytes
    monkeypatch.setattr("dora.kvtransfer.plane.PART_BYTES", most_bytes)
    ends.start()
    copying = ends.copying()
    tokens = []
    while copying.advance() is None:
        arrived(copying)
        ends.driver.step(steps)
        tokens.append(len(ends.driver.responses["r1"].token_ids))
    sizes = [sent.body_bytes for sent in copying.arrived]
    assert max(sizes) == most_bytes and sizes[:4] == [most_bytes] * 4, "14 blocks are full at first"
    assert arrived(copying).body_bytes <= most_bytes + 2 * ends.driver.engine.layout.block_bytes
    assert (tokens[-1] == tokens[-6]) == (steps == 20)
    snapshot = ends.target.plane.take(arrived(copying).key)
    ends.driver.engine.remove("r1")
    ends.driver.engine.take_in(snapshot)
    assert ends.driver.finish()["r1"] == ends.untouched()


def test_a_request_larger_than_the_memory_in_flight_moves(tmp_path: Path, model: Path) -> None:
    """Its parts go on into the blocks that are reserved for it."""
    engine = FakeEngine(
        slots=4, kv_tokens=1 << 17, block_tokens=BLOCK_TOKENS, max_model_len_tokens=1 << 16, mean_tokens=25, model=model
    )
    engine.load_weights(1, model, None)
    request = make_request(1, LONG, 40_000)
    untouched = run(engine, [request])
    driver = Driver(engine)
    driver.add(request)
    driver.step(4)
    memory_bytes = 1 << 18
    whole_bytes = 40_000 // BLOCK_TOKENS * engine.layout.block_bytes
    assert whole_bytes > 2 * memory_bytes
    with (
        a_plane(tmp_path, 1, ("shm",), memory_bytes=memory_bytes) as source,
        a_plane(tmp_path, 2, ("shm",), memory_bytes=memory_bytes) as target,
    ):
        target.plane.expect("r1", 1, 2 * whole_bytes, engine.reserve("r1", 40_200))
        copying = copying_of(engine, source.plane, target.peer, "r1")
        while copying.advance() is None:
            arrived(copying)
        snapshot = target.plane.take(arrived(copying).key)
        engine.remove("r1")
        engine.take_in(snapshot)
    assert driver.finish() == untouched


def test_a_short_request_is_frozen_at_once(ends: Ends) -> None:
    ends.request = make_request(1, LONG, 3 * BLOCK_TOKENS)
    ends.start()
    copying = ends.copying()
    assert copying.advance() is not None and not copying.arrived
    assert ends.target.plane.take(arrived(copying).key).kv_tokens == 3 * BLOCK_TOKENS


# What happens meanwhile.


def test_a_request_that_ends_during_the_rounds_ends_the_copy(ends: Ends) -> None:
    ends.start()
    copying = ends.copying()
    assert copying.advance() is None
    assert ends.driver.finish()["r1"] == ends.untouched()
    arrived(copying)
    with refused(NotFound, names=("r1",)):
        copying.advance()
    ends.target.plane.forget("r1")
    until(lambda: sum(ends.target.plane.held_bytes()) == 0)


def test_a_target_that_refuses_a_later_round_costs_the_source_nothing(ends: Ends) -> None:
    ends.start()
    copying = ends.copying()
    assert copying.advance() is None
    ends.driver.step(40)
    arrived(copying)
    ends.target.plane.forget("r1")  # its reservation was cancelled
    assert copying.advance() is None
    assert copying.current is not None
    with refused(TransferFailed, names=("ticket", "'r1'", "epoch 1")):
        copying.current.done.result(WAIT_S)
    ends.driver.step()
    with refused(TransferFailed, names=("ticket", "'r1'", "epoch 1")):
        copying.advance()
    assert copying.tokens < 0, "it was never frozen"
    assert ends.driver.finish()["r1"] == ends.untouched()


def test_a_target_that_cannot_take_the_request_in_says_so_with_the_first_round(ends: Ends) -> None:
    """Before the source freezes anything: it decodes on."""
    ends.start()
    other = an_engine(ends.model, version=2)
    ends.target.plane.expect("r1", 1, MOST_BYTES, other.reserve("r1", PROMPT_TOKENS))
    copying = copying_of(ends.driver.engine, ends.source.plane, ends.target.peer, "r1")
    assert copying.advance() is None
    with refused(TransferFailed, names=("request.version", 1, 2)):
        arrived(copying)
    until(lambda: sum(ends.target.plane.held_bytes()) == 0)
    assert copying.tokens < 0, "it was never frozen"
    assert ends.driver.finish()["r1"] == ends.untouched()


def test_a_request_preempted_during_the_rounds_starts_over(ends: Ends) -> None:
    """Its blocks are others when it is back; those that were copied before are dropped at the target."""
    engine = an_engine(ends.model, kv_tokens=256)
    ends.driver.engine = engine
    others = [replace(make_request(index, LONG, 40), request_id=f"o{index}") for index in (2, 3)]
    for request in others:
        ends.driver.add(request)
    ends.start()
    copying = ends.copying()
    assert copying.advance() is None
    arrived(copying)
    preempted = False
    while not preempted:
        ends.driver.step()
        preempted = engine.load().waiting > 0
    with refused(NotMovable, field="request_id", value="r1"):
        copying.advance()
    engine.thaw("r1")
    while engine.load().waiting:
        ends.driver.step()
    first = ends.copying()
    key = rounds_until_frozen(ends, first, [4])
    assert ends.target.plane.take(key).request.output_token_ids == tuple(ends.driver.responses["r1"].token_ids)


def test_rounds_of_before_a_preemption_are_void(ends: Ends) -> None:
    engine = an_engine(ends.model, kv_tokens=256)
    ends.driver.engine = engine
    for index in (2, 3):
        ends.driver.add(replace(make_request(index, LONG, 40), request_id=f"o{index}"))
    ends.start()
    copying = ends.copying()
    assert copying.advance() is None
    arrived(copying)
    segment = engine.full_blocks("r1", 0).segment
    while not engine.load().waiting:
        ends.driver.step()
    while engine.load().waiting:  # nobody looked while it was out of its slot
        ends.driver.step()
    assert engine.full_blocks("r1", 0).segment > segment
    assert copying.advance() is None
    arrived(copying)
    assert copying.arrived[0].body_bytes < arrived(copying).body_bytes, "all of it, once more"
    assert copying.advance() is not None
    snapshot = ends.target.plane.take(arrived(copying).key)
    assert snapshot.kv_tokens == PROMPT_TOKENS + len(ends.driver.responses["r1"].token_ids) - 1
    engine.remove("r1")
    engine.take_in(snapshot)
    assert ends.driver.finish()["r1"] == ends.untouched()


def test_what_a_source_sent_before_it_died_is_dropped_with_its_reservation(ends: Ends, tmp_path: Path) -> None:
    ends.start()
    with a_plane(tmp_path, 3, ends.target.transports) as source:
        ends.target.plane.expect("r1", 3, MOST_BYTES)
        copying = copying_of(ends.driver.engine, source.plane, ends.target.peer, "r1")
        assert copying.advance() is None
        ends.driver.step(40)
        first = arrived(copying)
        assert copying.advance() is None
        second = arrived(copying)
    for sent in (first, second):
        with refused(NotFound, field="locator", value=sent.key):
            ends.target.plane.take(sent.key)
    ends.target.plane.forget("r1")
    until(lambda: sum(ends.target.plane.held_bytes()) == 0)


def test_a_round_follows_only_on_one_of_its_own_try(ends: Ends) -> None:
    """Remains of an earlier try are not used by a later one."""
    ends.start()
    earlier = ends.copying()
    assert earlier.advance() is None
    old = arrived(earlier).key
    ends.driver.step(40)
    later = ends.copying()
    assert later.advance() is None
    arrived(later)
    late = ends.source.plane.send_parts(ends.target.peer, "r1", [memoryview(b"x")], after=old)
    with refused(TransferFailed, names=("round", old)):
        late.done.result(WAIT_S)
    ends.driver.step(4)
    assert later.advance() is not None
    ends.target.plane.take(arrived(later).key)
