"""Drafts that an engine verifies change no token, logprob or expert row, whatever they guess."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dora.data.remembered import Remembered, scope_of
from dora.data.sampling import effective
from dora.data.types import RequestSpec, SamplingParams
from dora.worker.vllm.engine import VllmEngine
from tests import v2_runner
from tests.contract.driver import (
    FILLING,
    GREEDY,
    ROUNDING,
    SAMPLED,
    SLOTS,
    Driver,
    Response,
    VersionFolder,
    farthest,
    make_request,
    mixed_requests,
    run,
)
from tests.contract.guesses import Guessing, model_drafter

# Batches of random sampling parameters, and their requests. Triton's interpreter takes a second for a step.
SEEDS, REQUESTS, TOKENS = (1, 3, 16) if v2_runner.IS_CHOSEN else (4, SLOTS, 60)
ON_CPUS = ("vllm-drafts", "vllm-drafts-moe", "vllm-drafts-window", "vllm-drafts-mla", "vllm-drafts-model")
ON_GPUS = ("vllm-v2-drafts", "vllm-v2-drafts-model")  # by their runner
ROUNDS = ("vllm-drafts-mla", *ON_GPUS)  # kinds whose logprobs depend on the batch, with drafts or without


@pytest.fixture(scope="module", params=ON_GPUS if v2_runner.IS_CHOSEN else ON_CPUS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plain(started_engine: VllmEngine, version_folder: VersionFolder) -> Iterator[VllmEngine]:
    """The engine with version 1, no request and no drafts."""
    started_engine.load_weights(1, version_folder(1), None)
    scheduler = started_engine.core.scheduler
    own, scheduler.drafter = scheduler.drafter, None
    yield started_engine
    scheduler.drafter = own


def guess(kind: str, engine: VllmEngine, responses: dict[str, Response], seed: int) -> Any:
    """Drafts what was sampled, with mistakes, or what the draft model says: version 1's weights."""
    if kind.endswith("drafts-model"):
        drafter = engine.core.scheduler.drafter = model_drafter(engine._drafter)
        return drafter
    guessing = Guessing(
        lambda name: list(responses[name].token_ids),
        lambda name: len(engine.request(name).output_token_ids),
        seed,
    )
    engine.core.scheduler.drafter = guessing
    return guessing


