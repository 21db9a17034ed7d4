"""Shared fixtures: the tiny model, its tokenizer and a cache for prompts; a service for calls."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dora.models.tiny import make_tiny
from dora.orchestrator.main import ServiceHandle
from dora.prompts.tokenizer import ChatTokenizer
from tests.service import configured, running


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(tiny: Path, cache: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny, cache)


@pytest.fixture
async def handle(tiny_dense: Path) -> AsyncIterator[ServiceHandle]:
    """A service without workers."""
    async with running(configured(tiny_dense, workers__count=0)) as handle:
        yield handle
