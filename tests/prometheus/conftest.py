"""Prometheus and promtool, or a skip with the reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prometheus.fetch import tool


@pytest.fixture
def binary() -> Callable[[str], Path]:
    """Returns the path of ``prometheus`` or ``promtool``."""

    def found(name: str) -> Path:
        path = tool(name)
        if path is None:
            pytest.skip(f"there is no {name}: `make prometheus` fetches it from Debian's package")
        return path

    return found