def requests_of(seed: int) -> list[RequestSpec]:
    """A full batch, each request with random sampling parameters."""
    chosen = random.Random(seed)
    requests = []
    for index in range(REQUESTS):
        sampling = SamplingParams(
            temperature=chosen.choice([0.0, 0.4, 1.0, 1.3]),
            seed=chosen.randrange(1 << 31),
            top_p=chosen.choice([1.0, 0.7]),
            top_k=chosen.choice([0, 4]),
            min_p=chosen.choice([0.0, 0.08]),
            max_tokens=chosen.randrange(TOKENS // 2, TOKENS),
            presence_penalty=chosen.choice([0.0, 0.9]),
            frequency_penalty=chosen.choice([0.0, -0.5]),
            repetition_penalty=chosen.choice([1.0, 1.3]),
            stop_token_ids=(5, 9, 14),
            stop=chosen.choice([(), ("1", "3 "), ("a",)]),
        )
        least = chosen.choice([0, min(25, sampling.max_tokens)])
        requests.append(make_request(index, effective(replace(sampling, min_tokens=least))))
    return requests


def check(kind: str, found: dict[str, Response], expected: dict[str, Response]) -> None:
    if kind in ROUNDS:
        assert farthest(found, expected) < ROUNDING
    else:
        assert found == expected


def test_no_sampling_parameter_makes_a_draft_change_a_response(kind: str, plain: VllmEngine) -> None:
    for seed in range(SEEDS):
        plain.core.scheduler.drafter = None
        expected = run(plain, requests_of(seed))
        guessing = guess(kind, plain, expected, seed)
        check(kind, run(plain, requests_of(seed)), expected)
        assert 0 < guessing.accepted_tokens < guessing.drafted_tokens
        assert guessing.longest > (1 if kind == "vllm-v2-drafts-model" else 2)  # penalties are not the draft model's


def test_a_request_moves_between_drafts(kind: str, plain: VllmEngine) -> None:
    requests = mixed_requests(6) if TOKENS > 16 else requests_of(7)
    expected = run(plain, requests)
    guess(kind, plain, expected, 1)
    driver, chosen = Driver(plain), random.Random(2)
    for request in requests:
        driver.add(request)
    while plain.has_work():
        driver.step()
        moving = chosen.choice(driver.unfinished() or [""])
        if moving and driver.responses[moving].token_ids:
            plain.take_in(driver.take_out(moving))
    check(kind, driver.responses, expected)


def test_a_killed_request_resumes_after_a_draft(kind: str, plain: VllmEngine) -> None:
    request = make_request(1, SAMPLED)
    expected = run(plain, [request])
    guess(kind, plain, expected, 3)
    driver = Driver(plain)
    driver.add(request)
    driver.step(4)
    assert driver.unfinished()
    plain.remove("r1")
    driver.resume(request)
    assert farthest(driver.finish(), expected) < ROUNDING


def test_drafts_under_pressure_preempt_nobody_more(kind: str, plain: VllmEngine) -> None:
    if kind == "vllm-v2-drafts-model":
        pytest.skip("Triton's interpreter takes a minute")
    requests = [make_request(index, replace(SAMPLED, max_tokens=100), 20) for index in range(SLOTS)]
    before = plain.load().preemptions
    expected = run(plain, requests)
    without = plain.load().preemptions - before
    guess(kind, plain, expected, 4)
    assert farthest(run(plain, requests), expected) < ROUNDING
    assert plain.load().preemptions - before - without <= without + 1


def test_a_session_goes_on_after_a_turn_that_ended_within_a_draft(kind: str, plain: VllmEngine) -> None:
    def two_turns() -> Response:
        driver = Driver(plain)
        sampling = replace(SAMPLED, max_tokens=60, stop=("1", "7", "9", "e"))
        driver.add(replace(make_request(3, sampling), keeps=True))
        driver.finish()
        response = driver.responses["r3"]
        response.finish_reason = None
        plain.extend("r3", (4, 8, 15), replace(GREEDY, max_tokens=30))
        response.token_ids += [4, 8, 15]
        response.logprobs += [0.0, 0.0, 0.0]
        driver.finish()
        plain.remove("r3")
        return response

    expected = {"r3": two_turns()}
    assert expected["r3"].finish_reason == "length"
    guess(kind, plain, expected, 5)
    assert farthest({"r3": two_turns()}, expected) < ROUNDING


def test_a_publication_ends_no_drafts(kind: str, plain: VllmEngine, version_folder: VersionFolder) -> None:
    requests = [replace(each, version=2) for each in mixed_requests(6)]
    canary = plain.load_weights(2, version_folder(2), None)
    expected = run(plain, requests)
    plain.load_weights(1, version_folder(1), None)
    drafter = guess(kind, plain, expected, 6)
    run(plain, mixed_requests(6))
    before = drafter.drafted_tokens
    assert plain.load_weights(2, version_folder(2), canary) == canary
    assert drafter.drafted_tokens == before > 0, "no drafts within the canary"
    check(kind, run(plain, requests), expected)
    assert drafter.drafted_tokens > before


def test_a_draft_model_that_equals_the_engines_is_right_about_every_token(
    kind: str, plain: VllmEngine, version_folder: VersionFolder
) -> None:
    """At each temperature, after publications, a move in mid-draft and a next turn: both have the same noise."""
    if not kind.endswith("drafts-model"):
        pytest.skip("its drafts are of no model")
    temperatures = (0.0, 0.5, 1.0, 1.3)
    requests = [make_request(at, replace(SAMPLED, temperature=each)) for at, each in enumerate(temperatures)]
    turn = replace(SAMPLED, temperature=0.8, seed=99, max_tokens=20)

    def all_of() -> dict[str, Response]:
        driver = Driver(plain)
        for request in requests:
            driver.add(replace(request, keeps=request == requests[3]))
        driver.step(3)
        plain.take_in(driver.take_out("r2"))
        driver.finish()
        response = driver.responses["r3"]
        plain.extend("r3", (4, 8, 15), turn)
        response.finish_reason = None
        response.token_ids += [4, 8, 15]
        response.logprobs += [0.0, 0.0, 0.0]
        driver.finish()
        plain.remove("r3")
        return driver.responses

    expected = all_of()
    drafter = guess(kind, plain, expected, 6)
    for version in (2, 1):
        plain.load_weights(version, version_folder(version), None)
    check(kind, all_of(), expected)
    assert 20 < drafter.accepted_tokens == drafter.drafted_tokens and drafter.longest > 2


def test_what_others_sampled_is_drafted(kind: str, plain: VllmEngine, started_engine: VllmEngine) -> None:
    from dora.worker.drafting.drafter import Drafter

    request = make_request(2, FILLING, 30)
    expected = run(plain, [request])
    drafter = plain.core.scheduler.drafter = Drafter(1 << 20, is_shared=True)
    scope, before = scope_of(request.prompt_token_ids), request.prompt_token_ids
    plain.remember(Remembered(scope, b"", (*before, *expected["r2"].token_ids)))
    found = run(plain, [request])
    check(kind, found, expected)
    assert drafter.accepted_tokens > len(expected["r2"].token_ids) // 2
    load = plain.load()
    assert (load.drafted_tokens, load.accepted_tokens) == (drafter.drafted_tokens, drafter.accepted_tokens)
