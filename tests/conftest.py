"""Models for tests: tiny random ones, made once a run, and the real one, kept in the user's cache."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dora.models import resolve_model
from dora.models.tiny import make_tiny

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, not even asked for
# A thread of torch that has no core of its own keeps the others waiting, who spin: processes of tests share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

# A command's output is as wide in a test process of several as it is in one.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# The same examples in every run, and none that fails because the machine is busy.
settings.register_profile("dora", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dora")


@pytest.fixture(autouse=True)
def logged_as_before() -> Iterator[None]:
    """What a test makes quiet, as the storms do, speaks again for the next one."""
    loggers = [logging.getLogger(name) for name in ("dora", "dora.service", "dora.worker")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


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
