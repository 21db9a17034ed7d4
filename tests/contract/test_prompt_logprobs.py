"""Prompt logprobs, whatever engines are made of: those of a forward pass, once, with a turn's first token.

What moves, waits or is resumed before that token loses none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dora.data.types import RequestSpec
from dora.errors import Conflict, InvalidValue
from dora.weights.reference import read_reference
from dora.worker.fake.model import FakeModel
from tests.contract.driver import GREEDY, ROUNDING, SAMPLED, SAMPLINGS, Driver, VersionFolder, make_request, run
from tests.refusals import refused

GIVEN = tuple(range(9, 47))
Score = Callable[[Sequence[int]], list[float]]


@pytest.fixture
def score(kind: str, version_folder: VersionFolder) -> Score:
    """The logprobs of tokens but the first by a forward pass without an engine."""
    if kind == "fake":
        folder = version_folder(1)
        model = FakeModel(read_reference(folder).vocab_size, 25, 0)
        model.load(1, folder, None)
        return lambda token_ids: list(model.score(token_ids))
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(version_folder(1), dtype=torch.float32).eval()

    def scored(token_ids: Sequence[int]) -> list[float]:
        with torch.inference_mode():
            logprobs = net(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
        return [float(row[token_id]) for row, token_id in zip(logprobs, token_ids[1:], strict=True)]

    return scored


def told(driver: Driver) -> list[str]:
    """The requests whose prompt logprobs have come, and were not checked."""
    return [name for name, response in driver.responses.items() if response.prompt_logprobs]


def wanting(request: RequestSpec, *, keeps: bool = False) -> RequestSpec:
    return replace(request, prompt_logprobs=True, keeps=keeps)


def check(driver: Driver, score: Score, name: str, before: Sequence[int], first_token: int = 0) -> None:
    """The logprobs of the tokens ``before`` the request's turn have come, once. Forgets them."""
    ((at, found),) = driver.responses[name].prompt_logprobs
    assert at == first_token
    assert np.abs(np.subtract(found, score(before))).max() <= ROUNDING
    driver.responses[name].prompt_logprobs.clear()


def test_they_are_those_of_a_forward_pass_and_change_no_token(driver: Driver, score: Score) -> None:
    """Also of a prompt that the prefix cache has, and beside requests without them."""
    lengths = (2, 31, 32, 33, 100)
    requests = [
        make_request(index, SAMPLINGS[index % 3], length, max_tokens=4, min_tokens=0)
        for index, length in enumerate(lengths)
    ]
    alone = run(driver.engine, requests)
    for request in requests:
        driver.add(wanting(request))
    driver.add(make_request(7, SAMPLED, 40, max_tokens=4))
    found = driver.finish()
    for request in requests:
        assert found[request.request_id].token_ids == alone[request.request_id].token_ids
        check(driver, score, request.request_id, request.prompt_token_ids)
    assert not told(driver)


def test_a_prompt_of_one_token_has_none(driver: Driver) -> None:
    driver.add(wanting(make_request(0, GREEDY, 1, max_tokens=2)))
    driver.finish()
    assert not told(driver)


@pytest.mark.parametrize("is_dropped", [False, True], ids=["kept", "dropped"])
def test_a_turn_has_those_of_all_before_it(driver: Driver, score: Score, is_dropped: bool) -> None:
    """Its kept KV is given up. The next turn, without them, keeps the KV again."""
    engine, name = driver.engine, "r0"
    driver.add(replace(make_request(0, SAMPLED, 40, max_tokens=6), keeps=True))
    driver.finish()
    for turn in range(3):
        request = engine.request(name)
        assert request.kept
        wants, before, had = turn != 1, engine.load().reprefilled_tokens, len(request.output_token_ids)
        if is_dropped and wants:
            engine.remove(name)
            engine.add(request.extended(GIVEN, request.sampling, prompt_logprobs=True))
        else:
            engine.extend(name, GIVEN, request.sampling, prompt_logprobs=wants)
        response = driver.responses[name]
        response.token_ids += GIVEN
        response.logprobs += [0.0] * len(GIVEN)
        response.finish_reason = None
        driver.finish()
        if wants:
            tokens = [*request.prompt_token_ids, *request.output_token_ids, *GIVEN]
            check(driver, score, name, tokens, had + len(GIVEN))
        assert bool(engine.load().reprefilled_tokens > before) == wants
    assert not told(driver)
    driver.clear()
    assert engine.load().kv_used_tokens == 0


def test_nothing_moves_before_they_have_come(driver: Driver, score: Score) -> None:
    """A request that is frozen before has to be computed again, where it goes. One that has a token has told them."""
    engine, request = driver.engine, wanting(make_request(0, SAMPLED, 70, max_tokens=9), keeps=True)
    driver.add(request)
    engine.freeze("r0")
    assert engine.export("r0") is None
    engine.thaw("r0")
    driver.step(2)
    check(driver, score, "r0", request.prompt_token_ids)
    engine.take_in(driver.take_out("r0"))
    driver.finish()
    engine.extend("r0", GIVEN, request.sampling, prompt_logprobs=True)
    with refused(Conflict, field="request_id"):
        engine.full_blocks("r0", 0)
    engine.freeze("r0")
    assert engine.export("r0") is None
    driver.responses["r0"].token_ids += GIVEN
    driver.responses["r0"].logprobs += [0.0] * len(GIVEN)
    driver.responses["r0"].finish_reason = None
    waits = engine.request("r0")
    assert waits.owes_prompt
    engine.remove("r0")
    engine.add(waits)
    driver.finish()
    check(driver, score, "r0", [*waits.prompt_token_ids, *waits.output_token_ids], len(waits.output_token_ids))
    driver.clear()


def test_a_request_that_is_resumed_after_its_first_token_has_told_them(driver: Driver, score: Score) -> None:
    request = wanting(make_request(0, SAMPLED, 40, max_tokens=9))
    driver.add(request)
    driver.step(3)
    check(driver, score, "r0", request.prompt_token_ids)
    driver.engine.remove("r0")
    driver.resume(request)
    driver.finish()
    assert not told(driver)


def test_a_preempted_request_tells_them_once(driver: Driver, score: Score) -> None:
    request = wanting(make_request(50, SAMPLED, 60, max_tokens=40))
    driver.preempt(request)
    driver.drop(*driver.fillers)
    driver.finish()
    check(driver, score, "r50", request.prompt_token_ids)
    assert not told(driver)


def test_a_refused_turn_keeps_what_is_there(driver: Driver) -> None:
    engine = driver.engine
    driver.add(replace(make_request(0, SAMPLED, 40, max_tokens=3), keeps=True))
    driver.finish()
    before = engine.load()
    wrong = replace(SAMPLED, stop_token_ids=(1 << 20,))
    with refused(InvalidValue, field="sampling.stop_token_ids"):
        engine.extend("r0", GIVEN, wrong, prompt_logprobs=True)
    assert engine.load() == before and engine.request("r0").kept
    driver.clear()
