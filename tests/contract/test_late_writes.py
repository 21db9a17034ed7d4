"""That a step which does not wait for the KV it brings is found, by each kind of engine and each way in which KV comes.

The contract suite's stores write as late as they may (``conftest``). Without the join after scheduling, a request that
is taken in computes its next token over blocks that lack its KV.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dora.models.tiny import TinyKind, make_tiny
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.port import EngineSettings
from dora.worker.vllm.engine import VllmEngine
from tests.contract.driver import KV_TOKENS, MAX_MODEL_LEN_TOKENS, SAMPLED, SLOTS, Driver, Response, make_request
from tests.device_ranks import AsDevices

JOIN = "dora.worker.vllm.connector.SnapshotConnector.join"  # imported by the tests alone: it imports vLLM
pytestmark = pytest.mark.xdist_group("vllm-moe")  # a process imports vLLM for many tests

LONG = make_request(1, replace(SAMPLED, max_tokens=20), 100)
KINDS: dict[str, tuple[TinyKind, Cpu, dict[str, int]]] = {
    "dense": ("dense", Cpu(), {}),
    "moe": ("moe", Cpu(), {}),
    "window": ("window", Cpu(), {}),
    "mla": ("mla", Cpu(), {}),
    "ranks": ("dense", Cpu(), {"tensor_parallel": 2}),
    "ranks of devices": ("dense", AsDevices(), {"pipeline_parallel": 2}),
}
SHORT = ("dense",)  # those of `make test`


@pytest.fixture(
    scope="module", params=[pytest.param(kind, marks=[pytest.mark.full] * (kind not in SHORT)) for kind in KINDS]
)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    kind, device, split = KINDS[request.param]
    model = make_tiny(kind, tmp_path_factory.mktemp("model") / kind, seed=1, kv_heads=2)
    engine = VllmEngine(
        model,
        EngineSettings(SLOTS, KV_TOKENS, MAX_MODEL_LEN_TOKENS, **split),
        device=device,
        lost=lambda reason: None,
    )
    engine.load_weights(1, model, None)
    yield engine
    engine.close()


def stays(driver: Driver) -> None:
    pass


def leaves_and_returns(driver: Driver) -> None:
    driver.engine.take_in(driver.take_out("r1"))


def request(engine: VllmEngine, between: Callable[[Driver], None]) -> dict[str, Response]:
    driver = Driver(engine)
    driver.add(LONG)
    driver.step(5)
    between(driver)
    return driver.finish()


def session(engine: VllmEngine, between: Callable[[Driver], None]) -> dict[str, Response]:
    """After the tokens of its next turn were given."""
    driver = Driver(engine)
    driver.add(replace(LONG, keeps=True))
    driver.finish()
    given = (5, 7, 9)
    engine.extend("r1", given, replace(SAMPLED, max_tokens=5))
    driver.responses["r1"].finish_reason = None
    driver.responses["r1"].token_ids += given
    driver.responses["r1"].logprobs += [0.0] * len(given)
    between(driver)
    found = driver.finish()
    engine.remove("r1")
    return found


def fork(engine: VllmEngine, between: Callable[[Driver], None]) -> dict[str, Response]:
    """Its last block has other tokens now. Where a window has left them behind, they are computed again first."""
    driver = Driver(engine)
    driver.add(replace(LONG, keeps=True))
    driver.finish()
    given = (5, 7, 9)
    engine.extend("r1", given, replace(SAMPLED, max_tokens=5), after=2)
    response = driver.responses["r1"] = Response(driver.responses["r1"].token_ids[:2], [])
    response.token_ids += given
    response.logprobs += [0.0] * len(response.token_ids)
    driver.step(2)
    between(driver)
    found = driver.finish()
    engine.remove("r1")
    return found


@pytest.mark.parametrize("play", [request, session, fork])
def test_a_step_that_does_not_wait_for_the_kv_of_what_it_takes_in_is_found(
    started: VllmEngine, play: Callable[[VllmEngine, Callable[[Driver], None]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = play(started, stays)
    assert play(started, leaves_and_returns) == alone
    monkeypatch.setattr(JOIN, lambda self: None)
    assert play(started, leaves_and_returns) != alone
