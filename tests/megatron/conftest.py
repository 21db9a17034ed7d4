"""The tests of the Megatron trainer: every layout for twenty steps, or a short form."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every layout of the Megatron trainer, for twenty steps")
