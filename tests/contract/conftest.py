"""The engines that the contract suite runs on, and the models they serve.

A process has one vLLM engine at a time, and each kind starts once in a run: its tests of all files form one group, one
process runs a group, and the engine ends with the group's last test.

Each vLLM engine here writes KV as late as its store may: a write that no step has joined is not seen by it.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import get_args

import pytest

from dora.models.tiny import TinyKind, make_tiny
from dora.ops.doctor.late import LateCpu
from dora.worker.copying import cuda_blocks, rank_stores
from dora.worker.engine import RolloutEngine
from dora.worker.fake.engine import FakeEngine
from dora.worker.vllm.device.cpu import Cpu
from dora.worker.vllm.device.port import Device, Kind
from tests import v2_runner
from tests.contract.driver import KV_TOKENS, MAX_MODEL_LEN_TOKENS, SLOTS, Driver, VersionFolder
from tests.contract.guesses import Wrong
from tests.streams import LateStreams

OF_MIXTURES = ("test_vllm.py",)  # files whose tests `make test` runs on a mixture of experts too
# Files whose tests are not of models with a state: no KV of theirs is cut, shared or written before its request.
OF_BLOCKS = ("test_engine_forks.py", "test_precopy.py", "test_shared_prefix.py", "test_written_ahead.py")
OF_CPUS = ("fake", "vllm-dense", "vllm-drafts", "vllm-moe", "vllm-hybrid")
KINDS = ("vllm-v2", "vllm-v2-moe", "vllm-v2-hybrid") if v2_runner.IS_CHOSEN else OF_CPUS
NAMED: dict[str, TinyKind] = {"fake": "dense", "drafts": "dense", "model": "dense", "v2": "dense"}
MODELS: dict[str, TinyKind] = {**NAMED, **{kind: kind for kind in get_args(TinyKind)}}


def make_engine(kind: str, model: Path) -> RolloutEngine:
    """An engine of the suite's size."""
    if kind == "fake":
        return FakeEngine(
            slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, mean_tokens=25, model=model
        )
    device: Device | Kind = "cpu"
    if kind.startswith("vllm-v2"):
        v2_runner.prepare()
        device = v2_runner.V2OnCpu()
    from dora.worker.vllm.device.port import EngineSettings
    from dora.worker.vllm.engine import VllmEngine

    speculation = f"model:{model}" if kind.endswith("drafts-model") else "history" if "drafts" in kind else ""
    return VllmEngine(
        model,
        EngineSettings(
            slots=SLOTS, kv_tokens=KV_TOKENS, max_model_len_tokens=MAX_MODEL_LEN_TOKENS, speculation=speculation
        ),
        device=device,
        router_replay=kind == "vllm-drafts-moe",
    )


class Engines:
    """The engine of the latest kind that was asked for, and the weights of each kind's versions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kind = ""
        self._engine: RolloutEngine | None = None

    def version(self, kind: str, version: int) -> Path:
        """The weights of a version of this kind's tiny model: another seed for each."""
        return make_tiny(MODELS[kind.rpartition("-")[2]], self._folder / kind / f"v{version}", seed=version)

    def of(self, kind: str) -> RolloutEngine:
        if self._engine is None or kind != self._kind:
            self.close()
            self._kind, self._engine = kind, make_engine(kind, self.version(kind, 1))
            if "drafts" in kind:
                self._engine.core.scheduler.drafter = Wrong()
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


ENGINES = pytest.StashKey[Engines]()


def group_of(item: pytest.Item | None) -> str:
    """The kind of shared vLLM engine that a test runs on; empty: none."""
    if not isinstance(item, pytest.Function) or "engines" not in item.fixturenames or not hasattr(item, "callspec"):
        return ""
    kind = str(item.callspec.params.get("kind", ""))
    return kind if kind.startswith("vllm") else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the group of each test that runs on a shared engine, and puts groups first, one after the other.

    ``make test`` has most of them with a dense model alone.
    """
    items[:] = [item for item in items if group_of(item) != "vllm-hybrid" or item.path.name not in OF_BLOCKS]
    items[:] = [item for item in items if group_of(item) != "vllm-v2-hybrid" or item.path.name == "test_v2_runner.py"]
    for item in items:
        if group := group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
            is_whole = group == "vllm-moe" and item.path.name in OF_MIXTURES
            is_short = group == "vllm-drafts" and item.path.name == "test_drafts.py"
            if group != "vllm-dense" and not group.startswith("vllm-v2") and not (is_whole or is_short):
                item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: (not group_of(item), group_of(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if group_of(item) != group_of(nextitem) and ENGINES in item.config.stash:
        item.config.stash[ENGINES].close()


@pytest.fixture(scope="package", autouse=True)
def late_writes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cpu, "kv_store", LateCpu.kv_store)
        for module in (cuda_blocks, rank_stores):  # stores of tensors that stand for a device's
            patch.setattr(module, "streams_of", lambda device: LateStreams())
        yield


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Engines:
    found = Engines(tmp_path_factory.mktemp("engines"))
    pytestconfig.stash[ENGINES] = found
    return found


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def version_folder(kind: str, engines: Engines) -> VersionFolder:
    return lambda version: engines.version(kind, version)


@pytest.fixture(scope="module")
def started_engine(kind: str, engines: Engines) -> RolloutEngine:
    return engines.of(kind)


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
