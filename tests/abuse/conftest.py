"""What the tests of prompts share: the tiny model, its tokenizer, and a cache for them."""

from pathlib import Path

import pytest

from dora.models.tiny import make_tiny
from dora.prompts import ChatTokenizer


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("dense", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(tiny: Path, cache: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny, cache)
