"""Metrics as the text of a page for Prometheus."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Families(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def text_of(found: Sequence[Metric], collectors: Sequence[Collector]) -> bytes:
    """Returns these metrics, and those of other collectors."""
    return generate_latest(_Families([*found, *_collected(collectors)]))


def _collected(collectors: Sequence[Collector]) -> Iterator[Metric]:
    """The metrics of other collectors, without the times at which their series were made."""
    for collector in collectors:
        for metric in collector.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
