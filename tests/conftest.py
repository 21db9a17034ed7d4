"""Models for tests: tiny random ones, made once a run, and the real one, kept in the user's cache."""

import asyncio
import functools
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, settings

from dora.models import resolve_model
from dora.models.tiny import make_tiny
from tests.durations import Durations

if TYPE_CHECKING:
    from tests.contract.trainer_service import StartService

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, not even asked for
# A thread of torch that has no core of its own keeps the others waiting, who spin: processes of tests share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

# A command's output is as wide in a test process of several as it is in one.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# The same examples in every run, and none that fails because the machine is busy. Fewer without the marker "full".
settings.register_profile("dora", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("dora"), max_examples=20)
settings.load_profile("dora")


TIMEOUT_LEAD_S: Final = 20.0  # a coroutine is cancelled so long before its process is interrupted


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config))
    if "not full" in config.getoption("markexpr"):
        settings.load_profile("few")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Coroutines that take too long are cancelled, so that they end what they have started.

    An interrupt by a signal is lost where it meets a callback of the event loop, and the test then goes on for ever.
    """
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            timeout_s = float(marker.args[0] if marker is not None else item.config.getini("timeout"))
            item.obj = _limited(item.obj, timeout_s - TIMEOUT_LEAD_S)


@pytest.hookimpl(optionalhook=True)  # there is none without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps the tests of a file in one process, as they may share an engine, and those of a marked group of all files.

    Simulations share nothing, and are given out one by one.
    """
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid and not nodeid.startswith("tests/sim/") else group

        def _assign_work_unit(self, node: Any) -> None:
            if node.gateway.id == "gw0":  # takes unit tests, which come last, beside the many processes of the others
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


def _limited(test: Callable[..., Any], most_s: float) -> Callable[..., Any]:
    @functools.wraps(test)
    async def limited(*arguments: Any, **named: Any) -> None:
        async with asyncio.timeout(most_s):
            await test(*arguments, **named)

    return limited


@pytest.fixture(autouse=True)
def logged_as_before() -> Iterator[None]:
    """Restores the levels of loggers that a test makes quiet, as the storms do."""
    loggers = [logging.getLogger(name) for name in ("dora", "dora.service", "dora.worker")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
async def start_service() -> "AsyncIterator[StartService]":
    """Starts scripted services for trainers, and stops them at the test's end, passed or failed.

    A gRPC server that is left to the garbage collector keeps its process from ending.
    """
    from tests.contract import trainer_service

    started = []

    async def start(store_folder: Path, reference: Path, **options: Any) -> trainer_service.Running:
        started.append(await trainer_service.start_service(store_folder, reference, **options))
        return started[-1]

    yield start
    for each in started:
        await each.server.stop(None)


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3."""
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3-MoE."""
    return make_tiny("moe", tmp_path_factory.mktemp("models") / "tiny-moe")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, converted on first use and shared with the demo."""
    return resolve_model("smollm2")
