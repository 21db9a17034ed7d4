"""The engines that the contract suite runs on, and the models they serve. A process has one vLLM engine at a time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dora.models.tiny import make_tiny
from dora.worker.engine import RolloutEngine
from dora.worker.fake_engine import FakeEngine
from tests.contract.driver import KV_TOKENS, MAX_MODEL_LEN_TOKENS, SLOTS, Driver, VersionFolder

KINDS = ("fake", "vllm-dense", "vllm-moe")


def make_engine(kind: str, model: Path) -> RolloutEngine:
    """An engine of the suite's size."""
    if kind == "fake":
        return FakeEngine(
            slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, mean_tokens=25, model=model
        )
    from dora.worker.vllm_engine import VllmEngine

    return VllmEngine(model, slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def version_folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> VersionFolder:
    """The weights of a version of this kind's tiny model: another seed for each."""
    architecture = "moe" if kind == "vllm-moe" else "dense"
    base = tmp_path_factory.mktemp(kind)
    return lambda version: make_tiny(architecture, base / f"v{version}", seed=version)


@pytest.fixture(scope="module")
def started_engine(kind: str, version_folder: VersionFolder) -> Iterator[RolloutEngine]:
    engine = make_engine(kind, version_folder(1))
    yield engine
    engine.close()


@pytest.fixture
def engine(started_engine: RolloutEngine, version_folder: VersionFolder) -> RolloutEngine:
    """The engine with version 1 and no request."""
    started_engine.load_weights(1, version_folder(1), None)
    return started_engine


@pytest.fixture
def driver(engine: RolloutEngine) -> Iterator[Driver]:
    driver = Driver(engine)
    yield driver
    driver.clear()
