"""vLLM with the shared KV tier, against LMCache's own server: what requests find there, and that it changes nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dora.data.types import RequestSpec, SamplingParams
from dora.models.tiny import make_tiny
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import (
    EVERYTHING,
    GREEDY,
    KV_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    ROUNDING,
    SAMPLED,
    SAMPLINGS,
    SLOTS,
    Driver,
    Response,
    farthest,
)
from tests.contract.guesses import guessed
from tests.contract.tiers import WAIT_S, TierProcess, needs_lmcache, serving

JOIN = "dora.worker.vllm.connector.SnapshotConnector.join"  # imported by the tests alone: it imports vLLM
pytestmark = [needs_lmcache, pytest.mark.xdist_group("vllm-moe")]  # a process imports vLLM for many tests

PROMPT_TOKENS = 100  # three whole chunks of 32, and a rest
CHUNK_TOKENS = 32


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    base = tmp_path_factory.mktemp("versions")
    return {version: make_tiny("dense", base / f"v{version}", seed=version) for version in (1, 2)}


@pytest.fixture(scope="module")
def tier_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierProcess]:
    with serving(tmp_path_factory.mktemp("tier")) as process:
        yield process


@pytest.fixture(scope="module")
def started(tier_process: TierProcess, weights: dict[int, Path]) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        weights[1],
        EngineSettings(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS),
        tier_endpoint=tier_process.endpoint,
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(started: VllmEngine, tier_process: TierProcess, weights: dict[int, Path]) -> VllmEngine:
    """The engine with version 1, the tier up, and nothing in the engine's own prefix cache."""
    if tier_process.process is None:
        tier_process.start()
    assert started.tier is not None and started.tier.up.wait(WAIT_S)
    started.load_weights(1, weights[1], None)
    return started


def request(name: str, seed: int, version: int = 1, sampling: SamplingParams = GREEDY) -> RequestSpec:
    """A request with a prompt of its own: ``seed`` says which."""
    prompt = tuple((seed * 31 + 7 * place * place + place) % 60 for place in range(PROMPT_TOKENS))
    return RequestSpec(name, version, prompt, replace(sampling, ignore_eos=True, stop_token_ids=()))


def response_of(engine: VllmEngine, wanted: RequestSpec) -> Response:
    driver = Driver(engine)
    driver.add(wanted)
    return driver.finish()[wanted.request_id]


def found(engine: VllmEngine) -> int:
    load = engine.load().tier
    assert load is not None
    return load.found_tokens


def settle(engine: VllmEngine, weights: dict[int, Path]) -> None:
    """All that is on its way to the tier is there, and the engine's own prefix cache is empty: as another worker's."""
    assert engine.tier is not None and engine.tier.drain(WAIT_S)
    assert engine.version is not None
    engine.load_weights(engine.version, weights[engine.version], None)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_prompt_that_was_seen_is_found_and_the_response_is_the_same(
    engine: VllmEngine, weights: dict[int, Path], sampling: SamplingParams
) -> None:
    seed = 10 + SAMPLINGS.index(sampling)
    first = response_of(engine, request("a", seed, sampling=sampling))
    before = found(engine)
    settle(engine, weights)
    again = response_of(engine, request("b", seed, sampling=sampling))
    assert found(engine) - before == 3 * CHUNK_TOKENS
    assert farthest({"": again}, {"": first}) <= ROUNDING


