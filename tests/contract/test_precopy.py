"""Full blocks are shown while their request decodes, and only those: what came in rounds goes on like the whole.

What came ahead of the freeze lies in the target's blocks already, which are reserved for it and given back else.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import Conflict, NotFound, SnapshotRefused
from dora.kvtransfer.codec import opening_of
from dora.kvtransfer.snapshot import SegmentId
from dora.worker.engine import RolloutEngine
from tests.contract.driver import EVERYTHING, GREEDY, SAMPLED, SLOTS, Driver, Response, VersionFolder, make_request, run
from tests.refusals import refused

LONG = 120  # prompt tokens: some full blocks from the start


def long_requests(*samplings: SamplingParams) -> list[RequestSpec]:
    return [make_request(index, sampling, LONG, max_tokens=90) for index, sampling in enumerate(samplings)]


def test_no_half_filled_block_is_ever_shown(engine: RolloutEngine, driver: Driver) -> None:
    """Each block as it was first shown is the block that the whole snapshot has at the end."""
    request = make_request(1, replace(SAMPLED, ignore_eos=True), LONG, max_tokens=100)
    driver.add(request)
    driver.step()
    shown: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for _ in range(95):
        full = engine.full_blocks("r1", 0)
        kv_tokens = LONG + len(driver.responses["r1"].token_ids) - 1
        assert full.end * engine.layout.block_tokens < kv_tokens
        for name, pieces in full.blocks.items():
            for index, block in enumerate(np.concatenate(pieces)):
                shown[name].setdefault(index, block.copy())
        driver.step()
    engine.freeze("r1")
    snapshot = engine.export("r1")
    assert snapshot is not None
    for name, blocks in shown.items():
        whole = np.concatenate(snapshot.blocks[name])
        assert len(blocks) >= 5
        assert all(np.array_equal(whole[index], block) for index, block in blocks.items())


def test_a_request_without_full_blocks_of_its_own_is_refused_with_the_reason(
    engine: RolloutEngine, driver: Driver
) -> None:
    for index in range(SLOTS + 1):
        driver.add(make_request(index, replace(GREEDY, ignore_eos=True), 20))
    with refused(Conflict, field="request_id", value="r0", allowed="a request that decodes"):
        engine.full_blocks("r0", 0)
    driver.step()
    with refused(Conflict, field="request_id", value=f"r{SLOTS}", allowed="a request that decodes"):
        engine.full_blocks(f"r{SLOTS}", 0)
    assert engine.full_blocks("r0", 0).end == 0
    with refused(NotFound, field="request_id", value="nobody"):
        engine.full_blocks("nobody", 0)


def test_what_a_request_showed_before_it_was_preempted_is_void(engine: RolloutEngine, driver: Driver) -> None:
    names = [f"r{index}" for index in range(SLOTS)]
    for index in range(SLOTS):  # more KV than there is, at their ends
        driver.add(make_request(index, replace(SAMPLED, ignore_eos=True), 100, max_tokens=90))
    driver.step(2)
    refused: set[str] = set()
    before: dict[str, SegmentId] = {}
    again: set[str] = set()
    while driver.engine.has_work():
        for name in driver.unfinished():
            try:
                segment = engine.full_blocks(name, 0).segment
            except Conflict as error:
                refused.add(str(error))
                continue
            if segment != before.setdefault(name, segment):
                again.add(name)
        driver.step()
    assert any("is preempted" in reason for reason in refused)
    assert again and again < set(names), "back in a slot, with other blocks"


# The place of a request that is to come.


def used_blocks(engine: RolloutEngine) -> int:
    return engine.load().kv_used_tokens // engine.layout.block_tokens


@pytest.mark.parametrize(
    ("kv_tokens", "ahead"), [pytest.param(LONG, [4, 4, 4], marks=pytest.mark.full), (30, [3, 0, 0])]
)
def test_a_request_goes_on_in_the_blocks_that_were_written_ahead(
    engine: RolloutEngine, driver: Driver, kv_tokens: int, ahead: list[int]
) -> None:
    """Bitwise, also where only some rounds had room; and no block is left over."""
    requests = long_requests(GREEDY, SAMPLED, replace(EVERYTHING, stop_token_ids=(), ignore_eos=True))
    untouched = run(engine, requests)
    before = engine.load().reprefilled_tokens
    for request in requests:
        driver.add(request)
    driver.step(5)
    for request, written in zip(requests, ahead, strict=True):
        used = used_blocks(engine)
        reservation = engine.reserve(request.request_id, kv_tokens)
        assert used_blocks(engine) == used + len(reservation.block_ids) > used
        snapshot = driver.take_out_in_rounds(request.request_id, 6, 2, reservation)
        assert snapshot.ahead == written
        engine.take_in(snapshot)
        tokens = len(driver.responses[request.request_id].token_ids)
        driver.step()
        assert len(driver.responses[request.request_id].token_ids) == tokens + 1
    driver.step(2)
    assert driver.finish() == untouched
    assert (engine.load().reprefilled_tokens, engine.load().kv_used_tokens) == (before, 0)


def test_blocks_that_came_ahead_are_not_computed_again_after_a_preemption(
    engine: RolloutEngine, driver: Driver
) -> None:
    """They are in the prefix cache like any others, if there is one; what follows is the same up to rounding."""
    mover = make_request(1, replace(GREEDY, ignore_eos=True), LONG, max_tokens=60)
    untouched = run(engine, [mover])["r1"]
    driver.add(mover)
    driver.step(4)
    engine.take_in(driver.take_out_in_rounds("r1", 2, 1, engine.reserve("r1", LONG)))
    driver.step(4)
    response = driver.responses["r1"]
    engine.remove("r1")
    before = engine.load().reprefilled_tokens
    resumed = replace(mover, output_token_ids=tuple(response.token_ids), logprobs=tuple(response.logprobs))
    driver.add(resumed)
    driver.finish()
    assert response.token_ids == untouched.token_ids[: len(response.token_ids)]
    again = engine.load().reprefilled_tokens - before
    assert again < 32 or again == LONG + len(response.token_ids) - 1  # an engine without a prefix cache


@pytest.mark.parametrize("written", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_reservation_that_is_released_gives_its_blocks_back(
    engine: RolloutEngine, driver: Driver, written: int
) -> None:
    mover = long_requests(SAMPLED)[0]
    untouched = run(engine, [mover])["r0"]
    driver.add(mover)
    driver.step(5)
    used = used_blocks(engine)
    reservation = engine.reserve("r0", LONG)
    body = np.zeros(engine.layout.block_bytes * 2, np.uint8)
    reservation.begin(opening_of(engine.layout, mover).raw)
    for _ in range(written):
        assert reservation.write(0, body)
    engine.release("r0")
    engine.release("r0")
    assert used_blocks(engine) == used
    assert not reservation.write(0, body), "it is nobody's any more"
    assert driver.finish()["r0"] == untouched
    assert engine.load().kv_used_tokens == 0


def test_a_request_that_is_cancelled_before_its_first_step_gives_its_blocks_back(
    engine: RolloutEngine, driver: Driver
) -> None:
    driver.add(make_request(1, SAMPLED, LONG))
    driver.step(4)
    engine.take_in(driver.take_out_in_rounds("r1", 1, 1, engine.reserve("r1", LONG)))
    assert engine.load().kv_used_tokens > 0
    engine.remove("r1")
    assert (engine.load().kv_used_tokens, engine.reserved) == (0, 0)


def test_a_request_that_waits_for_a_slot_moves_on_with_its_blocks(engine: RolloutEngine, driver: Driver) -> None:
    mover = replace(make_request(1, replace(SAMPLED, ignore_eos=True), LONG, max_tokens=60), request_id="mover")
    untouched = run(engine, [mover])["mover"]
    driver.add(mover)
    driver.step(4)
    reservation = engine.reserve("mover", LONG)
    snapshot = driver.take_out_in_rounds("mover", 2, 1, reservation)
    engine.take_in(snapshot)
    again = driver.take_out("mover")
    assert (snapshot.ahead, again.ahead) == (3, 0)
    assert engine.load().kv_used_tokens == 0
    engine.take_in(again)
    assert driver.finish()["mover"] == untouched


def test_a_snapshot_whose_first_blocks_are_not_here_is_refused(engine: RolloutEngine, driver: Driver) -> None:
    driver.add(make_request(1, SAMPLED, LONG))
    driver.step(4)
    snapshot = driver.take_out_in_rounds("r1", 1, 1, engine.reserve("r1", LONG))
    engine.release("r1")
    with refused(SnapshotRefused, field="ahead", value=3, names=(0,)):
        engine.take_in(snapshot)
    engine.reserve("r1", LONG)
    with refused(SnapshotRefused, field="ahead", value=3, names=(0,)):
        engine.take_in(snapshot)
    engine.release("r1")
    assert not engine.has_work() and engine.load().kv_used_tokens == 0


def test_an_opening_that_the_engine_cannot_serve_is_refused_with_the_first_round(
    engine: RolloutEngine, driver: Driver
) -> None:
    request = make_request(1, SAMPLED, LONG)
    limit = engine.capability.max_model_len_tokens
    reservation = engine.reserve("r1", LONG)
    for wrong, name in (
        (replace(request, version=9), "request.version"),
        (replace(request, prompt_token_ids=(engine.capability.vocab_size,)), "prompt_token_ids"),
        (replace(request, prompt_token_ids=(3,) * limit), "prompt and output tokens"),
        (replace(request, sampling=replace(SAMPLED, top_p=0.0)), "sampling.top_p"),
    ):
        with refused(SnapshotRefused, field=name):
            reservation.begin(opening_of(engine.layout, wrong).raw)
    assert reservation.opening is None
    reservation.begin(opening_of(engine.layout, request).raw)
    engine.release("r1")


def test_a_snapshot_with_another_opening_is_taken_in_as_it_is(engine: RolloutEngine, driver: Driver) -> None:
    """The preparation belongs to an earlier try of the source, with fewer outputs or another request."""
    mover = make_request(1, replace(EVERYTHING, stop_token_ids=(), ignore_eos=True), LONG, max_tokens=60)
    untouched = run(engine, [mover])["r1"]
    for earlier in (mover, replace(mover, sampling=replace(mover.sampling, seed=99), prompt_token_ids=(7,) * 40)):
        driver.add(mover)
        driver.step(4)
        reservation = engine.reserve("r1", LONG)
        snapshot = driver.take_out("r1")
        reservation.begin(opening_of(engine.layout, earlier).raw)
        engine.take_in(snapshot)
        assert driver.finish()["r1"] == untouched


def test_a_round_is_written_only_where_it_fits(engine: RolloutEngine) -> None:
    block_bytes = engine.layout.block_bytes
    reservation = engine.reserve("r1", 2 * engine.layout.block_tokens)
    assert len(reservation.block_ids) == 4
    assert not reservation.write(0, np.zeros(block_bytes, np.uint8)), "nobody has said how it is laid out"
    other = replace(engine.layout, block_tokens=engine.layout.block_tokens + 1)
    reservation.begin(opening_of(other, make_request(1)).raw)
    assert not reservation.write(0, np.zeros(block_bytes, np.uint8))
    reservation.begin(opening_of(engine.layout, make_request(1)).raw)
    for first_bytes, size_bytes in ((0, 5 * block_bytes), (0, block_bytes + 1), (1, block_bytes), (block_bytes,) * 2):
        assert not reservation.write(first_bytes, np.zeros(size_bytes, np.uint8))
    assert reservation.write(0, np.zeros(3 * block_bytes, np.uint8)) and reservation.written == 3
    assert not reservation.write(3 * block_bytes, np.zeros(2 * block_bytes, np.uint8))
    engine.release("r1")


def test_a_request_without_room_is_refused_and_one_without_a_slot_waits_in_host_memory(
    engine: RolloutEngine, driver: Driver
) -> None:
    tokens = engine.capability.kv_tokens
    with refused(Conflict, field="kv blocks"):
        engine.reserve("r1", tokens)
    with refused(Conflict, names=("r2",)):
        for _ in range(2):
            engine.reserve("r2", 20)
    engine.release("r2")
    for index in range(SLOTS):
        driver.add(make_request(index, GREEDY, 20))
    driver.step()
    reservation = engine.reserve("waits", 20)
    reservation.begin(opening_of(engine.layout, make_request(1)).raw)
    assert len(reservation.block_ids) == 0 and not reservation.write(0, np.zeros(engine.layout.block_bytes, np.uint8))
    engine.release("waits")


def test_weights_are_not_replaced_under_a_reservation(engine: RolloutEngine, version_folder: VersionFolder) -> None:
    engine.reserve("r1", 20)
    with refused(Conflict, field="requests held", value=1):
        engine.load_weights(2, version_folder(2), None)
    engine.release("r1")
    engine.load_weights(2, version_folder(2), None)


def test_a_reserved_slot_is_there_when_its_request_comes(engine: RolloutEngine, driver: Driver) -> None:
    mover = replace(make_request(1, GREEDY, ignore_eos=True), request_id="mover")
    untouched = run(engine, [mover])["mover"]
    driver.add(mover)
    driver.step(5)
    snapshot = driver.take_out("mover")
    for index in range(SLOTS - 1):
        driver.add(make_request(index, GREEDY, 20))
    engine.reserve("mover", 40)
    driver.add(make_request(SLOTS, GREEDY, 20))
    driver.add(make_request(SLOTS + 1, GREEDY, 20))
    driver.step(3)
    assert (engine.load().running, engine.load().waiting) == (SLOTS - 1, 2), "the last slot is kept"
    engine.take_in(snapshot)
    driver.step()
    assert len(driver.responses["mover"].token_ids) == 6, "a token with the first step"
    assert driver.finish()["mover"] == untouched


@pytest.mark.parametrize("undone", [True, False])
def test_a_reservation_that_is_undone_keeps_nothing(engine: RolloutEngine, driver: Driver, undone: bool) -> None:
    for index in range(SLOTS):
        engine.reserve(f"r{index}", 20)
    for index in range(SLOTS):
        if undone:
            engine.release(f"r{index}")
        driver.add(make_request(index, GREEDY, 20))
    driver.step()
    assert engine.load().running == (SLOTS if undone else 0)
    for index in range(SLOTS):
        engine.release(f"r{index}")
    driver.finish()


def test_who_comes_with_kv_goes_before_all_that_have_none(engine: RolloutEngine, driver: Driver) -> None:
    """Into a full engine: it waits for the first slot, not for those that waited before it."""
    movers = [replace(make_request(index, GREEDY), request_id=f"mover{index}") for index in (1, 2)]
    for mover in movers:
        driver.add(mover)
    driver.step(3)
    snapshots = [driver.take_out(mover.request_id) for mover in movers]
    for index in range(SLOTS + 4):
        driver.add(make_request(index, GREEDY, 20, max_tokens=10 + 3 * index))
    driver.step(2)
    for snapshot in snapshots:
        engine.take_in(snapshot)
    first: list[str] = []
    tokens: Callable[[str], int] = lambda name: len(driver.responses.get(name, Response()).token_ids)  # noqa: E731
    late = ["mover1", "mover2", *(f"r{SLOTS + index}" for index in range(4))]
    before = {name: tokens(name) for name in late}
    while engine.has_work():
        driver.step()
        first += [name for name in late if tokens(name) > before[name] and name not in first]
    assert first == late
