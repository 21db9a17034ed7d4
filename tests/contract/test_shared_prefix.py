"""Samples of one prompt share its blocks: these move once to each worker, and are given back with their last request.

On vLLM alone: the fake engine keeps the KV of each request for itself, so none of its requests shares a block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dora.data.types import RequestSpec
from dora.kvtransfer.copying import Copying
from dora.kvtransfer.layout import blocks_for
from dora.worker.engine import RolloutEngine
from dora.worker.prefixes import SentPrefixes
from tests.contract.driver import FILLING, SAMPLINGS, Driver, Response, VersionFolder, make_request, run
from tests.contract.planes import WAIT_S, End, a_plane
from tests.contract.test_copying import arrived
from tests.contract.workers import copying_of

MOST_BYTES = 1 << 24
PROMPT_TOKENS = 140
SHARED = 4  # full blocks of the prompt
STEPS = 40
NAMES = ("r0", "r1", "r2")


def samples() -> list[RequestSpec]:
    prompt = make_request(0, prompt_tokens=PROMPT_TOKENS).prompt_token_ids
    sampled = [make_request(index, sampling, max_tokens=60 + 15 * index) for index, sampling in enumerate(SAMPLINGS)]
    ends = {"ignore_eos": True, "stop_token_ids": ()}
    return [
        replace(each, prompt_token_ids=prompt, sampling=replace(each.sampling, **ends))  # type: ignore[arg-type]
        for each in sampled
    ]


@dataclass
class Ends:
    """One engine that plays both ends: a request leaves it, and comes back into blocks that were reserved for it."""

    driver: Driver
    source: End
    target: End
    sent: SentPrefixes = field(default_factory=SentPrefixes)

    @property
    def engine(self) -> RolloutEngine:
        return self.driver.engine

    def start(self) -> None:
        first, *others = samples()
        self.driver.add(first)
        self.driver.step()
        for request in others:
            self.driver.add(request)
        self.driver.step(STEPS)

    def begin(self, name: str) -> Copying:
        reservation = self.engine.reserve(name, PROMPT_TOKENS - 40)  # with the margin it is enough; three have room
        self.target.plane.expect(name, 1, MOST_BYTES, reservation)
        return self.copying(name)

    def copying(self, name: str) -> Copying:
        return copying_of(self.engine, self.source.plane, self.target.peer, name, self.sent)

    def move(self, name: str) -> int:
        """A whole move; how many blocks were sent for it."""
        copying = self.begin(name)
        blocks = self.copied(copying)
        self.land(name, copying)
        return blocks

    def copied(self, copying: Copying) -> int:
        while copying.advance() is None:
            if copying.current is not None:
                copying.current.done.exception(WAIT_S)
        sent = sum(each.body_bytes for each in [*copying.arrived, arrived(copying)])
        blocks, odd = divmod(sent, self.engine.layout.block_bytes)
        assert not odd
        return blocks

    def land(self, name: str, copying: Copying) -> None:
        self.engine.remove(name)
        self.engine.take_in(self.target.plane.take(arrived(copying).key))

    def undo(self, name: str) -> None:
        self.engine.release(name)
        self.target.plane.forget(name)

    def whole(self, name: str) -> int:
        """All blocks of a request."""
        response = self.driver.responses[name]
        return blocks_for(PROMPT_TOKENS + len(response.token_ids) - 1, self.engine.layout.block_tokens)


@pytest.fixture(scope="module")
def untouched(kind: str, started_engine: RolloutEngine, version_folder: VersionFolder) -> dict[str, Response]:
    started_engine.load_weights(1, version_folder(1), None)
    return {} if kind == "fake" else run(started_engine, samples())


@pytest.fixture
def ends(
    kind: str, untouched: dict[str, Response], engine: RolloutEngine, driver: Driver, tmp_path: Path
) -> Iterator[Ends]:
    """Afterwards every request has gone on as if it had not moved, and no block is held."""
    if kind == "fake":
        pytest.skip("each request of this engine has its KV for itself")
    before = engine.load().reprefilled_tokens
    with a_plane(tmp_path, 1) as source, a_plane(tmp_path, 2) as target:
        ends = Ends(driver, source, target)
        ends.start()
        yield ends
        reserved = engine.reserved
        for name in NAMES:
            engine.release(name)
        assert not reserved
        assert driver.finish() == untouched
        assert engine.load().reprefilled_tokens == before
        assert engine.load().kv_used_tokens == 0
        assert target.plane.held_bytes() == (0, 0)


def test_blocks_of_the_prompt_move_with_the_first_sample_alone(ends: Ends) -> None:
    assert ends.move("r0") == ends.whole("r0")
    ends.driver.step()
    assert ends.move("r1") == ends.whole("r1") - SHARED
    ends.driver.step(3)
    assert ends.move("r2") == ends.whole("r2") - SHARED


def test_samples_that_move_at_once_wait_for_the_first_ones_round(ends: Ends) -> None:
    copies = {name: ends.begin(name) for name in NAMES}
    assert copies["r0"].advance() is None and copies["r0"].current is not None
    blocks = {name: ends.copied(copying) for name, copying in copies.items()}
    assert blocks == {name: ends.whole(name) - SHARED * (name != "r0") for name in NAMES}
    for name in ("r2", "r0", "r1"):  # whoever has brought the blocks need not be the first that is taken in
        ends.land(name, copies[name])
        ends.driver.step()


@pytest.mark.parametrize("at_once", [pytest.param(False, marks=pytest.mark.full), True])
def test_blocks_of_a_prompt_that_travels_in_parts_move_once(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    monkeypatch.setattr("dora.kvtransfer.plane.PART_BYTES", 2 * ends.engine.layout.block_bytes)
    copies = {name: ends.begin(name) for name in NAMES[: 3 if at_once else 1]}
    assert copies["r0"].advance() is None
    assert ends.copied(copies["r0"]) == ends.whole("r0") and len(copies["r0"].arrived) > 2
    for name in NAMES[1:]:
        copying = copies.get(name) or ends.begin(name)
        assert ends.copied(copying) == ends.whole(name) - SHARED
        copies[name] = copying
    for name, copying in copies.items():
        ends.land(name, copying)
        ends.driver.step()


def test_a_shared_block_is_one_block_at_the_target(ends: Ends) -> None:
    used = ends.engine.load().kv_used_tokens
    for name in NAMES:
        ends.move(name)
        ends.driver.step()
    assert ends.engine.load().kv_used_tokens <= used + ends.engine.layout.block_tokens * len(NAMES)


def test_a_request_that_came_by_a_prefix_may_move_on_before_it_has_a_slot(ends: Ends) -> None:
    ends.move("r0")
    ends.move("r1")
    ends.engine.freeze("r1")
    snapshot = ends.engine.export("r1")
    assert snapshot is not None and snapshot.ahead == 0
    ends.engine.remove("r1")
    ends.engine.take_in(snapshot)


def cancelled(ends: Ends) -> None:
    ends.copied(ends.begin("r0"))
    ends.undo("r0")
    ends.engine.thaw("r0")


def ended(ends: Ends) -> None:
    ends.move("r0")
    while ends.driver.responses["r0"].finish_reason is None:
        ends.driver.step()


MISSES: dict[str, Callable[[Ends], object]] = {
    "its reservation was cancelled": cancelled,
    "its request has ended": ended,
}


@pytest.mark.parametrize("why", MISSES)
def test_blocks_that_are_there_no_more_are_sent(ends: Ends, why: str) -> None:
    MISSES[why](ends)
    assert ends.move("r1") == ends.whole("r1")
    assert ends.move("r2") == ends.whole("r2") - SHARED, "the others share what was sent instead"


def test_a_claim_outlives_the_handoff_that_brought_the_blocks(ends: Ends) -> None:
    first, second = ends.begin("r0"), ends.begin("r1")
    ends.copied(first)
    assert ends.copied(second) == ends.whole("r1") - SHARED
    ends.undo("r0")
    ends.engine.thaw("r0")
    ends.driver.step(3)
    ends.land("r1", second)
    ends.driver.step()


@pytest.mark.parametrize(
    "order", [("r0", "r1"), pytest.param(("r1", "r0"), marks=pytest.mark.full)], ids=lambda order: order[0]
)
def test_claimed_blocks_are_not_written_again(ends: Ends, order: tuple[str, str]) -> None:
    """The copy of the first sample begins anew in the same reservation: the second one has its blocks already."""
    first, second = ends.begin("r0"), ends.begin("r1")
    ends.copied(first)
    ends.copied(second)
    ends.engine.thaw("r0")
    ends.driver.step(3)
    again = ends.copying("r0")
    assert ends.copied(again) == ends.whole("r0")
    assert not any(sent.is_ahead for sent in again.arrived)
    for name in order:
        ends.land(name, {"r0": again, "r1": second}[name])
        ends.driver.step()


def test_a_claim_that_is_undone_returns_everything(ends: Ends) -> None:
    ends.move("r0")
    ends.driver.step()
    used = ends.engine.load().kv_used_tokens
    second = ends.begin("r1")
    ends.copied(second)
    ends.undo("r1")
    ends.engine.thaw("r1")
    assert ends.engine.load().kv_used_tokens == used


def test_a_request_that_is_preempted_leaves_its_blocks_to_others(
    kind: str, engine: RolloutEngine, driver: Driver, tmp_path: Path
) -> None:
    """In that very step: what it has brought is kept for nobody who is not there."""
    if kind == "fake":
        pytest.skip("each request of this engine has its KV for itself")
    fillers = [replace(make_request(index, FILLING, 120), request_id=f"filler{index}") for index in range(4)]
    for request in (*fillers, samples()[2]):
        driver.add(request)
    driver.step(4)  # prompts are prefilled two a step
    with a_plane(tmp_path, 1) as source, a_plane(tmp_path, 2) as target:
        Ends(driver, source, target).move("r2")
    pool = engine.core.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
    while not driver.is_preempted("r2"):
        driver.step()
    held = sum(engine.final_blocks(request.request_id)[1] + 1 for request in fillers)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - held
