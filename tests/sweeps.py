"""Sizes of sweeps: ``make test`` tries about a tenth of each, ``make test-all`` all of it."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings


def seeds_of(few: int, all_: int, first: int = 0) -> list[Any]:
    """Parameters of a test: ``few`` seeds from ``first``, and those that make ``all_`` of them."""
    rest = pytest.param(range(first + few, first + all_), marks=pytest.mark.full, id="more")
    return [pytest.param(range(first, first + few), id="few"), rest]


def counts_of(few: int, all_: int) -> list[Any]:
    """Parameters of a test that tries so many things, one after the other."""
    return [few, pytest.param(all_, marks=pytest.mark.full)]


def tenth_of(cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: every tenth case is in ``make test``."""
    return [pytest.param(case, marks=pytest.mark.full if place % 10 else ()) for place, case in enumerate(cases)]


def some_of(cases: Iterable[Any], *short: Any) -> list[Any]:
    """Parameters of a test: of the cases, ``make test`` has these few."""
    return [pytest.param(case, marks=() if case in short else pytest.mark.full) for case in cases]


def full(*cases: Sequence[Any]) -> list[Any]:
    """Parameters of a test with several, which ``make test-all`` alone tries: each case has a value of each."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]


def examples(whole: int) -> int:
    """How many of a property's examples are tried: as many of ``whole`` as the profile has of 100."""
    return max(1, whole * settings().max_examples // 100)
