"""That routed experts are those of a request that nothing befell: each token's row once, whatever becomes of it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dora.data.types import RequestSpec, RoutingShape
from dora.models import routing
from dora.models.tiny import TinyKind, make_tiny
from dora.worker.engine import RolloutEngine
from dora.worker.fake.engine import FakeEngine
from tests.contract.driver import (
    FILLING,
    GREEDY,
    KV_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    ROUNDING,
    SAMPLED,
    SLOTS,
    Driver,
    Response,
    farthest,
    make_request,
    mixed_requests,
    over_the_wire,
    run,
)
from tests.contract.planes import a_plane
from tests.contract.pools import a_pool, park, sent_on
from tests.contract.test_engine_turns import TurnDriver, dropped, in_rounds, kept, moved, moved_late, sessions
from tests.contract.test_pool_engine import MOST_BYTES, POOL_EPOCH
from tests.contract.test_worker_handoff import peer_of
from tests.sweeps import some_of

pytestmark = pytest.mark.xdist_group("vllm-moe")  # a process imports vLLM for many tests

MODELS: dict[str, TinyKind] = {"fake": "moe", "vllm-moe": "moe", "vllm-mla": "mla", "vllm-hybrid": "hybrid"}
KINDS = [pytest.param(kind, marks=[pytest.mark.full] * (model != "moe")) for kind, model in MODELS.items()]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(MODELS[kind], tmp_path_factory.mktemp(kind) / "v1", seed=1)


@pytest.fixture(scope="module")
def shape(model: Path) -> RoutingShape:
    return routing(model)


@pytest.fixture(scope="module")
def engine(kind: str, model: Path) -> Iterator[RolloutEngine]:
    sizes = {"slots": SLOTS, "kv_tokens": KV_TOKENS, "max_model_len_tokens": MAX_MODEL_LEN_TOKENS}
    engine: RolloutEngine
    if kind == "fake":
        engine = FakeEngine(**sizes, mean_tokens=25, model=model, router_replay=True)
    else:
        from dora.worker.vllm.device.port import EngineSettings
        from dora.worker.vllm.engine import VllmEngine

        engine = VllmEngine(model, EngineSettings(**sizes), router_replay=True)
    engine.load_weights(1, model, None)
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: RolloutEngine) -> Iterator[Driver]:
    driver = Driver(engine)
    yield driver
    driver.clear()


def check_rows(responses: dict[str, Response], prompts: dict[str, int], shape: RoutingShape) -> None:
    """A row for each token that was fed, of distinct experts."""
    for name, response in responses.items():
        rows = np.array(response.routed_experts, np.uint8).reshape(-1, shape.layers, shape.top_k)
        assert len(rows) == prompts[name] + len(response.token_ids) - 1
        assert rows.max() < shape.experts and (rows[..., 0] != rows[..., 1]).all()


def test_each_token_that_was_fed_has_a_row(engine: RolloutEngine, driver: Driver, shape: RoutingShape) -> None:
    requests = mixed_requests(SLOTS)
    found = run(engine, requests)
    check_rows(found, {each.request_id: len(each.prompt_token_ids) for each in requests}, shape)
    assert len({bytes(response.routed_experts) for response in found.values()}) == len(found), "they are not all alike"


def test_experts_are_those_that_transformers_chooses(
    kind: str, engine: RolloutEngine, driver: Driver, model: Path, shape: RoutingShape
) -> None:
    if kind == "fake":
        pytest.skip("it routes by its KV, as no model does")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for request in mixed_requests(6):
        response = run(engine, [request])[request.request_id]
        tokens = [*request.prompt_token_ids, *response.token_ids[:-1]]
        assert np.array_equal(experts(response, shape), np.sort(chosen_by(reference, tokens), axis=2))


def chosen_by(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """The experts of each token: (tokens, layers, top_k)."""
    chosen: list[torch.Tensor] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _module, _args, output: chosen.append(output[2])) for gate in gates]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy()


def test_rows_of_a_prompt_come_with_its_kv(
    engine: RolloutEngine, driver: Driver, model: Path, shape: RoutingShape
) -> None:
    """A sample that shares the prompt of one that came from elsewhere, in an engine that never routed this prompt."""
    first = make_request(1, GREEDY, 100)
    second = replace(first, request_id="sample", sampling=replace(SAMPLED, seed=5))
    untouched = run(engine, [first, second])
    driver.add(first)
    driver.step(4)
    snapshot = driver.take_out(first.request_id)
    engine.load_weights(1, model, None)  # nothing is left in the prefix cache
    run(engine, [make_request(2 + index, FILLING, 100) for index in range(SLOTS)])  # nor in the blocks
    engine.take_in(snapshot)
    driver.step(2)
    driver.add(second)
    found = driver.finish()
    assert farthest(found, untouched) < ROUNDING  # latent attention rounds a prefill by what else is in its step
    for name, response in found.items():
        assert experts(response, shape).tolist() == experts(untouched[name], shape).tolist()


def experts(response: Response, shape: RoutingShape) -> np.ndarray:
    """Those of each token and layer, in the order of their ids: which of two weighs more is up to rounding."""
    return np.sort(np.array(response.routed_experts, np.uint8).reshape(-1, shape.layers, shape.top_k), axis=2)


def test_requests_that_move_keep_their_rows(engine: RolloutEngine, driver: Driver) -> None:
    requests = mixed_requests(SLOTS)
    untouched = run(engine, requests)
    for request in requests:
        driver.add(request)
    driver.step(6)
    for snapshot in [driver.take_out(name) for name in driver.unfinished()]:
        engine.take_in(over_the_wire(snapshot))
    assert driver.finish() == untouched


def test_requests_that_are_parked_keep_their_rows(engine: RolloutEngine, driver: Driver, tmp_path: Path) -> None:
    requests = mixed_requests(4)
    untouched = run(engine, requests)
    with (
        a_plane(tmp_path, 2, fingerprint=engine.layout.fingerprint) as end,
        a_pool(tmp_path, POOL_EPOCH, ("shm", "tcp")) as pool,
    ):
        for request in requests:
            driver.add(request)
        driver.step(9)
        moving = driver.unfinished()
        for name in moving:
            park(engine, end, pool, name, 1 << 20)
        for name in reversed(moving):
            end.plane.expect(name, POOL_EPOCH, MOST_BYTES)
            engine.take_in(end.plane.take(sent_on(pool, peer_of(end), name)))
        assert driver.finish() == untouched


@pytest.mark.parametrize("tokens", some_of((0, 1, 7), 7))
def test_requests_that_are_re_prefilled_tell_new_rows_only(engine: RolloutEngine, driver: Driver, tokens: int) -> None:
    """As after a worker's death: what was told before stays, and what follows continues it."""
    requests = mixed_requests(SLOTS)
    untouched = run(engine, requests)
    for request in requests:
        driver.add(request)
    driver.step(tokens)
    for request in requests:
        if driver.responses[request.request_id].finish_reason is None:
            engine.remove(request.request_id)
            driver.resume(request)
    found = driver.finish()
    assert {name: each.token_ids for name, each in found.items()} == {
        name: each.token_ids for name, each in untouched.items()
    }
    assert {name: each.routed_experts for name, each in found.items()} == {
        name: each.routed_experts for name, each in untouched.items()
    }