@pytest.mark.parametrize("drafts", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_request_whose_worker_died_computes_its_last_tokens_only(
    engine: VllmEngine, tier_process: TierProcess, weights: dict[int, Path], drafts: bool
) -> None:
    """Its KV was kept chunk by chunk; what comes back is that very KV, so the response goes on bitwise. Drafts leave no
    KV of a token that was not sampled.
    """
    wanted = request("a", 20, sampling=replace(EVERYTHING, max_tokens=80))
    whole = response_of(engine, wanted)
    if drafts:
        tier_process.kill()
        tier_process.start()
        assert engine.tier is not None and engine.tier.up.wait(WAIT_S)
        engine.load_weights(1, weights[1], None)
        response_of(engine, request("first", 21))  # a new server may be slow at first, and counts as down then
        settle(engine, weights)
        assert engine.tier.up.wait(WAIT_S)
        with guessed(engine, {"a": whole}) as guessing:
            assert response_of(engine, wanted) == whole
        assert guessing is not None and 0 < guessing.accepted_tokens < guessing.drafted_tokens
    settle(engine, weights)
    delivered = 55
    resumed = replace(
        wanted,
        request_id="b",
        output_token_ids=tuple(whole.token_ids[:delivered]),
        logprobs=tuple(whole.logprobs[:delivered]),
    )
    found_before, computed_before = found(engine), engine.load().reprefilled_tokens
    with guessed(engine, {"b": whole} if drafts else None):
        assert response_of(engine, resumed) == whole
    kv_tokens = PROMPT_TOKENS + delivered - 1
    assert found(engine) - found_before == kv_tokens // CHUNK_TOKENS * CHUNK_TOKENS == 128
    assert engine.load().reprefilled_tokens - computed_before == kv_tokens - 128 == 26


def test_a_step_that_does_not_wait_for_what_the_tier_gave_it_is_found(
    engine: VllmEngine, weights: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite's stores write as late as they may (``conftest``)."""
    wanted = request("a", 25, sampling=SAMPLED)
    whole = response_of(engine, wanted)
    settle(engine, weights)
    monkeypatch.setattr(JOIN, lambda self: None)
    before = found(engine)
    assert response_of(engine, replace(wanted, request_id="b")).logprobs != whole.logprobs
    assert found(engine) - before == 3 * CHUNK_TOKENS


def test_a_session_finds_its_earlier_turns(engine: VllmEngine, weights: dict[int, Path]) -> None:
    """Its worker dies while its tools run. Then another session of the same tokens finds the given ones, too."""
    sampling = replace(SAMPLED, max_tokens=6)
    begun = replace(request("a", 80, sampling=sampling), keeps=True)
    given = tuple(range(3, 43))
    driver = Driver(engine)
    driver.add(begun)
    driver.finish()
    ended = engine.request("a")
    engine.remove("a")
    settle(engine, weights)
    found_before, computed_before = found(engine), engine.load().reprefilled_tokens
    driver.add(replace(ended.extended(given, sampling), request_id="b"))
    driver.finish()
    assert found(engine) - found_before == 3 * CHUNK_TOKENS
    assert engine.load().reprefilled_tokens - computed_before == PROMPT_TOKENS + 5 - 3 * CHUNK_TOKENS
    engine.remove("b")
    settle(engine, weights)
    found_before, computed_before = found(engine), engine.load().reprefilled_tokens
    driver.add(replace(ended.extended(given, sampling), request_id="c"))
    responses = driver.finish()
    assert found(engine) - found_before == 4 * CHUNK_TOKENS
    assert engine.load().reprefilled_tokens == computed_before
    engine.remove("c")
    settle(engine, weights)
    driver.add(replace(begun, request_id="d"))
    driver.finish()
    engine.extend("d", given, sampling)
    alone = responses.pop("d")
    alone.token_ids, alone.logprobs = [*alone.token_ids, *given], [*alone.logprobs, *[0.0] * len(given)]
    alone.finish_reason, driver.responses["d"] = None, alone
    driver.finish()
    engine.remove("d")
    for name in ("b", "c"):
        assert farthest({"": driver.responses[name]}, {"": alone}) <= ROUNDING


def test_the_branches_of_a_fork_are_found_by_their_own_tokens(engine: VllmEngine, weights: dict[int, Path]) -> None:
    """A chunk of the branch that was left has been overwritten where it lay in the engine."""
    sampling = replace(GREEDY, max_tokens=6)
    driver = Driver(engine)
    driver.add(replace(request("a", 90, sampling=sampling), keeps=True))
    driver.finish()
    branches = []
    for given in (range(3, 43), range(43, 3, -1)):
        driver.responses["a"].finish_reason = None
        engine.extend("a", tuple(given), sampling, after=6)
        driver.responses["a"].token_ids[6:] = given
        driver.responses["a"].logprobs[6:] = [0.0] * len(given)
        driver.finish()
        branches.append((*engine.request("a").prompt_token_ids, *engine.request("a").output_token_ids))
    engine.remove("a")
    for number, token_ids in enumerate(branches):
        again = RequestSpec(f"b{number}", 1, token_ids, sampling)
        settle(engine, weights)
        found_before = found(engine)
        response = response_of(engine, again)
        assert found(engine) - found_before == 128
        computed = response_of(engine, replace(again, request_id="c", prompt_logprobs=True))  # it reads no cache
        assert farthest({"": response}, {"": computed}) <= ROUNDING


def test_without_the_tier_it_computes_all(engine: VllmEngine, weights: dict[int, Path]) -> None:
    """The same worker's death, measured where the tier has nothing of the request: another version's."""
    engine.load_weights(2, weights[2], None)
    wanted = request("a", 20, version=2)
    resumed = replace(wanted, output_token_ids=(1,) * 55, logprobs=(-1.0,) * 55)
    before = engine.load().reprefilled_tokens
    response_of(engine, replace(resumed, sampling=replace(resumed.sampling, max_tokens=60)))
    assert engine.load().reprefilled_tokens - before == PROMPT_TOKENS + 54


def test_kv_of_one_version_is_never_found_by_a_request_of_another(engine: VllmEngine, weights: dict[int, Path]) -> None:
    response_of(engine, request("a", 30))
    settle(engine, weights)
    before = found(engine)
    engine.load_weights(2, weights[2], None)
    second = response_of(engine, request("b", 30, version=2))
    assert found(engine) == before
    settle(engine, weights)
    assert response_of(engine, request("c", 30, version=2)) == second and found(engine) > before


def test_a_request_that_comes_with_its_own_kv_takes_none_from_the_tier(
    engine: VllmEngine, weights: dict[int, Path]
) -> None:
    wanted = request("a", 40, sampling=SAMPLED)
    whole = response_of(engine, wanted)
    settle(engine, weights)
    driver = Driver(engine)
    driver.add(wanted)
    driver.step(12)
    before = found(engine)
    snapshot = driver.take_out("a")
    settle(engine, weights)
    engine.take_in(snapshot)
    assert driver.finish()["a"] == whole and found(engine) == before


def test_a_canary_is_neither_looked_for_nor_kept(engine: VllmEngine, weights: dict[int, Path]) -> None:
    assert engine.tier is not None
    before = engine.load().tier
    engine.load_weights(1, weights[1], None)
    assert engine.tier.drain(WAIT_S) and engine.load().tier == before


def test_a_request_frozen_or_removed_while_it_is_looked_for_is_just_that(
    engine: VllmEngine, weights: dict[int, Path]
) -> None:
    whole = response_of(engine, request("a", 50))
    settle(engine, weights)
    driver = Driver(engine)
    driver.add(request("runs", 51))
    driver.step()
    driver.add(request("a", 50))
    driver.add(request("b", 50))
    driver.step()  # both wait for the tier, as another request decodes
    engine.freeze("a")
    engine.remove("b")
    del driver.responses["b"]
    driver.step(3)
    assert driver.responses["a"].token_ids == []
    engine.thaw("a")
    finished = driver.finish()["a"]
    assert farthest({"": finished}, {"": whole}) <= ROUNDING


def test_without_its_server_a_worker_goes_on(
    engine: VllmEngine, tier_process: TierProcess, weights: dict[int, Path]
) -> None:
    whole = response_of(engine, request("a", 60))
    settle(engine, weights)
    driver = Driver(engine)
    driver.add(request("a", 60))
    driver.step(5)
    lost = engine.load().tier.losses  # type: ignore[union-attr]
    tier_process.kill()
    driver.add(request("b", 61))
    driver.add(request("c", 60))
    responses = driver.finish()
    assert farthest({name: responses[name] for name in ("a", "c")}, {"a": whole, "c": whole}) <= ROUNDING
    assert responses["b"].finish_reason == "length"
    load = engine.load().tier
    assert load is not None and not load.up and load.losses == lost + 1
    tier_process.start()
    assert engine.tier is not None and engine.tier.up.wait(WAIT_S)
    engine.load_weights(1, weights[1], None)
    before = found(engine)
    response_of(engine, request("d", 60))
    settle(engine, weights)
    response_of(engine, request("e", 60))
    assert found(engine) - before == 3 * CHUNK_TOKENS, "the new server got what the old one had"


@pytest.mark.parametrize("with_tier", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_preempted_request_finds_what_it_had(
    engine: VllmEngine, tier_process: TierProcess, weights: dict[int, Path], with_tier: bool
) -> None:
    """Its blocks have gone to others meanwhile, so that the engine's own prefix cache has nothing of it."""
    wanted = request("a", 70, sampling=replace(SAMPLED, max_tokens=80))
    whole = response_of(engine, replace(wanted, request_id="alone"))
    driver = Driver(engine)
    driver.add(wanted)
    driver.step(45)
    kv_tokens = PROMPT_TOKENS + 45 - 1
    assert engine.tier is not None and engine.tier.drain(WAIT_S)
    if not with_tier:
        tier_process.kill()
    found_before, computed_before = found(engine), engine.load().reprefilled_tokens
    assert engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)
    response = driver.finish()["a"]
    assert farthest({"": response}, {"": whole}) <= ROUNDING
    in_tier = kv_tokens // CHUNK_TOKENS * CHUNK_TOKENS if with_tier else 0
    assert found(engine) - found_before == in_tier
    assert engine.load().reprefilled_tokens - computed_before == kv_tokens - in_tier
