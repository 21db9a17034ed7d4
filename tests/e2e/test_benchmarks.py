"""The short form of every benchmark measures its figures."""

import pytest

from perf.all import LIMIT_S, measured, missing
from perf.benchmarks import BENCHMARKS, Benchmark

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.name)
def test_the_short_form_measures(benchmark: Benchmark) -> None:
    if missing(benchmark):
        pytest.skip(f"{benchmark.needs} does not exist")
    assert measured(benchmark, short=True).keys() == {figure.title for figure in benchmark.figures}
