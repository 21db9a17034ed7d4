"""The contract of a move, as a table: what each state of a request means for it, whatever the request asks for.

Each request of ``asked`` is brought into each state of ``STATES`` and moved to an engine that has seen nothing. With
its KV it goes on as if it had not moved, to the last bit of a logprob, and no token is computed again. Without, it
begins anew after what was delivered, alike but for rounding, and each token whose KV is computed again is counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from tokenizers import Tokenizer

from dora.data.types import RequestSpec
from dora.errors import NotFound
from dora.kvtransfer.snapshot import KvSnapshot
from dora.worker.engine import RolloutEngine
from tests.contract.driver import (
    EVERYTHING,
    FILLING,
    GREEDY,
    MAX_MODEL_LEN_TOKENS,
    ROUNDING,
    SAMPLED,
    SLOTS,
    Driver,
    Response,
    VersionFolder,
    farthest,
    make_request,
    over_the_wire,
    run,
)
from tests.refusals import refused

PROMPT_TOKENS = 33  # a full block, which samples of one prompt share, and a token: eight fit into one step
SPAN = (20, 26)  # tokens of the free response that the stop string is made of
MIN_TOKENS = 30
SAMPLINGS = {
    "greedy": GREEDY,
    "a sample": SAMPLED,
    "a sample of the same prompt": replace(SAMPLED, seed=99),
    "penalties and truncation": replace(EVERYTHING, min_tokens=0, stop_token_ids=(), ignore_eos=True),
    "min_tokens": replace(SAMPLED, min_tokens=MIN_TOKENS),
    "a stop token": SAMPLED,
    "a stop string": SAMPLED,
    "the model's own end": replace(SAMPLED, ignore_eos=False, min_tokens=20),
}


@dataclass(frozen=True)
class Asked:
    """One request of each kind, by its id, and the responses of those that are left alone."""

    requests: dict[str, RequestSpec]
    untouched: dict[str, Response]


@pytest.fixture(scope="module")
def asked(started_engine: RolloutEngine, version_folder: VersionFolder) -> Asked:
    started_engine.load_weights(1, version_folder(1), None)
    requests = {}
    for index, (name, sampling) in enumerate(SAMPLINGS.items()):
        alike = make_request(index, sampling, PROMPT_TOKENS, max_tokens=48)
        requests[name] = replace(alike, request_id=name)
    one = requests["a sample"].prompt_token_ids
    requests["a sample of the same prompt"] = replace(requests["a sample of the same prompt"], prompt_token_ids=one)
    free = {name: response.token_ids for name, response in run(started_engine, requests.values()).items()}

    text = Tokenizer.from_file(str(version_folder(1) / "tokenizer.json")).decode
    ended, late = free["a stop token"], range(SPAN[0], SPAN[1] + 10)
    stops = {
        "min_tokens": {"stop_token_ids": tuple(sorted(set(free["min_tokens"][:MIN_TOKENS])))[:3]},
        "a stop token": {"stop_token_ids": (next(ended[at] for at in late if ended[at] not in ended[:at]),)},
        "a stop string": {"stop": (text(free["a stop string"][slice(*SPAN)], skip_special_tokens=False),)},
    }
    for name, change in stops.items():
        requests[name] = replace(requests[name], sampling=replace(requests[name].sampling, **change))
    started_engine.load_weights(1, version_folder(1), None)  # nothing is left in the prefix cache
    return Asked(requests, run(started_engine, requests.values()))


def test_each_request_asks_for_what_it_is_named_after(asked: Asked) -> None:
    responses = asked.untouched
    lengths = {name: len(response.token_ids) for name, response in responses.items()}
    assert responses["a sample"].token_ids != responses["a sample of the same prompt"].token_ids
    assert lengths["min_tokens"] >= MIN_TOKENS
    assert set(responses["min_tokens"].token_ids[: MIN_TOKENS - 1]).isdisjoint(
        asked.requests["min_tokens"].sampling.stop_token_ids
    )
    assert responses["a stop token"].finish_reason == "stop" and lengths["a stop token"] > SPAN[0]
    assert responses["a stop string"].stop and SPAN[0] < lengths["a stop string"] <= SPAN[1]
    assert lengths["the model's own end"] >= 20


# Into a state. Each takes requests that are not there yet; some are of one request alone.


def decodes(steps: int) -> Callable[[Driver, Sequence[RequestSpec]], None]:
    """So many tokens long."""

    def enter(driver: Driver, requests: Sequence[RequestSpec]) -> None:
        for request in requests:
            driver.add(request)
        driver.step(steps)
        assert all(len(driver.responses[name].token_ids) == steps for name in driver.unfinished())

    return enter


def full(driver: Driver) -> None:
    """Others take all slots."""
    for index in range(SLOTS):
        filler = make_request(index, FILLING, 20)
        driver.add(replace(filler, request_id=f"filler{index}"))
    driver.step()


def waits(driver: Driver, requests: Sequence[RequestSpec]) -> None:
    full(driver)
    for request in requests:
        driver.add(request)
    driver.step(3)
    assert driver.engine.load().waiting == len(requests)


def waits_with_tokens(driver: Driver, requests: Sequence[RequestSpec]) -> None:
    """Its worker has died, and this one has no slot yet."""
    decodes(9)(driver, requests)
    for request in requests:
        driver.engine.remove(request.request_id)
    full(driver)
    for request in requests:
        driver.resume(request)
    driver.step(3)
    assert driver.engine.load().waiting == len(requests)


def waits_with_kv(driver: Driver, requests: Sequence[RequestSpec]) -> None:
    decodes(9)(driver, requests)
    snapshots = [driver.take_out(request.request_id) for request in requests]
    full(driver)
    for snapshot in snapshots:
        driver.engine.take_in(snapshot)
    driver.step(3)
    assert driver.engine.load().waiting == len(requests)


def was_frozen(driver: Driver, requests: Sequence[RequestSpec]) -> None:
    decodes(5)(driver, requests)
    for request in requests:
        driver.engine.freeze(request.request_id)
    assert driver.engine.step() == []
    for request in reversed(requests):
        driver.engine.thaw(request.request_id)
    driver.step()


def has_moved(driver: Driver, requests: Sequence[RequestSpec]) -> None:
    decodes(5)(driver, requests)
    snapshots = [driver.take_out(request.request_id) for request in requests]
    for snapshot in snapshots:
        driver.engine.take_in(snapshot)
    driver.step(4)


def preempted(driver: Driver, requests: Sequence[RequestSpec]) -> None:
    (request,) = requests
    driver.preempt(request)
    assert driver.responses[request.request_id].token_ids


def was_preempted(driver: Driver, requests: Sequence[RequestSpec]) -> None:
    (request,) = requests
    driver.preempt(request)
    tokens = len(driver.responses[request.request_id].token_ids)
    while len(driver.responses[request.request_id].token_ids) == tokens:
        driver.step()


# Out of it.


def whole(driver: Driver, request_id: str) -> KvSnapshot | None:
    driver.engine.freeze(request_id)
    snapshot = driver.engine.export(request_id)
    copied = None if snapshot is None else over_the_wire(snapshot)
    driver.engine.remove(request_id)
    return copied


def in_rounds(driver: Driver, request_id: str) -> KvSnapshot | None:
    return driver.take_out_in_rounds(request_id, 1, 2)


@dataclass(frozen=True)
class State:
    """``with_kv``: it moves with its KV. ``is_alone``: it takes all others' blocks to bring one request there.

    ``rounded``: it was re-prefilled before, by its source.
    """

    enter: Callable[[Driver, Sequence[RequestSpec]], None]
    with_kv: bool = True
    take_out: Callable[[Driver, str], KvSnapshot | None] = whole
    is_alone: bool = False
    rounded: bool = False


STATES = {
    "waits": State(waits, with_kv=False),
    "waits, resumed from its tokens": State(waits_with_tokens, with_kv=False),
    "waits with its KV": State(waits_with_kv),
    "decodes, at its first token": State(decodes(1)),
    "decodes, before min_tokens": State(decodes(9)),
    "decodes, within a stop string": State(decodes(SPAN[0] + 2)),
    "decodes, after min_tokens": State(decodes(MIN_TOKENS + 3)),
    "decodes, while it is copied": State(decodes(1), take_out=in_rounds),
    "was frozen": State(was_frozen),
    "has moved before": State(has_moved),
    "is preempted": State(preempted, with_kv=False, is_alone=True),
    "was preempted": State(was_preempted, is_alone=True, rounded=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * state.rounded) for name, state in STATES.items()]
)
def test_a_request_moves_as_its_state_says(
    engine: RolloutEngine, driver: Driver, version_folder: VersionFolder, kind: str, asked: Asked, name: str
) -> None:
    state, count = STATES[name], 0
    every = list(asked.requests.values())
    for batch in [[request] for request in every] if state.is_alone else [every]:
        state.enter(driver, batch)
        snapshots = {name: state.take_out(driver, name) for name in driver.unfinished() if name in asked.requests}
        assert all((snapshot is not None) == state.with_kv for snapshot in snapshots.values())
        driver.drop(*driver.fillers)
        assert engine.load().kv_used_tokens == 0 and not engine.has_work()
        engine.load_weights(1, version_folder(1), None)  # the target: nothing is in its prefix cache

        before = engine.load().reprefilled_tokens
        again = bring_in(driver, asked, snapshots)
        found = {request.request_id: driver.finish()[request.request_id] for request in batch}
        check_equal({name: asked.untouched[name] for name in found}, found, exactly=not (again or state.rounded))
        # Two samples of one prompt that come together share its first block, where there is a prefix cache.
        has_cache = kind not in ("fake", "vllm-hybrid")
        shared = engine.layout.block_tokens if again and len(batch) > 1 and has_cache else 0
        assert engine.load().reprefilled_tokens - before == again - shared
        count += len(snapshots)
    assert count >= 4


def bring_in(driver: Driver, asked: Asked, snapshots: dict[str, KvSnapshot | None]) -> int:
    """Requests go on, those without a snapshot from their tokens; how many tokens have their KV computed again."""
    again = 0
    for name, snapshot in reversed(snapshots.items()):
        if snapshot is not None:
            driver.engine.take_in(snapshot)
        else:
            outputs = len(driver.responses[name].token_ids)
            again += PROMPT_TOKENS + outputs - 1 if outputs else 0
            driver.resume(asked.requests[name])
    return again


def check_equal(expected: dict[str, Response], found: dict[str, Response], *, exactly: bool) -> None:
    if exactly:
        assert found == expected
    else:
        assert farthest(found, expected) < ROUNDING
        ends = {name: (response.finish_reason, response.stop) for name, response in expected.items()}
        assert {name: (response.finish_reason, response.stop) for name, response in found.items()} == ends


def test_no_request_stands_in_the_middle_of_its_prefill(engine: RolloutEngine, driver: Driver) -> None:
    """A prompt that finds no room in a step waits whole, so a request has all its prompt's KV or none."""
    long = MAX_MODEL_LEN_TOKENS - 60
    for index in range(4):  # two do not fit into one step of vLLM
        driver.add(make_request(index, GREEDY, long))
    for _ in range(4):
        driver.step()
        for request_id, response in driver.responses.items():
            engine.freeze(request_id)
            snapshot = engine.export(request_id)
            assert (snapshot is not None) == bool(response.token_ids)
            assert snapshot is None or snapshot.kv_tokens == long + len(response.token_ids) - 1
        for request_id in reversed(driver.responses):  # each that waits returns to the head of the line
            engine.thaw(request_id)
    assert all(response.token_ids for response in driver.responses.values())


def test_what_has_ended_has_nothing_to_move(driver: Driver, asked: Asked) -> None:
    driver.add(asked.requests["a stop string"])
    driver.finish()
    for ask in (driver.engine.freeze, driver.engine.export, lambda name: driver.engine.full_blocks(name, 0)):
        with refused(NotFound, field="request_id", value="a stop string"):
            ask("a stop string")
