"""Seeds in two parts: the first ones belong to ``make test``, all others to ``make test-all``."""

from typing import Any

import pytest


def seeds_of(few: int, all_: int, first: int = 0) -> list[Any]:
    """Parameters of a test: ``few`` seeds from ``first``, and those that make ``all_`` of them."""
    rest = pytest.param(range(first + few, first + all_), marks=pytest.mark.full, id="more")
    return [pytest.param(range(first, first + few), id="few"), rest]
