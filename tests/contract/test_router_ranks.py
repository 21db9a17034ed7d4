"""Routed experts of an engine of several ranks: those of one rank, which its requests bring along."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from dora.data.types import RoutingShape
from dora.errors import InvalidValue
from dora.kvtransfer.reblock import reblocked
from dora.kvtransfer.snapshot import KvSnapshot
from dora.models.tiny import make_tiny
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import (
    GREEDY,
    KV_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    SAMPLED,
    SLOTS,
    Driver,
    Response,
    make_request,
    mixed_requests,
    run,
)
from tests.refusals import refused

pytestmark = [  # a process imports vLLM for many tests; `make test` tries routed experts of one rank
    pytest.mark.xdist_group("vllm-dense"),
    pytest.mark.full,
]

REQUESTS = mixed_requests(4)
PROMPT = make_request(7, GREEDY, 100)
SAMPLE = replace(PROMPT, request_id="sample", sampling=replace(SAMPLED, seed=5))


def make_ranked(model: Path, **ranks: int) -> VllmEngine:
    engine = VllmEngine(
        model,
        EngineSettings(slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, **ranks),
        router_replay=True,
        lost=lambda _: None,
    )
    engine.load_weights(1, model, None)
    return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("moe", tmp_path_factory.mktemp("ranks") / "v1", seed=1, kv_heads=2)


@dataclass(frozen=True)
class Alone:
    """The results of an engine of one rank in this process."""

    responses: dict[str, Response]
    snapshot: KvSnapshot  # of PROMPT, on its way


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    engine = make_ranked(model)
    responses = run(engine, [*REQUESTS, PROMPT, SAMPLE])
    driver = Driver(engine)
    driver.add(PROMPT)
    driver.step(5)
    snapshot = driver.take_out(PROMPT.request_id)
    engine.close()
    return Alone(responses, snapshot)


@pytest.fixture(scope="module", params=["tensor_parallel", "pipeline_parallel"])
def engine(request: pytest.FixtureRequest, model: Path, alone: Alone) -> Iterator[VllmEngine]:
    """Two ranks that share each layer, or the layers. vLLM keeps some state for a process, so ``alone`` comes first."""
    engine = make_ranked(model, **{request.param: 2})
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: VllmEngine) -> Iterator[Driver]:
    driver = Driver(engine)
    yield driver
    driver.clear()


def rows_of(responses: dict[str, Response]) -> dict[str, tuple[list[int], bytes]]:
    """Tokens, and experts in the order of their ids: which of two weighs more is up to rounding."""
    return {
        name: (each.token_ids, np.sort(np.array(each.routed_experts, np.uint8).reshape(-1, 2)).tobytes())
        for name, each in responses.items()
    }


def test_a_prompt_that_comes_from_one_rank_brings_its_rows_to_a_sample(
    engine: VllmEngine, driver: Driver, alone: Alone
) -> None:
    """The first test: these ranks have not routed this prompt."""
    taken = alone.snapshot
    driver.responses[PROMPT.request_id] = replace(
        alone.responses[PROMPT.request_id],
        token_ids=list(taken.request.output_token_ids),
        logprobs=list(taken.request.logprobs),
        routed_experts=alone.responses[PROMPT.request_id].routed_experts[: taken.kv_tokens * 4],
        finish_reason=None,
    )
    engine.take_in(reblocked(taken, engine.layout))
    driver.step(2)
    driver.add(SAMPLE)
    expected = {name: alone.responses[name] for name in driver.responses}
    assert rows_of(driver.finish()) == rows_of(expected)
    assert engine.load().reprefilled_tokens == 0


def test_rows_are_those_of_one_rank(engine: VllmEngine, alone: Alone) -> None:
    assert len(engine.ranks) == 2
    expected = {each.request_id: alone.responses[each.request_id] for each in REQUESTS}
    assert rows_of(run(engine, REQUESTS)) == rows_of(expected)


def test_an_engine_that_routes_otherwise_than_its_config_says_is_refused() -> None:
    from dora.worker.vllm.device.rank import RankKv, RankRouting
    from dora.worker.vllm.ranks import check_routing

    shape = RoutingShape(layers=3, top_k=2, experts=8)
    nowhere = RankKv(1, -1, 0, (), frozenset())
    check_routing([RankRouting(nowhere, ((2, 8),)), RankRouting(nowhere, ((2, 8), (2, 8)))], shape)
    with refused(InvalidValue, field="workers.router_replay", value=True, names=("2",)):
        check_routing([RankRouting(nowhere, ((2, 8),)), RankRouting(nowhere, ((2, 8),))], shape)
    with refused(InvalidValue, field="workers.router_replay", value=True, allowed="false: no hook"):
        check_routing([RankRouting(nowhere, (), "no hook")], shape)