def test_a_request_that_was_preempted_tells_no_row_twice(
    engine: RolloutEngine, driver: Driver, shape: RoutingShape
) -> None:
    request = replace(make_request(3, FILLING, 40), request_id="victim")
    untouched = run(engine, [request])["victim"]
    driver.preempt(request)
    driver.drop(*driver.fillers)
    found = driver.finish()["victim"]
    assert (found.token_ids, found.routed_experts) == (untouched.token_ids, untouched.routed_experts)
    check_rows({"victim": found}, {"victim": 40}, shape)


Reference = Callable[[RequestSpec, list[int]], np.ndarray]


@pytest.fixture(scope="module")
def expected(kind: str, engine: RolloutEngine, model: Path, shape: RoutingShape) -> Reference:
    """The experts of a prompt and the response tokens after it, as of one reading: by transformers, or as the prompt
    of a single answer of the fake engine. The last token has none.
    """
    if kind == "fake":

        def of_fake(request: RequestSpec, token_ids: list[int]) -> np.ndarray:
            prompt = (*request.prompt_token_ids, *token_ids[:-1])
            single = RequestSpec("single", request.version, prompt, replace(GREEDY, max_tokens=1))
            return experts(run(engine, [single])["single"], shape)

        return of_fake
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def of_transformers(request: RequestSpec, token_ids: list[int]) -> np.ndarray:
        return np.sort(chosen_by(reference, [*request.prompt_token_ids, *token_ids[:-1]]), axis=2)

    return of_transformers


@pytest.mark.parametrize("between", [kept, moved, moved_late, in_rounds, dropped])
def test_each_turn_brings_the_rows_of_what_it_fed(
    engine: RolloutEngine, shape: RoutingShape, expected: Reference, between: Callable[..., None]
) -> None:
    """Given tokens have rows, and so has the last token of the turn before, once: together those of one reading."""
    turns = TurnDriver(engine)
    played = sessions((1, 40, 7))
    for session in played:
        turns.add(session.request)
    turns.finish()
    for _ in range(3):
        for session in played:
            between(turns, session)
        turns.finish()
    for session in played:
        response = turns.responses[session.request.request_id]
        assert experts(response, shape).tolist() == expected(session.request, response.token_ids).tolist()
    turns.drop(*list(turns.responses))


@pytest.mark.parametrize("cut", [False, True], ids=["started", "cut"])
@pytest.mark.parametrize("first_token", some_of((0, 4, 6, 10, 13, 17, 18), 0, 13, 18))
def test_a_fork_brings_the_rows_from_the_token_before_its_given_ones(
    engine: RolloutEngine, shape: RoutingShape, expected: Reference, first_token: int, cut: bool
) -> None:
    """After the prompt, in the midst of a turn, at its end, among given tokens, which come again, and after these."""
    turns = TurnDriver(engine)
    (session,) = sessions((7,))[1:2]
    name, given = session.request.request_id, (9, 8, 7, 6)
    turns.add(session.request)
    turns.finish()
    kept(turns, session)  # 6 tokens, then 7 given ones, then 6
    turns.finish()
    left = turns.responses[name]
    run_first = 6 if first_token in (10, 13) else first_token  # adjacent given runs are one
    request = engine.request(name).extended(given, session.sampling(), after=first_token)
    turns.responses[name] = Response(list(request.output_token_ids), list(request.logprobs))
    if cut:
        engine.extend(name, given, session.sampling(), after=first_token)
    else:
        engine.remove(name)
        engine.add(request)
    assert left.finish_reason
    found = turns.finish()[name]
    whole = expected(request, found.token_ids)
    begin = len(request.prompt_token_ids) + run_first - 1
    assert experts(found, shape).tolist() == whole[begin:].tolist()
    turns.drop(name)
